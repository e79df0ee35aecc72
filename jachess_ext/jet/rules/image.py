"""Resampling of images and signals: linear, the same on every stream."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ..registry import jet_rule
from ..tensor import JetTensor


@jet_rule(F.interpolate)
def interpolate(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
    """``[N, C, ...]``; every mode is linear."""
    out = F.interpolate(input.streams.flatten(0, 1), *args, **named)
    return input.with_streams(out.unflatten(0, (len(input.streams), -1)))
