"""Attention written out, with the dropout mask that the fused operator counts from its seed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jachess_ext.ops.attention_reference import dropout_mask


def attention_with_counted_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As torch's function, for ``[B, H, T, d]``; the seed is drawn as the jet rule draws it."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(visible.logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    if dropout_p:
        seed = int(torch.randint(2**63 - 1, ()))
        keep = dropout_mask(*weights.shape, dropout_p, seed, weights.device)
        weights = weights * keep / (1 - dropout_p)
    return weights @ value
