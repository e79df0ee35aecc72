"""Jets through scaled dot-product attention, in memory linear in the number of tokens.

    s = scale · q kᵀ (Leibniz);  softcap · tanh(s / softcap);  + mask;  p = softmax(s);  y = p v

(docs/how_it_works.md). Dropout multiplies every stream of p by the same keep / (1 − dropout_p),
after the softmax. The kernels never build a T × Tk tensor; the reference does.

The CPU's kernel for sums of squares and more than four directions takes no soft cap and no dropout:
order 1 then goes in passes, a sum to the reference. The CUDA kernels take one or two directions:
more go in passes of two. Jets in float64, heads above 256 and those of which no tile fits the GPU's
shared memory go to the reference.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .activation import DERIVATIVES, pointwise_jet, product_jet
from .directions import number_on, philox4x32_10
from .library import (
    CUDA_DIRECTIONS,
    Streams,
    available,
    constant_when_compiled,
    in_passes,
    register_operator,
    streams_of,
    wide_dtype,
    widened,
)
from .softmax import softmax_jet_reference

DROPOUT_COUNTER = 0x4A414354
"""Last word of the counters of attention's dropout ("JACT"); no other draw uses it."""


class Settings(NamedTuple):
    """Arguments of `attention_jet` other than tensors, in the order of the operator's schema; the
    window is (left, right)."""

    q: int
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float
    dropout_p: float
    summed: int


# ---- the reference -------------------------------------------------------------------------


def _softcap_jet(s: Tensor, softcap: float, streams: Streams) -> Tensor:
    """The jet of c tanh(s/c): f' = tanh'(s/c), f'' = tanh''(s/c) / c."""
    t, t1, t2 = DERIVATIVES["tanh"](s[0] / softcap)
    return pointwise_jet((softcap * t, t1, t2 / softcap), s, streams)


