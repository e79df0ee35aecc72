"""Scaled dot-product attention: the fused operator, or matrix products and the softmax rule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ..directions import fresh_seed_on
from ..registry import jet_rule
from ..tensor import JetTensor, common_layout, lift
from .linear import matmul_jets, products_fuse
from .patterns import RepeatedHeads, fusable
from .softmax import along, softmax_streams


@jet_rule("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> JetTensor:
    """Compute softmax(q kᵀ · scale + mask) v, where any of query, key, value, mask are jets.

    Shapes ``[..., H, T, d]``; ``attn_mask`` is boolean (True takes part) or additive, such as T5's
    relative position bias, which is a jet where parameters carry derivatives.
    """
    if _operator_covers(query, key, value, attn_mask, enable_gqa):
        if _repeats(key) is not None and _repeats(key) == _repeats(value):
            keys, values = (jet.pattern.source.streams[:, :, :, 0] for jet in (key, value))
        else:
            keys, values = key.streams, value.streams
        out = ops.attention_jet(
            query.streams,
            keys,
            values,
            attn_mask,
            q=query.jet_layout.directions,
            summed=query.jet_layout.squares,
            scale=scale,
            causal=is_causal,
            dropout_p=dropout_p,
            dropout_seed=fresh_seed_on(query.streams.device) if dropout_p else 0,
        )
        return query.with_streams(out)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scores(query, key, attn_mask, is_causal, scale)
    layout = common_layout(query, key, value, attn_mask)
    weights = along(lift(scores, layout), -1, None, partial(softmax_streams, masked=True))
    return torch.matmul(F.dropout(weights, dropout_p, dropout_p > 0), value)  # type: ignore[return-value]


# ---- the operator ------------------------------------------------------------------------------


def _operator_covers(query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> bool:
    """Return whether these are three jets ``[B, H, T, d]`` of one layout, and a mask that needs no
    gradient."""
    jets = (query, key, value)
    if not all(isinstance(jet, JetTensor) and jet.ndim == 4 for jet in jets):
        return False
    if isinstance(mask, Tensor) and (
        isinstance(mask, JetTensor) or mask.requires_grad or mask.ndim > 4
    ):
        return False
    same = all(jet.jet_layout == query.jet_layout and jet.dtype == query.dtype for jet in jets)
    heads = query.shape[1], key.shape[1], value.shape[1]
    fits = heads[1] == heads[2] and (heads[0] == heads[1] or grouped)
    fits = fits and query.shape[0] == key.shape[0] == value.shape[0]
    return same and fits and fusable("attention_jet", query)


def _repeats(jet: JetTensor) -> int | None:
    return jet.pattern.times if isinstance(jet.pattern, RepeatedHeads) else None


# ---- composed ----------------------------------------------------------------------------------


def _scores(query: Any, key: Any, mask: Any, is_causal: bool, scale: float) -> Any:
    """Compute q kᵀ · scale + mask; at once where the fused product covers the shapes."""
    keys = key.transpose(-2, -1)
    shape = (*query.shape[:-1], key.shape[-2])
    bias = _additive_mask(mask, is_causal, shape[-2:], query)
    if products_fuse(query, keys):
        if not isinstance(bias, JetTensor) and (bias is None or bias.ndim <= len(shape)):
            return matmul_jets(query, keys, alpha=scale, bias=bias)
        scores: Any = matmul_jets(query, keys, alpha=scale)
    else:
        scores = torch.matmul(query * scale, keys)
    return scores if bias is None else scores + bias


def _additive_mask(mask: Any, is_causal: bool, shape: Any, scores: Any) -> Any:
    """Return the sum of all masks, as numbers to add to the scores, in the scores' dtype."""
    if mask is not None:
        shown = mask.dtype == torch.bool
        mask = _hiding(mask.logical_not(), scores) if shown else mask.to(scores.dtype)
    if not is_causal:
        return mask
    ahead = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(1)
    causal = _hiding(ahead, scores)
    return causal if mask is None else mask + causal


def _hiding(hidden: Tensor, scores: Any) -> Tensor:
    """Return −inf where scores are ``hidden``, and 0 elsewhere."""
    bias = torch.zeros(hidden.shape, dtype=scores.dtype, device=scores.device)
    return bias.masked_fill(hidden, -math.inf)
