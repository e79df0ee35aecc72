"""Weights w_i of the directions u_i in the sum Σ w_i D²f[u_i, u_i]."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling, is_exporting

from ...ops.library import capturing
from ..engine.layout import Second
from ..rules.forward_mode import unwrap
from .check import append_dims
from .passes import Group


class Weights(NamedTuple):
    """The weights of a Laplacian, and the passes that take them.

    Attributes:
        groups: the directions of each pass.  A direction of weight 0 is at the end of the first
            group, without a second derivative.
        summed: whether a pass computes the sum of the squares along directions that are multiplied
            by √|w|, which is one stream, and all weights of a group have the same sign.  Else each
            square has a stream, times its weight: √|w| has an infinite derivative at 0, and a
            direction could have weights of both signs in different rows.
        factors: the weights, ``[q]`` or ``[q, N]``; None: all are 1.
    """

    groups: list[Group]
    summed: bool
    factors: Tensor | None

    @property
    def second(self) -> Second:
        """Return the second-order streams of the passes."""
        return "sum" if self.summed else "squares"

    @property
    def roots(self) -> Tensor | None:
        """Return ``[q]``, the factors √|w| of the directions; 1 for a weight of 0, whose direction
        is not scaled.  None: directions are not scaled."""
        if self.factors is None or not self.summed:
            return None
        return torch.where(self.factors == 0, 1, self.factors.abs()).sqrt()

    def sum_squares(self, group: Group, second: Tensor) -> Tensor:
        """Return the weighted sum over a group, ``[N, ...]``, from its second-order streams."""
        if self.summed or self.factors is None:
            return group.sign * second[0]
        factors = self.factors[group.numbers[: group.num_squares]]
        return (append_dims(factors, second.ndim) * second).sum(0)

    def restore(self, first: Tensor) -> Tensor:
        """Return the first derivatives ``[q, N, ...]`` of all groups in the order of the call, and
        undo the scaling of their directions."""
        numbers = [number for group in self.groups for number in group.numbers]
        if numbers != sorted(numbers):
            first = first[sorted(range(len(numbers)), key=numbers.__getitem__)]
        return first if self.roots is None else first / append_dims(self.roots, first.ndim)


def make_weights(
    weights: Sequence[float | Tensor] | Tensor | None, count: int, point: Tensor
) -> Weights:
    """Return the weights of ``count`` directions.

    Args:
        point: a tensor of x, ``[N, ...]``, whose dtype the weights take.

    Raises:
        ValueError: the weights have another shape, or are not finite.
    """
    numbers = list(range(count))
    count, batch = len(numbers), point.shape[0]  # in a graph the count may have been a symbol
    all_squares = Group(1, numbers, count)
    if weights is None:
        return Weights([all_squares], True, None)
    if not isinstance(weights, Tensor) and any(isinstance(weight, Tensor) for weight in weights):
        # torch.as_tensor of a list would detach its tensors.
        weights = torch.stack(
            [torch.as_tensor(weight, dtype=point.dtype, device=point.device) for weight in weights]
        )
    factors = torch.as_tensor(weights, dtype=point.dtype, device=point.device)
    can_read = not (is_dynamo_compiling() or is_exporting() or capturing())
    fits = factors.ndim in (1, 2) and all(map(eq, factors.shape, (count, batch)))
    if not fits or (can_read and not unwrap(factors).isfinite().all()):
        raise ValueError(
            f"weights have shape {list(factors.shape)}; expected [{count}], a finite number for "
            f"each direction, or [{count}, {batch}], for each in each row"
        )
    is_tensor = isinstance(weights, Tensor)
    if factors.ndim > 1 or (is_tensor and (not can_read or _is_differentiated(factors))):
        return Weights([all_squares], False, factors)
    weights = factors.tolist() if is_tensor else weights
    zero = [i for i, weight in enumerate(weights) if weight == 0]
    minus = [i for i, weight in enumerate(weights) if weight < 0]
    plus = [i for i in numbers if i not in {*zero, *minus}]
    if plus and minus and not can_read:  # fn cannot run twice
        squares = plus + minus
        return Weights([Group(1, squares + zero, len(squares))], False, factors)
    groups = [Group(sign, numbers, len(numbers)) for sign, numbers in ((1, plus), (-1, minus))]
    first, *second = [group for group in groups if group.numbers] or groups[:1]
    first = first._replace(numbers=first.numbers + zero)
    return Weights([first, *second], True, factors)


def _is_differentiated(weights: Tensor) -> bool:
    """Return whether weights have a derivative, or are wrapped by a transform of torch.func, which
    hides their signs."""
    has_tangent = forward_ad.unpack_dual(weights).tangent is not None
    return weights.requires_grad or has_tangent or unwrap(weights) is not weights
