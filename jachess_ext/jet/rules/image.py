"""Resampling of images and signals, and their patches: linear, the same on every stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from ..registry import jet_rule, missing_rule
from ..tensor import JetTensor


def _patches(name: str, batched: int) -> None:
    function: Callable = getattr(F, name)

    @jet_rule(function)
    def rule(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
        if input.ndim < batched:
            return rule(input.unsqueeze(0), *args, **named).squeeze(0)  # type: ignore
        out = function(input.streams.flatten(0, 1), *args, **named)
        return input.with_streams(out.unflatten(0, (len(input.streams), -1)))


_patches("unfold", 4)
_patches("fold", 3)


@jet_rule(F.interpolate)
def interpolate(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
    """``[N, C, ...]``; every mode is linear."""
    out = F.interpolate(input.streams.flatten(0, 1), *args, **named)
    return input.with_streams(out.unflatten(0, (len(input.streams), -1)))


@jet_rule(F.grid_sample)
def grid_sample(input: Any, grid: Any, *args: Any, **named: Any) -> JetTensor:
    """``[N, C, ...]`` at constant places: linear, so that the streams are channels beside C."""
    if isinstance(grid, JetTensor):
        raise missing_rule(F.grid_sample, "places that depend on the input; only the image may")
    out = F.grid_sample(input.streams.transpose(0, 1).flatten(1, 2), grid, *args, **named)
    return input.with_streams(out.unflatten(1, (len(input.streams), -1)).transpose(0, 1))
