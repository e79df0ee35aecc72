"""Scaled dot-product attention, composed of matrix products and the softmax rule."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import jet_rule
from ..tensor import JetTensor, common_layout, lift
from .product import matmul_jets, products_fuse
from .softmax import along, masked_softmax_streams


@jet_rule("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> JetTensor:
    """softmax(q kᵀ · scale + mask) v, for any of query, key, value being jets.

    Shapes ``[..., H, T, d]``; ``attn_mask`` boolean (True takes part) or additive.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scores(query, key, attn_mask, is_causal, scale)
    weights = along(
        lift(scores, common_layout(query, key, value)), -1, None, masked_softmax_streams
    )
    return torch.matmul(F.dropout(weights, dropout_p, dropout_p > 0), value)  # type: ignore[return-value]


def _scores(query: Any, key: Any, mask: Tensor | None, is_causal: bool, scale: float) -> Any:
    """q kᵀ · scale + mask; in one sweep where the fused product covers the shapes."""
    keys = key.transpose(-2, -1)
    shape = (*query.shape[:-1], key.shape[-2])
    bias = _additive_mask(mask, is_causal, shape[-2:], query)
    if products_fuse(query, keys) and (bias is None or bias.ndim <= len(shape)):
        return matmul_jets(query, keys, alpha=scale, bias=bias)
    scores: Any = torch.matmul(query * scale, keys)
    return scores if bias is None else scores + bias


def _additive_mask(mask: Tensor | None, is_causal: bool, shape: Any, scores: Any) -> Tensor | None:
    """Masks of every kind as numbers added to the scores, in the scores' dtype."""
    if is_causal:
        mask = torch.ones(shape, dtype=torch.bool, device=scores.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(scores.dtype)
    bias = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    return bias.masked_fill(mask.logical_not(), -math.inf)
