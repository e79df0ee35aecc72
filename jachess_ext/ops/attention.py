"""Jets through scaled dot-product attention: wrapper, reference, fake kernels and autograd
of `jachess::attention_jet`, whose memory is linear in the number of tokens.

The kernels keep, tile by tile, the jets of the softmax's numerator N = Σ e^{s−m} v and denominator
L = Σ e^{s−m} (docs/how_it_works.md) and form the jet of N/L once; the backward recomputes the
tiles. The reference is `attention_formula`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .attention_formula import AttentionSettings, attention_formula
from .checks import check_jet, widened
from .library import available
from .registration import gradient_of_backward, register

_OP = "attention_jet"
_MAX_HEAD_SIZE_CUDA = 256


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, q: int) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_jet(_OP, x, q, name)
        if x.dim() != 5:
            raise ValueError(
                f"{_OP}: {name} has shape {list(x.shape)}; expected [S, B, H, T, D], streams in "
                "front, then batch, heads, tokens and head size: add or merge dimensions."
            )
        if x.dtype != query.dtype or x.device != query.device:
            raise TypeError(
                f"{_OP}: {name} is {x.dtype} on {x.device} but query is {query.dtype} on "
                f"{query.device}: convert it with .to(query)."
            )
    if key.shape[:2] != query.shape[:2] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{_OP}: key has shape {list(key.shape)}; expected [S, B, Hk, Tk, D] with the S, B and "
            f"D of query, which is {list(query.shape)}."
        )
    if value.shape[:4] != key.shape[:4]:
        raise ValueError(
            f"{_OP}: value has shape {list(value.shape)}; expected [S, B, Hk, Tk, Dv] with all but "
            f"Dv as in key, which is {list(key.shape)}."
        )
    heads, key_heads = query.shape[2], key.shape[2]
    if heads % key_heads if key_heads else heads:
        raise ValueError(
            f"{_OP}: query has {heads} heads and key {key_heads}; expected a multiple, so that "
            "each key head serves equally many query heads."
        )


def _check_mask(mask: Tensor | None, query: Tensor, keys: int) -> None:
    if mask is None:
        return
    full = [*query.shape[1:4], keys]
    ends = full[4 - mask.dim() :] if mask.dim() <= 4 else None
    if ends is None or any(m not in (1, n) for m, n in zip(mask.shape, ends, strict=True)):
        raise ValueError(
            f"{_OP}: mask has shape {list(mask.shape)}, which does not broadcast to [B, H, T, Tk], "
            f"here {full}: reshape or expand it."
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(
            f"{_OP}: mask has dtype {mask.dtype}; expected bool (True takes part) or a float dtype "
            "(added to the scores): convert it with .to()."
        )
    if mask.device != query.device:
        raise ValueError(
            f"{_OP}: mask is on {mask.device} but query is on {query.device}: move it with "
            ".to(query.device)."
        )


def _checked(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    q: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    dropout_p: float,
    dropout_seed: int,
) -> AttentionSettings:
    """The settings, after a check of all arguments."""
    query, key, _ = tensors
    _check_tensors(*tensors, q)
    _check_mask(mask, query, key.shape[3])
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(
            f"{_OP}: window is {(left, right)}; expected how many keys to the left and to the "
            "right take part, −1 for no limit."
        )
    softcap = softcap or 0.0
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"{_OP}: softcap is {softcap}; expected a positive bound, or 0 for none.")
    if not 0 <= dropout_p < 1:
        raise ValueError(
            f"{_OP}: dropout_p is {dropout_p}; expected a probability below 1, or 0 for no dropout."
        )
    if not -(2**63) <= dropout_seed < 2**63:
        raise ValueError(
            f"{_OP}: dropout_seed is {dropout_seed}; expected 64 bits, −2⁶³ to 2⁶³ − 1: reduce it."
        )
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    return AttentionSettings(q, scale, causal, left, right, softcap, dropout_p, dropout_seed)


def attention_jet_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    q: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
) -> Tensor:
    """Pure-torch reference of `attention_jet`: any device, any number of backward passes,
    whole T × Tk tensors; an additive mask may require a gradient here.

    Args, returns and raises: as `attention_jet`. 16-bit types are computed in fp32.
    """
    settings = _checked(
        *((query, key, value), mask, q, scale, causal, window, softcap, dropout_p, dropout_seed)
    )
    return attention_formula(query, key, value, mask, settings)


def attention_jet(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    q: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
) -> Tensor:
    """Push a 2-jet through softmax(scale · q kᵀ + mask) v without a T × Tk tensor.

    A query that may look nowhere gives zeros in every stream, as in torch's attention.

    Args:
        query: [S, B, H, T, D] stacked streams, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32, bf16 or
            fp16 (the 16-bit types are computed in fp32); any strides, any size including zero.
        key: [S, B, Hk, Tk, D] of query's dtype; Hk divides H, query head h uses key head
            h // (H / Hk).
        value: [S, B, Hk, Tk, Dv] of query's dtype.
        mask: broadcastable to [B, H, T, Tk], of the primal scores only: bool (True takes part) or
            of a float dtype (added; −inf allowed); carries no gradient.
        q: number of directions, 1 to 4.
        scale: of the scores; D^(−1/2) if None.
        causal: query i looks at keys j ≤ i, both counted from the first.
        window: (left, right): query i looks at keys i − left ≤ j ≤ i + right; −1 for no limit.
        softcap: scores become softcap · tanh(scores / softcap) before the masks; 0 for none.
        dropout_p: probability that a weight is dropped, the others being divided by 1 − dropout_p;
            one mask for all streams, forward and backward.
        dropout_seed: 64 bits that decide which (`attention_formula.dropout_mask`).

    Returns:
        [S, B, H, T, Dv] of query's dtype, laid out as [S, B, T, H, Dv], so that
        ``.transpose(-3, -2).flatten(-2)`` copies nothing; differentiable any number of times in
        query, key and value (the second backward builds T × Tk tensors). Where no compiled kernel
        serves the device, the pure-torch reference is used.

    Raises:
        ValueError: shapes, q, window, softcap or dropout_p as not described above; a mask that
            requires a gradient; on CUDA a head size above 256.
        TypeError: dtypes or devices that differ, or are not supported.
    """
    settings = _checked(
        *((query, key, value), mask, q, scale, causal, window, softcap, dropout_p, dropout_seed)
    )
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{_OP}: mask requires a gradient, which this operator does not give: detach it, or "
            "use attention_jet_reference."
        )
    if not available(_OP, query.device):
        return attention_formula(query, key, value, mask, settings)
    largest = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cuda" and largest > _MAX_HEAD_SIZE_CUDA:
        raise ValueError(
            f"{_OP}: the head size is {largest}; the CUDA kernels serve up to "
            f"{_MAX_HEAD_SIZE_CUDA}: use attention_jet_reference."
        )
    return torch.ops.jachess.attention_jet(query, key, value, mask, *settings)[0]


# ---- registrations: fake kernels and autograd ----------------------------------------------


def _empty_by_token(x: Tensor, heads: int, tokens: int, size: int) -> Tensor:
    """[S, B, heads, tokens, size], laid out as [S, B, tokens, heads, size]."""
    return x.new_empty(*x.shape[:2], tokens, heads, size).transpose(2, 3)


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    y = _empty_by_token(query, query.shape[2], query.shape[3], value.shape[-1])
    return y, query.new_empty(query.shape[:-1], dtype=widened(query).dtype)


def _fake_backward(
    gy: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return _empty_by_token(x, x.shape[2], x.shape[3], x.shape[4])

    return like(query), like(key), like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.arguments = inputs
    y, stats = output
    # The statistics are saved values, not results: a gradient in them would be dropped.
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(query, key, value, mask, y, stats)


def _backward(ctx: Any, gy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.jachess.attention_jet_backward(gy, *ctx.saved_tensors, *ctx.arguments)
    return (*gradients, *([None] * 9))


def _save_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    gy, query, key, value, mask, _, _, *ctx.arguments = inputs
    ctx.save_for_backward(gy, query, key, value, mask)


def _backward_of_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    gy, query, key, value, mask = ctx.saved_tensors
    settings = AttentionSettings(*ctx.arguments)
    gradients = gradient_of_backward(
        lambda query, key, value: attention_formula(query, key, value, mask, settings),
        [query, key, value],
        [gy],
        cotangents,
    )
    return (*gradients, *([None] * 11))


register(
    _OP,
    fake=_fake,
    fake_backward=_fake_backward,
    save=_save,
    backward=_backward,
    save_backward=_save_backward,
    double_backward=_backward_of_backward,
)
