"""Scaled dot-product attention: the fused operator, or matrix products and the softmax rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from ... import ops
from ...ops.attention_reference import visible_keys
from ...ops.directions import fresh_seed_on
from ...torch_private import functional as F
from ..engine.registry import jet_rule
from ..engine.tensor import JetTensor, common_layout, lift
from .linear import matmul_jets, products_fuse
from .patterns import RepeatedHeads, attention_fuses
from .softmax import softmax_along, softmax_streams


@jet_rule("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Compute softmax(q kᵀ · scale + mask) v, where any of query, key, value and mask are jets.

    Args:
        query, key, value: ``[..., H, T, d]``.
        attn_mask: boolean (True: the key takes part), or additive, such as T5's relative position
            bias, which is a jet if parameters carry derivatives.
        window, softcap: as for `ops.attention_jet`; torch's function has neither.  A window
            excludes ``attn_mask``.
    """
    jets = (query, key, value)
    # The operator holds no scores ``[B, H, T, T]``: its memory grows with T, not T².
    if dropout_p < 1 and _operator_covers(jets, attn_mask, enable_gqa):
        query, key, value = jets
        out = ops.attention_jet(
            query.streams,
            *_unrepeated_heads(key, value),
            attn_mask,
            q=query.jet_layout.directions,
            summed=query.jet_layout.squares,
            scale=scale,
            causal=is_causal,
            window=window,
            softcap=softcap,
            dropout_p=dropout_p,
            # The backward draws the same mask from the seed, so that no mask is stored.
            dropout_seed=fresh_seed_on(query.streams.device) if dropout_p else 0,
        )
        return query.with_streams(out)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if window != (-1, -1):
        rows = torch.arange(query.shape[-2], device=query.device)
        attn_mask = visible_keys(rows, key.shape[-2], *window)
    if softcap:
        scores = softcap * torch.tanh(_scores(query, key, None, False, scale / softcap))
        bias = _additive_mask(attn_mask, is_causal, scores.shape[-2:], query)
        scores = scores if bias is None else scores + bias
    else:
        scores = _scores(query, key, attn_mask, is_causal, scale)
    layout = common_layout(query, key, value, attn_mask)  # the scores may be constant
    weights = softmax_along(lift(scores, layout), -1, None, partial(softmax_streams, masked=True))
    return torch.matmul(F.dropout(weights, dropout_p, dropout_p > 0), value)


# ---- the operator ------------------------------------------------------------------------------


def _operator_covers(
    jets: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, enable_gqa: bool
) -> TypeGuard[tuple[JetTensor, JetTensor, JetTensor]]:
    """Return whether the operator takes a call: query, key and value are jets ``[B, H, T, d]`` of
    one layout, and the mask needs no gradient."""
    query, key, value = jets
    if not isinstance(query, JetTensor) or not all(
        isinstance(jet, JetTensor)
        and jet.ndim == 4
        and jet.jet_layout == query.jet_layout
        and jet.dtype == query.dtype
        for jet in jets
    ):
        return False
    if mask is not None and (isinstance(mask, JetTensor) or mask.requires_grad or mask.ndim > 4):
        return False
    heads = query.shape[:2] if not enable_gqa else (query.shape[0], key.shape[1])
    return key.shape[:2] == value.shape[:2] == heads and attention_fuses(query)


def _unrepeated_heads(key: JetTensor, value: JetTensor) -> tuple[Tensor, Tensor]:
    """Return the streams of key and value, with one head for each group of query heads.

    If the model has repeated the heads (`patterns.RepeatedHeads`), these are the streams before the
    repetition, since the operator takes groups.
    """
    k, v = key.pattern, value.pattern
    if isinstance(k, RepeatedHeads) and isinstance(v, RepeatedHeads) and k.repeats == v.repeats:
        return k.source.streams[:, :, :, 0], v.source.streams[:, :, :, 0]
    return key.streams, value.streams


# ---- without the operator ----------------------------------------------------------------------


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Compute q kᵀ · scale + mask, with `matmul_jets` if it takes query and key."""
    keys = key.transpose(-2, -1)
    shape = (*query.shape[:-1], key.shape[-2])
    bias = _additive_mask(mask, is_causal, shape[-2:], query)
    if isinstance(query, JetTensor) and isinstance(keys, JetTensor) and products_fuse(query, keys):
        # A bias is added in place, so it must not have more dimensions than the scores.
        if not isinstance(bias, JetTensor) and (bias is None or bias.ndim <= len(shape)):
            return matmul_jets(query, keys, alpha=scale, bias=bias)
        scores: Tensor = matmul_jets(query, keys, alpha=scale)
    else:
        scores = torch.matmul(query * scale, keys)  # scales d numbers per token, not T
    return scores if bias is None else scores + bias


def _additive_mask(
    mask: Tensor | None, is_causal: bool, shape: Sequence[int], like: Tensor
) -> Tensor | None:
    """Return the sum of ``mask``, as an additive mask, and the causal mask of this shape; None if
    there is neither.

    Args:
        shape: (T, number of keys).
        like: the tensor whose dtype and device the result gets.
    """
    if mask is not None:
        is_boolean = mask.dtype == torch.bool
        mask = _hide(mask.logical_not(), like) if is_boolean else mask.to(like.dtype)
    if not is_causal:
        return mask
    later_keys = torch.ones(shape, dtype=torch.bool, device=like.device).triu(1)
    causal = _hide(later_keys, like)
    return causal if mask is None else mask + causal


def _hide(hidden: Tensor, like: Tensor) -> Tensor:
    """Return an additive mask: −inf where ``hidden`` is true, and 0 elsewhere.

    It needs no derivatives: exp(−inf) = 0 removes a key from every stream of the softmax.
    """
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill(hidden, -math.inf)
