"""Functional collectives of torch.distributed: one call communicates all streams."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ...ops import collectives
from ...ops.forward_code import overridable_functions
from ..engine.errors import missing_rule
from ..engine.registry import jet_rule
from ..engine.tensor import JetTensor
from ..engine.types import Function


def _collective(operator: Function, *args: Any, **kwargs: Any) -> JetTensor:
    """Run a collective that is linear, and wait for its result."""
    register_wrappers()
    input, *settings = collectives.positional(operator, args, kwargs)
    name = collectives.NAMES[operator]
    if not collectives.is_linear(name, settings):
        raise missing_rule(operator, f"called with {collectives.reduction(name, settings)!r}")
    dim = collectives.BATCH[name]  # the position of S: after the dimension that is split
    streams = collectives.Collective.apply(input.streams.movedim(0, dim), name, *settings)
    return input.with_streams(streams.movedim(dim, 0).contiguous())


def _collectives(operator: Function, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Run a collective of a list of tensors, one tensor at a time."""
    inputs, *settings = collectives.positional(operator, args, kwargs)
    return [collectives.LISTWISE[operator](x, *settings) for x in inputs]


for _operators, _rule in ((collectives.NAMES, _collective), (collectives.LISTWISE, _collectives)):
    for _operator in _operators:
        jet_rule(_operator)(partial(_rule, _operator))


def _wait(input: Tensor) -> Tensor:
    return input  # `_collective` has already waited


def register_wrappers() -> None:
    """Register the rules of the functions that wait for a collective's result, if torch's module of
    functional collectives has been imported."""
    jet_rule(*collectives.wrappers())(_wait)
    overridable_functions()
