"""Weights w_i of the directions u_i in the sum Σ w_i D²f[u_i, u_i]."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling, is_exporting

from ...ops import library
from ..engine.layout import Second
from ..rules.forward_mode import unwrap
from .passes import Group

WeightsLike = Sequence[float | Tensor] | Tensor | None


class Weights(NamedTuple):
    """The weights of a Laplacian, and the passes that take them.

    Passes compute the sum of all squares ("sum"), one stream, if weights are constant: along
    directions that are multiplied by √|w|, for weights of one sign.  Else each square has a stream,
    times its weight ("squares"), since √|w| has an infinite derivative at 0, and a direction may
    have weights of both signs in different rows.

    Attributes:
        groups: the directions of each pass.  Those of weight 0 are at the end of the first group,
            without second derivatives.
        second: the second-order streams of the passes.
        factors: the weights, ``[q]`` or ``[q, N]``; None: all are 1.
        roots: ``[q]``, √|w|, or 1 for a weight of 0; None: directions are not multiplied.
    """

    groups: list[Group]
    second: Second
    factors: Tensor | None = None
    roots: Tensor | None = None


def make_weights(weights: WeightsLike, count: int, point: Tensor) -> Weights:
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
        return Weights([all_squares], "sum")
    factors = _as_tensor(weights, point)
    has_values = not (is_dynamo_compiling() or is_exporting() or library.capturing())
    fits = factors.ndim in (1, 2) and all(map(eq, factors.shape, (count, batch)))
    if not fits or (has_values and not unwrap(factors).isfinite().all()):
        raise ValueError(
            f"weights have shape {list(factors.shape)}; expected [{count}], a finite number for "
            f"each direction, or [{count}, {batch}], for each in each row"
        )
    is_tensor = isinstance(weights, Tensor) or any(isinstance(w, Tensor) for w in weights)
    if factors.ndim > 1 or (is_tensor and (not has_values or _is_differentiated(factors))):
        return Weights([all_squares], "squares", factors)
    weights = factors.tolist() if is_tensor else weights
    # The largest number that this dtype rounds to 0.
    largest = torch.finfo(point.dtype).tiny * torch.finfo(point.dtype).eps / 2
    minus = [i for i, weight in enumerate(weights) if weight < -largest]
    plus = [i for i, weight in enumerate(weights) if weight > largest]
    zero = [i for i in numbers if i not in {*plus, *minus}]
    if plus and minus and not has_values:  # fn cannot run twice
        squares = plus + minus
        return Weights([Group(1, squares + zero, len(squares))], "squares", factors)
    groups = [Group(sign, numbers, len(numbers)) for sign, numbers in ((1, plus), (-1, minus))]
    first, *second = [group for group in groups if group.numbers] or groups[:1]
    first = first._replace(numbers=first.numbers + zero)
    roots = torch.where(factors == 0, 1, factors.abs()).sqrt()
    return Weights([first, *second], "sum", factors, roots)


def _as_tensor(weights: object, point: Tensor) -> Tensor:
    """Return weights in the dtype of ``point``; numbers beside weights ``[N]`` hold for all rows.

    Raises:
        TypeError: weights are complex.
    """
    kinds = Tensor, list, tuple
    if isinstance(weights, (list, tuple)) and any(isinstance(w, kinds) for w in weights):
        # torch.as_tensor of a list would detach its tensors.
        return torch.stack(torch.broadcast_tensors(*(_as_tensor(w, point) for w in weights)))
    if isinstance(weights, Tensor) and weights.is_complex():
        raise TypeError("weights are complex; expected real numbers")
    return torch.as_tensor(weights, dtype=point.dtype, device=point.device)


def _is_differentiated(weights: Tensor) -> bool:
    """Return whether weights are differentiated: they require a gradient, or a transform of
    torch.func wraps them, which hides their signs."""
    has_tangent = forward_ad.unpack_dual(weights).tangent is not None
    return weights.requires_grad or has_tangent or unwrap(weights) is not weights
