"""Buffers that a model makes like its hidden states and fills piece by piece.

They are jets with zero tangents from the start: a plain buffer could not take a jet in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..registry import general_rule, jet_rule, missing_rule
from ..tensor import JetTensor, carries_derivatives, common_layout, lift, primal_of
from .streamwise import behind_streams, on_primal_and_tangents, without_dimensions


def _buffer(name: str) -> None:
    function: Callable = getattr(torch, name, None) or getattr(Tensor, name)

    @jet_rule(name)
    def rule(input: JetTensor, *args: Any, **named: Any) -> Any:
        named.pop("memory_format", None)
        made = function(input.primal, *primal_of(args), **named)
        return lift(made, input.jet_layout) if carries_derivatives(made) else made


for _name in ("zeros_like", "new_zeros", "empty_like", "new_empty", "full_like", "new_full"):
    _buffer(_name)


def _lifted(*values: Any) -> list[Tensor]:
    layout = common_layout(*values)
    return [lift(value, layout).streams for value in values]


@jet_rule("index_add")
@without_dimensions
def index_add(input: Any, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> JetTensor:
    stack, added = _lifted(input, source)
    out = stack.index_add(behind_streams(dim, input.ndim), index, added, alpha=alpha)
    return JetTensor(out, common_layout(input, source))


@jet_rule("index_copy")
@without_dimensions
def index_copy(input: Any, dim: int, index: Tensor, source: Any) -> JetTensor:
    stack, copied = _lifted(input, source)
    out = stack.index_copy(behind_streams(dim, input.ndim), index, copied)
    return JetTensor(out, common_layout(input, source))


@jet_rule("scatter_add")
@without_dimensions
def scatter_add(input: Any, dim: int, index: Tensor, src: Any) -> JetTensor:
    stack, added = _lifted(input, src)
    everywhere = index.unsqueeze(0).expand(len(stack), *index.shape)
    out = stack.scatter_add(behind_streams(dim, input.ndim), everywhere, added)
    return JetTensor(out, common_layout(input, src))


@jet_rule("scatter_reduce")
def scatter_reduce(
    input: Any, dim: int, index: Tensor, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce == "prod":
        raise missing_rule(
            torch.scatter_reduce,
            'torch has no forward mode of reduce="prod"; take the logarithm, and "sum" it',
        )
    rule = general_rule(torch.scatter_reduce, "")
    return rule(input, dim, index, src, reduce, include_self=include_self)


@jet_rule(torch.scatter, Tensor.scatter)
@without_dimensions
def scatter(
    input: Any, dim: int, index: Tensor, src: Any = None, *, value: Any = None, **named: Any
) -> JetTensor:
    """``src`` may be a number, as ``value`` is: a constant, which has no derivative."""
    written = src if value is None else value
    if named or written is None or isinstance(index, JetTensor):
        raise missing_rule(torch.scatter, "covered are (input, dim, index, src) and (…, value)")
    if not isinstance(written, Tensor):
        return _scatter_number(input, dim, index, written)
    stack, copied = _lifted(input, written)
    everywhere = index.unsqueeze(0).expand(len(stack), *index.shape)
    out = stack.scatter(behind_streams(dim, input.ndim), everywhere, copied)
    return JetTensor(out, common_layout(input, written))


def _scatter_number(input: JetTensor, dim: int, index: Tensor, number: float) -> JetTensor:
    place = behind_streams(dim, input.ndim)

    def without_tangents(rest: Tensor) -> Tensor:
        return rest.scatter(place, index.unsqueeze(0).expand(len(rest), *index.shape), 0)

    return on_primal_and_tangents(
        input, lambda primal: primal.scatter(dim, index, number), without_tangents
    )
