"""Padding on the right, whichever side it came on.

Encoders' heads read position 0, and models that count positions count padding: a batch padded on
the left gives another logit than the same text padded on the right (transformers' BERT, GPT-2).
With the padding moved to the right the first token is the first real one, the last real one is
where the attention mask ends, and positions count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def padded_right(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with each row's padding, if it is on the left, moved to the right.

    Every tensor whose first two sizes are those of ``attention_mask`` [B, T] moves along (ids,
    embeddings, token-wise labels, token types).  Rows without padding on the left stay as they
    are, holes in the mask stay where they are between the real tokens.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.numel():
        return dict(batch)
    shift = mask.bool().int().argmax(1)  # of the first real token
    if not shift.any():
        return dict(batch)
    places = torch.arange(mask.shape[1], device=mask.device)
    source = (places + shift.unsqueeze(1)) % mask.shape[1]
    return {name: _gathered(value, source) for name, value in batch.items()}


def _gathered(value: Any, source: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape[:2] != source.shape:
        return value
    index = source.reshape(*source.shape, *[1] * (value.ndim - 2)).expand(value.shape)
    return value.gather(1, index.to(value.device))
