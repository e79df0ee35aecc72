"""Reductions that are not linear: extreme values, norms, variances."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..registry import general_rule, jet_rule
from ..tensor import JetTensor
from .pointwise import Derivatives, in_float32, push_forward
from .streamwise import varargs, without_dimensions


def _extreme(name: str, pick: str) -> None:
    """The entry at the extreme index carries its own derivative (apart from ties)."""

    @jet_rule(name)
    def rule(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        if isinstance(dim, Tensor) or other is not None:
            return getattr(torch, f"{name}imum")(input, dim if other is None else other)
        return along(input, dim, keepdim)

    @without_dimensions
    def along(input: Any, dim: Any, keepdim: bool) -> Any:
        if dim is None:
            flat = input.flatten()
            return flat[getattr(flat.primal, pick)()]
        values, index = getattr(torch, name)(input.primal, dim, keepdim=True)
        values = torch.gather(input, dim, index)
        if not keepdim:
            values, index = values.squeeze(dim), index.squeeze(dim)
        return getattr(torch.return_types, name)((values, index))


for _name, _pick in (("max", "argmax"), ("min", "argmin")):
    _extreme(_name, _pick)


def _extreme_value(name: str, pick: str) -> None:
    @jet_rule(name)
    @without_dimensions
    def rule(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
        dims = (varargs(dim) if isinstance(dim, list | tuple) else [dim]) or [*range(input.ndim)]
        last = [*range(-len(dims), 0)]
        flat = input.movedim(dims, last).flatten(-len(dims))
        values: Any = flat.gather(-1, getattr(flat.primal, pick)(-1, keepdim=True))
        if not keepdim:
            return values.squeeze(-1)
        return values.reshape(*values.shape[:-1], *(1,) * len(dims)).movedim(last, dims)


for _name, _pick in (("amax", "argmax"), ("amin", "argmin")):
    _extreme_value(_name, _pick)


@jet_rule("topk")
@without_dimensions
def topk(input: JetTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    _, index = torch.topk(input.primal, k, dim, largest, sorted)
    return torch.return_types.topk((torch.gather(input, dim, index), index))


@jet_rule("sort")
@without_dimensions
def sort(input: JetTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    _, index = torch.sort(input.primal, dim=dim, descending=descending, stable=stable)
    return torch.return_types.sort((torch.gather(input, dim, index), index))


# ---- norms and variances -----------------------------------------------------------------------


def root_of_squares(squares: Any, least: float = 0.0) -> JetTensor:
    """√squares for a sum of squares, whose root is a norm.

    A norm has no derivative at 0.  As in torch's autograd its slope there is taken to be 0, and so
    is its curvature: where ``squares`` is exactly 0 every tangent of the result is 0.  So it is
    where the root is below ``least``, for a caller that raises it to that anyway; the curvature of
    tiny roots is infinite in floating point.
    """

    def derivatives(x: Tensor) -> Derivatives:
        flat = (x == 0) | (torch.sqrt(x) < least)
        root = torch.sqrt(x.masked_fill(flat, 1))  # no infinity, for the backward's sake either
        triple = (root, 0.5 / root, -0.25 / root**3)
        value, slope, curvature = (part.masked_fill(flat, 0) for part in triple)
        return value, slope, curvature

    return push_forward(squares, in_float32(squares.primal, derivatives))


@jet_rule("norm")
def norm(
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: Any = None,
) -> Any:
    """Of a vector; the Euclidean norm has no derivative at 0 (`root_of_squares`)."""
    p = 2 if p in ("fro", None) else p
    if p not in (1, 2, math.inf):
        said = f"p={p!r} is not covered, only 1, 2 and inf"
        return general_rule(torch.norm, said)(input, p, dim, keepdim, dtype=dtype)
    return vector_norm(input, p, dim, keepdim, dtype=dtype)


@jet_rule(torch.linalg.vector_norm)
def vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord in (1, math.inf):
        size = x.abs() if dtype is None else x.abs().to(dtype)
        dim = tuple(range(x.ndim)) if dim is None else dim
        return size.sum(dim, keepdim) if ord == 1 else size.amax(dim, keepdim)
    if ord not in (2, 2.0):
        rule = general_rule(torch.linalg.vector_norm, f"ord={ord!r} is not covered, only 2")
        return rule(x, ord, dim, keepdim, dtype=dtype)
    x = x if dtype is None else x.to(dtype)
    return root_of_squares((x * x).sum(dim, keepdim))


@jet_rule("pairwise_distance")
def pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@jet_rule(torch.linalg.norm)
def linalg_norm(
    A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    one_dimension = isinstance(dim, int) or (dim is None and A.ndim == 1)
    if ord is None or (ord in (2, 2.0) and one_dimension):
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    said = f"ord={ord!r} is covered for vectors only, and only 2"
    return general_rule(torch.linalg.norm, said)(A, ord, dim, keepdim, dtype=dtype)


def _moments(input: Any, args: tuple, named: dict) -> tuple[Any, Any]:
    """(variance, mean) for ``(dim, *, correction, keepdim)`` and the older
    ``(dim, unbiased, keepdim)`` and ``(unbiased)``; variance about the mean over N − correction."""
    if args and isinstance(args[0], bool):
        args = (None, *args)
    named.update(zip(("dim", "unbiased", "keepdim"), args, strict=False))
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    correction = named.get("correction")
    if correction is None:
        correction = int(named.get("unbiased", True))
    dims = list(range(input.ndim)) if dim is None else varargs(dim)
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    count = input.shape.numel() // max(1, mean.shape.numel())
    variance = (centred * centred).sum(dims, keepdim=keepdim) / (count - correction)
    return variance, mean if keepdim else mean.reshape(variance.shape)


@jet_rule("var")
def var(input: Any, *args: Any, **named: Any) -> Any:
    return _moments(input, args, named)[0]


@jet_rule("std")
def std(input: Any, *args: Any, **named: Any) -> Any:
    """Of equal entries: 0, and no derivative (`root_of_squares`)."""
    return root_of_squares(_moments(input, args, named)[0])


@jet_rule("var_mean")
def var_mean(input: Any, *args: Any, **named: Any) -> Any:
    return _moments(input, args, named)


@jet_rule("std_mean")
def std_mean(input: Any, *args: Any, **named: Any) -> Any:
    variance, mean = _moments(input, args, named)
    return root_of_squares(variance), mean
