"""Rules for autograd Functions of FlashAttention, Liger Kernel and transformers, by name, and for
torch's varlen attention and flex attention.

None of the libraries is imported.  A call with a setting that its rule does not accept is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ...ops import attention_blocks
from ...ops.attention_reference import visible_keys
from ...torch_private import functional as F
from ..engine.derivative import DerivativeTensor
from ..engine.errors import frames, missing_rule
from ..engine.registry import jet_rule
from ..engine.strides import stack_with_strides
from ..engine.tensor import common_layout, lift
from ..rules.attention import scaled_dot_product_attention
from .functions import Options, is_unset, library_rule

# ---- FlashAttention ----------------------------------------------------------------------------


@library_rule(
    "flash_attn",
    *("FlashAttnFunc", "FlashAttnKVPackedFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc"),
    *("FlashAttnVarlenKVPackedFunc", "FlashAttnVarlenQKVPackedFunc"),
    accepts="q k v kv qkv softmax_scale causal window_size softcap cu_seqlens cu_seqlens_q "
    "cu_seqlens_k max_seqlen max_seqlen_q max_seqlen_k deterministic is_grad_enabled",
)
def flash_attention(options: Options) -> Tensor:
    """Compute FlashAttention 2 for ``[B, T, H, d]``, or for ``[tokens, H, d]``, several
    concatenated sequences."""
    if "qkv" in options:
        q, k, v = options["qkv"].unbind(-3)
    else:
        q = options["q"]
        k, v = options["kv"].unbind(-3) if "kv" in options else (options["k"], options["v"])
    window, softcap = options.get("window_size", (-1, -1)), options.get("softcap", 0.0)
    settings = options["softmax_scale"], options["causal"], window, softcap
    starts = options.get("cu_seqlens", options.get("cu_seqlens_q"))
    if not isinstance(starts, Tensor):
        return _attention(q, k, v, *settings)
    return _varlen_attention(q, k, v, starts, options.get("cu_seqlens_k", starts), *settings)


def _attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
    """Return the attention of q, k and v ``[B, T, H, d]``, with the strides of q.

    A causal mask aligns the last query with the last key (torch: the first with the first); the
    result of a query that attends to no key is 0.

    Args:
        settings: scale, causal, (left, right) window, and softcap.
    """
    scale, causal, (left, right), softcap = settings
    layout = common_layout(q, k, v)
    query, key, value = (lift(tensor, layout).transpose(1, 2) for tensor in (q, k, v))
    window = max(left, -1), 0 if causal else max(right, -1)
    queries, keys = query.shape[2], key.shape[2]
    mask = None
    if queries != keys:
        rows = torch.arange(keys - queries, keys, device=q.device)
        mask, window = visible_keys(rows, keys, *window), (-1, -1)
    out = scaled_dot_product_attention(
        *(query, key, value, mask), scale=scale, enable_gqa=True, window=window, softcap=softcap
    )
    out = lift(out, layout)
    strides = torch.empty_like(lift(q, layout).primal, device="meta").stride()
    return out.with_streams(stack_with_strides(out.streams.transpose(2, 3), strides))


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *settings: object
) -> Tensor:
    """Return the attention within each of several sequences, concatenated to ``[tokens, H, d]``.

    Args:
        starts, key_starts: the index of each sequence's first token, and the total, of queries and
            of keys.
        settings: as for `_attention`.
    """
    lengths, key_lengths = (cu.diff().tolist() for cu in (starts, key_starts))
    sequences = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    return torch.cat([_attention(*(x[None] for x in qkv), *settings)[0] for qkv in sequences])


def register_varlen_attention() -> None:
    """Register the rule of torch's ``varlen_attn``, if its module has been imported."""
    if "torch.nn.attention.varlen" in sys.modules:
        operator = torch.ops.torch_attn._varlen_attn
        jet_rule(operator, operator.default, kind="composed")(_torch_varlen_attention)


def _torch_varlen_attention(*args: object) -> tuple[Tensor, None, None]:
    """Compute ``torch_attn::_varlen_attn``; return None for its other results (the logsumexp of the
    scores, the state of the generator)."""
    operator = torch.ops.torch_attn._varlen_attn
    names = [argument.name for argument in operator.default._schema.arguments]
    options: Options = dict(zip(names, args, strict=False))
    callers = [frame.f_locals for frame in frames() if frame.f_code.co_name == "varlen_attn"]
    options |= {"return_aux": callers[0].get("return_aux")} if callers else {}
    for name in ("return_aux", "seqused_k", "block_table"):
        if not is_unset(options.get(name)):
            raise missing_rule(operator, f"called with {name}")
    q, k, v, starts, key_starts = (options[name] for name in names[:5])
    settings = options.get("scale"), options["is_causal"], options.get("window_size") or (-1, -1)
    key_starts = starts if key_starts is None else key_starts
    return _varlen_attention(q, k, v, starts, key_starts, *settings, 0.0), None, None


