"""Functions of FlashAttention, Liger Kernel, transformers and torch's varlen attention, by name.

None of the libraries is imported.  A setting that a rule does not cover is refused, as any other
Function is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.attention import visible_keys
from ..functions import by_forward, library_rule
from ..registry import AutogradFunction, frames, function_refusal, jet_rule, missing_rule
from ..strides import stack_laid_out
from ..tensor import common_layout, lift
from .attention import attention


def _refuse(function: AutogradFunction, **settings: object) -> None:
    """Refuse settings that are neither absent nor switched off."""
    for name, value in settings.items():
        if isinstance(value, Tensor) or value:
            raise function_refusal(function, f"was called with {name}, which has no rule")


# ---- FlashAttention ----------------------------------------------------------------------------


@library_rule("flash_attn", "FlashAttnFunc", "FlashAttnVarlenFunc")
@library_rule("flash_attn", "FlashAttnKVPackedFunc", "FlashAttnVarlenKVPackedFunc")
@library_rule("flash_attn", "FlashAttnQKVPackedFunc", "FlashAttnVarlenQKVPackedFunc")
def flash_attention(
    function: AutogradFunction,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    kv: Tensor | None = None,
    qkv: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool = False,
    is_grad_enabled: bool = True,
    max_seqlen: object = None,
    max_seqlen_q: object = None,
    max_seqlen_k: object = None,
    **others: object,
) -> Tensor:
    """Compute FlashAttention 2: ``[B, T, H, d]``, or ``[tokens, H, d]`` of several sequences."""
    _refuse(function, dropout_p=dropout_p, **others)
    if qkv is not None:
        q, k, v = qkv.unbind(-3)
    elif kv is not None:
        k, v = kv.unbind(-3)
    assert q is not None and k is not None and v is not None
    settings = softmax_scale, causal, tuple(window_size), softcap
    starts = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    if starts is None:
        return _flash(q, k, v, *settings)
    return _sequences(q, k, v, starts, starts if cu_seqlens_k is None else cu_seqlens_k, *settings)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, ...],
    softcap: float,
) -> Tensor:
    """Return attention of ``[B, T, H, d]``, laid out as q.

    The last query stands beside the last key, where torch sets the first beside the first; a query
    that sees no key gives zeros.
    """
    layout = common_layout(q, k, v)
    query, key, value = (lift(tensor, layout).transpose(1, 2) for tensor in (q, k, v))
    left, right = max(window[0], -1), 0 if causal else max(window[1], -1)
    queries, keys = query.shape[2], key.shape[2]
    mask, size = None, max(queries, keys)
    if queries != keys:  # the lower right corner of a square
        mask = visible_keys(size, size, False, (left, right), q.device)
        mask = None if mask is None else mask[size - queries :, size - keys :]
        left = right = -1
    out = attention(
        *(query, key, value, mask),
        scale=scale,
        enable_gqa=True,
        window=(left, right),
        softcap=softcap,
    )
    out = lift(out.transpose(1, 2), layout)
    strides = torch.empty_like(lift(q, layout).primal, device="meta").stride()
    return out.with_streams(stack_laid_out(out.streams, strides))


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *settings: Any
) -> Tensor:
    """Return attention of sequences that lie one behind another: ``[tokens, H, d]``."""
    lengths, key_lengths = (cu.diff().tolist() for cu in (starts, key_starts))
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    return torch.cat([_flash(*(x.unsqueeze(0) for x in part), *settings)[0] for part in parts])


def adopt_varlen() -> None:
    """Register the rule of torch's ``varlen_attn``, once its module is imported."""
    if "torch.nn.attention.varlen" in sys.modules:
        operator = torch.ops.torch_attn._varlen_attn
        jet_rule(operator, operator.default)(_varlen)