def visible_keys(
    queries: int, keys: int, causal: bool, window: tuple[int, int], device: torch.device
) -> Tensor | None:
    """Return [T, Tk] bool, True where query i sees key j; None where each sees every key.

    Causal: j ≤ i, both counted from the first; window: i − left ≤ j ≤ i + right, −1 unlimited.
    """
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return None
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def dropout_mask(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    p: float,
    seed: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Return [B, H, T, Tk] bool, True where a weight is kept, as the kernels do bit for bit.

    Philox counter (b·H + h, i, j // 4, "JACT"), key = seed; of its four words number j % 4 decides:
    kept where (word >> 8) · 2⁻²⁴ ≥ p.
    """
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row = torch.arange(queries, device=device).view(-1, 1)
    quad = torch.arange((keys + 3) // 4, device=device)
    words = philox4x32_10((head, row, quad, torch.full_like(quad, DROPOUT_COUNTER)), seed)
    number = torch.stack(words, -1).flatten(-2)[..., :keys]
    return (number >> 8).double() * 2.0**-24 >= p


def _hidden(primal: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
    """Return the primal scores [B, H, T, Tk] with mask, causality and window applied.

    The mask is added, so that a NaN it hides stays one, as in torch's attention and the kernels.
    """
    if mask is not None and mask.dtype == torch.bool:
        hides = torch.zeros_like(mask, dtype=primal.dtype).masked_fill(~mask, -math.inf)
        primal = primal + hides
    elif mask is not None:
        primal = primal + mask.to(primal.dtype)
    queries, keys = primal.shape[-2:]
    window = (settings.left, settings.right)
    visible = visible_keys(queries, keys, settings.causal, window, primal.device)
    return primal if visible is None else primal.masked_fill(visible.logical_not(), -math.inf)


def _check(mask: Tensor | None, settings: Settings) -> None:
    """Refuse what torch would accept without a word."""
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"mask has dtype {mask.dtype}; expected bool (True takes part) or a float dtype "
            "(added to the scores): convert it with .to()."
        )
    if min(settings.left, settings.right) < -1:
        raise ValueError(
            f"window is {(settings.left, settings.right)}; expected how many keys to the left and "
            "to the right take part, −1 for no limit."
        )
    if not 0 <= settings.softcap < math.inf:
        raise ValueError(
            f"softcap is {settings.softcap}; expected a positive bound, or 0 for none."
        )
    if not 0 <= settings.dropout_p < 1:
        raise ValueError(
            f"dropout_p is {settings.dropout_p}; expected a probability below 1, or 0 for none."
        )


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    settings: Settings,
) -> Tensor:
    _check(mask, settings)
    q, (batch, heads, queries, _), (key_heads, keys) = settings.q, query.shape[1:], key.shape[2:4]
    groups = heads // key_heads if key_heads else 1

    def times(a: Tensor, b: Tensor) -> Tensor:
        """Return a b for every stream and head; groups of heads share b."""
        # [S, B, Hk, groups, T, ·] @ [S, B, Hk, 1, ·, ·]: keys and values are not repeated.
        product = a.unflatten(2, (key_heads, groups)) @ b.unsqueeze(3)
        return product.reshape(len(product), batch, heads, *product.shape[-2:])

    # Every step is a jet of its own, [S, B, H, T, Tk]: s_i = q_i kᵀ + q kᵢᵀ and so on.  What does
    # not depend on the input, as the mask and what is hidden, changes stream 0 alone: where it puts
    # −inf there, p and with it every stream of p is 0.
    streams = streams_of(query, q, settings.summed)
    s = product_jet(settings.scale * widened(query), widened(key).mT, streams, times)
    if settings.softcap > 0:
        s = _softcap_jet(s, settings.softcap, streams)
    s = torch.cat([_hidden(s[0], mask, settings).unsqueeze(0), s[1:]])
    p = softmax_jet_reference(s, q, masked=True, summed=settings.summed)
    if settings.dropout_p > 0:
        assert seed is not None
        mask = dropout_mask(batch, heads, queries, keys, settings.dropout_p, seed, p.device)
        p = p * (mask.to(p.dtype) / (1 - settings.dropout_p))
    return product_jet(p, widened(value), streams, times).to(query.dtype)


def _default_scale(query: Tensor) -> float:
    return 1 / math.sqrt(max(query.shape[-1:].numel(), 1))


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
    dropout_seed: int | Tensor = 0,
    summed: int = 0,
) -> Tensor:
    """Push jets as `attention_jet`, in pure torch, on any device.

    It builds T × Tk tensors; an additive mask may require a gradient here.
    """
    scale = _default_scale(query) if scale is None else scale
    settings = Settings(q, scale, causal, *window, softcap or 0.0, dropout_p, summed)
    seed = number_on(query.device, dropout_seed)
    return _reference(query, key, value, mask, seed, settings)


# ---- what the CUDA kernels take ------------------------------------------------------------

_CUDA_HEAD = 256


@constant_when_compiled
def _tile_fits(device: int, element: int, streams: int, size: int, value_size: int) -> bool:
    """Tell whether the smallest tile of such heads fits a block's shared memory on this GPU."""
    from .._C import attention_jet_bytes

    properties = torch.cuda.get_device_properties(device)
    limit = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return attention_jet_bytes(element, streams, size, value_size) <= limit


def _kernels_take(query: Tensor, value: Tensor, q: int) -> bool:
    """Tell whether the kernels of query's device serve these heads, in passes or at once."""
    if query.device.type != "cuda":
        return True
    size, value_size = int(query.shape[-1]), int(value.shape[-1])
    if query.dtype == torch.float64 or max(size, value_size) > _CUDA_HEAD:
        return False
    # The tile of one pass is what has to fit, and passes take at most two directions.
    one_pass = min(q, CUDA_DIRECTIONS)
    streams = 1 + one_pass + (query.shape[0] > 1 + q)
    device = torch.cuda.current_device() if query.device.index is None else query.device.index
    return _tile_fits(device, query.element_size(), streams, size, value_size)


# ---- the operator --------------------------------------------------------------------------


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
    dropout_seed: int | Tensor = 0,
    summed: int = 0,
) -> Tensor:
    """Push a 2-jet through softmax(scale · q kᵀ + mask) v without a T × Tk tensor.

    A query that sees no key gives zeros in every stream, as in torch's attention.

    Args:
        query: a stacked jet [S, B, H, T, D].
        key: [S, B, Hk, Tk, D] of query's dtype; Hk divides H, query head h uses key head
            h // (H / Hk).
        value: [S, B, Hk, Tk, Dv] of query's dtype.
        mask: broadcastable to [B, H, T, Tk], of the primal scores only: bool (True takes part) or
            of a float dtype (added; −inf allowed); carries no gradient.
        q, summed: as for `activation_jet`.
        scale: of the scores; None: D^(−1/2).
        causal: query i sees keys j ≤ i, both counted from the first.
        window: (left, right): query i sees keys i − left ≤ j ≤ i + right; −1 for no limit.
        softcap: scores become softcap · tanh(scores / softcap) before the masks; 0 for none.
        dropout_p: probability that a weight is dropped, the others being divided by 1 − dropout_p;
            one mask for all streams, forward and backward.
        dropout_seed: 64 bits that decide which weights (`dropout_mask`): a number, or an int64
            scalar on query's device, which a CUDA graph reads anew at each replay.

    Returns:
        [S, B, H, T, Dv] of query's dtype, laid out as [S, B, T, H, Dv], so that
        ``.transpose(-3, -2).flatten(-2)`` copies nothing; differentiable in query, key and value
        (the second backward builds T × Tk tensors).

    Raises:
        ValueError: a mask that requires a gradient.

    Example:
        >>> heads = torch.ones(2, 1, 1, 3, 4)  # one direction, three tokens
        >>> attention_jet(heads, heads, heads, q=1, causal=True).shape
        torch.Size([2, 1, 1, 3, 4])
    """
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "attention_jet: mask requires a gradient, which this operator does not give: detach "
            "it, or use attention_jet_reference."
        )
    scale = _default_scale(query) if scale is None else scale
    settings = Settings(q, scale, causal, *window, softcap or 0.0, dropout_p, summed)
    seed = number_on(query.device, dropout_seed) if dropout_p else None
    # A sum of squares with a soft cap or dropout has no kernel; order 1 with them goes in passes.
    pairs_alone = bool(softcap or dropout_p)
    taken = available("attention_jet", query.device, sums=summed > 0)
    taken = taken and not (summed and pairs_alone)
    if not taken or not _kernels_take(query, value, q):
        return _reference(query, key, value, mask, seed, settings)

    def run(query: Tensor, key: Tensor, value: Tensor, q: int) -> Tensor:
        y, _ = torch.ops.jachess.attention_jet(query, key, value, mask, seed, q, *settings[1:])
        return y.transpose(2, 3)  # as it lies in memory, so that passes are stacked like it

    return in_passes(run, (query, key, value), q, any_number=not pairs_alone).transpose(2, 3)


# ---- registration --------------------------------------------------------------------------


def _empty_by_token(x: Tensor, heads: int, tokens: int, size: int) -> Tensor:
    """Return an empty [S, B, heads, tokens, size], laid out as [S, B, tokens, heads, size]."""
    return x.new_empty(*x.shape[:2], tokens, heads, size).transpose(2, 3)


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    y = _empty_by_token(query, query.shape[2], query.shape[3], value.shape[-1])
    return y, query.new_empty(query.shape[:-1], dtype=wide_dtype(query.dtype))


def _fake_backward(gy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(_empty_by_token(x, *x.shape[2:]) for x in inputs[:3])


register_operator(
    "attention_jet",
    lambda query, key, value, mask, seed, *settings: _reference(
        query, key, value, mask, seed, Settings(*settings)
    ),
    tensors=5,
    differentiable=3,
    fake=_fake,
    fake_backward=_fake_backward,
    statistics=True,
)