def _flex_attention(**call: object) -> object:
    """Compute torch's ``flex_attention``; return NotImplemented if no argument is a jet."""
    if not any(isinstance(argument, DerivativeTensor) for argument in call.values()):
        return NotImplemented
    for name in ("score_mod", "return_lse", "return_aux"):
        if not is_unset(call.get(name)):
            function = sys.modules["torch.nn.attention.flex_attention"].flex_attention
            raise missing_rule(function, f"called with {name}")
    return attention_blocks.flex_attention(**call)  # type: ignore[arg-type]


attention_blocks.ANSWERS.append(_flex_attention)


@library_rule("flash_attn", "IndexFirstAxis", accepts="input indices")
def remove_padding(options: Options) -> Tensor:
    """Select the rows ``[tokens, ...]`` of ``[B T, ...]`` that are not padding."""
    return options["input"][options["indices"]]


@library_rule("flash_attn", "IndexPutFirstAxis", accepts="values indices first_axis_dim")
def restore_padding(options: Options) -> Tensor:
    """Write the rows ``[tokens, ...]`` to their positions in zeros ``[B T, ...]``."""
    values = options["values"]
    zeros = values.new_zeros(options["first_axis_dim"], *values.shape[1:])
    return zeros.index_copy(0, options["indices"], values)


# ---- Liger Kernel ------------------------------------------------------------------------------


@library_rule(
    "liger_kernel", "LigerRMSNormFunction", accepts="X W eps offset casting_mode in_place row_mode"
)
def liger_rms_norm(options: Options) -> Tensor:
    """Compute x (mean x² + ε)^(−1/2) · (offset + w); 16-bit dtypes in float32, whatever
    ``casting_mode``."""
    x, weight, offset = options["X"], options["W"], options.get("offset", 0.0)
    weight = weight + offset if weight is not None and offset else weight
    return F.rms_norm(x, x.shape[-1:], weight, options["eps"])


@library_rule("liger_kernel", "LigerSiLUMulFunction", accepts="a b gate_multiplier down_multiplier")
def liger_silu_mul(options: Options) -> Tensor:
    """Compute silu(gate_multiplier · a) · b · down_multiplier."""
    gate, down = options.get("gate_multiplier", 1), options.get("down_multiplier", 1)
    out = F.silu(options["a"] if gate == 1 else options["a"] * gate) * options["b"]
    return out if down == 1 else out * down


@library_rule(
    "liger_kernel", "LigerRopeFunction", accepts="q k cos sin position_ids unsqueeze_dim rotary_dim"
)
def liger_rope(options: Options) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to the first ``rotary_dim`` entries of queries and keys
    ``[B, H, T, d]``."""
    rotary_dim = options.get("rotary_dim") or options["cos"].shape[-1]
    half_dim, head_dim = rotary_dim // 2, options["unsqueeze_dim"]
    # cos and sin are [T, r] or [B, T, r], perhaps with a dimension of the heads; both halves along
    # r are equal.
    angles = [options[name][..., :half_dim] for name in ("cos", "sin")]
    cos, sin = ((a.squeeze(head_dim) if a.ndim == 4 else a).unsqueeze(-3) for a in angles)

    def rotate(x: Tensor) -> Tensor:
        first, second, remainder = x.split([half_dim, half_dim, x.shape[-1] - rotary_dim], -1)
        pieces = [first * cos - second * sin, second * cos + first * sin, remainder]
        out = torch.cat(pieces, -1).to(x.dtype)
        return out.transpose(1, 2).contiguous().transpose(1, 2)  # the strides of Liger's result

    return rotate(options["q"]), rotate(options["k"])


@library_rule(
    "liger_kernel",
    "LigerCrossEntropyFunction",
    accepts="_input target weight ignore_index label_smoothing reduction softcap",
)
def liger_cross_entropy(options: Options) -> tuple[Tensor, None, None, None]:
    """Compute the cross entropy of logits ``[N, V]``; return None for the other results."""
    logits, target, softcap = (options.pop(n, None) for n in ("_input", "target", "softcap"))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, target, **options), None, None, None


# ---- transformers ------------------------------------------------------------------------------


@library_rule("transformers.models.bloom", "GeLUFunction", accepts="input")
def bloom_gelu(options: Options) -> Tensor:
    """Compute BLOOM's GELU by calling the function that the forward of ``GeLUFunction`` calls."""
    module = sys.modules["transformers.models.bloom.modeling_bloom"]
    return module.bloom_gelu_forward(options["input"])