def _varlen(*args: object, **kwargs: object) -> tuple[Tensor, None, None]:
    """Compute ``torch_attn::_varlen_attn``; without its second result, the scores' logsumexp."""
    operator = torch.ops.torch_attn._varlen_attn
    for frame in frames():
        if frame.f_code.co_name == "varlen_attn" and frame.f_locals.get("return_aux") is not None:
            raise missing_rule(operator, "called with return_aux")
    names = [argument.name for argument in operator.default._schema.arguments]
    options: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    q, k, v, starts, key_starts = (options.pop(name) for name in names[:5])
    causal, scale = options.pop("is_causal", False), options.pop("scale", None)
    window = options.pop("window_size", None) or (-1, -1)
    for name in ("max_q", "max_k", "enable_gqa", "num_splits"):
        options.pop(name, None)
    if any(value is not None for value in options.values()):
        raise missing_rule(operator, f"called with {', '.join(options)}")
    key_starts = starts if key_starts is None else key_starts
    return _sequences(q, k, v, starts, key_starts, scale, causal, tuple(window), 0.0), None, None


@library_rule("flash_attn", "IndexFirstAxis")
def index_first_axis(function: AutogradFunction, *, input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows that are no padding."""
    return input[indices]


@library_rule("flash_attn", "IndexPutFirstAxis")
def index_put_first_axis(
    function: AutogradFunction, *, values: Tensor, indices: Tensor, first_axis_dim: int
) -> Tensor:
    """Return rows of zeros, in which some are set."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


# ---- Liger Kernel ------------------------------------------------------------------------------


@library_rule("liger_kernel", "LigerRMSNormFunction")
def liger_rms_norm(
    function: AutogradFunction,
    *,
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: object = "llama",
    in_place: bool = True,
    row_mode: object = None,
    **others: object,
) -> Tensor:
    """Compute x (mean x² + ε)^(−1/2) · (offset + w); halves in float32, whatever the mode."""
    _refuse(function, **others)
    weight = W + offset if W is not None and offset else W
    return F.rms_norm(X, X.shape[-1:], weight, eps)


@library_rule("liger_kernel", "LigerSiLUMulFunction")
def liger_silu_mul(
    function: AutogradFunction,
    *,
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    **others: object,
) -> Tensor:
    """Compute silu(a) · b."""
    _refuse(function, **others)
    out = F.silu(a if gate_multiplier == 1 else a * gate_multiplier) * b
    return out if down_multiplier == 1 else out * down_multiplier


@library_rule("liger_kernel", "LigerRopeFunction")
def liger_rope(
    function: AutogradFunction,
    *,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: object = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` numbers of queries and keys ``[B, H, T, d]``."""
    _refuse(function, **others)
    if cos.ndim == 4:
        _refuse(function, cos_and_sin_of_four_dimensions=True)
    size = cos.shape[-1] if rotary_dim is None else rotary_dim
    # [T, r] or [B, T, r], of which the halves are alike.
    cos, sin = (angle[..., : size // 2].unsqueeze(-3) for angle in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        left, right, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
        parts = [left * cos - right * sin, right * cos + left * sin, rest]
        out = torch.cat(parts, -1).to(x.dtype)
        return out.transpose(1, 2).contiguous().transpose(1, 2)  # as Liger leaves it

    return rotated(q), rotated(k)


@library_rule("liger_kernel", "LigerCrossEntropyFunction")
def liger_cross_entropy(
    function: AutogradFunction,
    *,
    _input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    **others: object,
) -> tuple[Tensor, None, None, None]:
    """Compute the cross entropy of logits ``[N, V]``; without the further results."""
    _refuse(function, lse_square_scale=lse_square_scale, **others)
    logits = softcap * torch.tanh(_input / softcap) if softcap else _input
    loss = F.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss, None, None, None


# ---- transformers ------------------------------------------------------------------------------


@library_rule("transformers.models.bloom", "GeLUFunction")
def bloom_gelu(function: AutogradFunction, **arguments: object) -> object:
    """Compute BLOOM's GELU, whose forward is the formula and whose backward its derivative."""
    return by_forward(function, tuple(arguments.values()), {})
