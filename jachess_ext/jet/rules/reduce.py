"""Reductions that are not linear: extreme values, products, norms, variances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import torch_private
from ..registry import general_rule, jet_rule, missing_rule
from ..tensor import JetTensor, primal_of
from .pointwise import wide
from .streamwise import behind_streams_all, varargs, without_dimensions


def _extreme(name: str) -> None:
    """Register ``max`` or ``min``: along a dimension the entry at the index has the derivative; of
    all entries, those that tie share it."""

    @jet_rule(name)
    def rule(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        if isinstance(dim, Tensor) or other is not None:
            return getattr(torch, f"{name}imum")(input, dim if other is None else other)
        return along(input, dim, keepdim)

    @without_dimensions
    def along(input: Any, dim: Any, keepdim: bool) -> Any:
        if dim is None:
            return getattr(torch, f"a{name}")(input)
        values, index = getattr(torch, name)(input.primal, dim, keepdim=True)
        values = torch.gather(input, dim, index)
        if not keepdim:
            values, index = values.squeeze(dim), index.squeeze(dim)
        return getattr(torch.return_types, name)((values, index))


for _name in ("max", "min"):
    _extreme(_name)


def _extreme_value(name: str) -> None:
    """Register ``amax`` or ``amin``: ties share the derivative equally, as in torch's autograd."""

    @jet_rule(name)
    @without_dimensions
    def rule(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
        dims = [] if dim is None else varargs(dim)
        dims = dims or [*range(input.ndim)]
        value = getattr(torch, name)(input.primal, dims, True)
        ties = (input.primal == value).to(input.dtype)
        shares = ties / ties.sum(dims, True)
        behind = behind_streams_all(dims, input.ndim)
        tangents = (input.streams[1:] * shares).sum(behind, keepdim=True)
        streams = torch.cat([value.unsqueeze(0), tangents])
        return input.with_streams(streams if keepdim else streams.squeeze(behind))


for _name in ("amax", "amin"):
    _extreme_value(_name)


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


# ---- products, and running ones ----------------------------------------------------------------


def _running(combine: Callable[[Any, Any], Any], x: Any, dim: int) -> Any:
    """Return x_1, x_1 ∘ x_2, x_1 ∘ x_2 ∘ x_3, … along ``dim``, for an associative ∘, in ⌈log₂ n⌉
    steps (Hillis and Steele 1986)."""
    step, size = 1, x.shape[dim]
    while step < size:
        new = combine(x.narrow(dim, 0, size - step), x.narrow(dim, step, size - step))
        x = torch.cat([x.narrow(dim, 0, step), new], dim)
        step *= 2
    return x


@jet_rule("cumprod")
@without_dimensions
def cumprod(input: Any, dim: int, *, dtype: Any = None) -> Any:
    """Multiply without dividing, so that a zero is an entry like any other."""
    dtype = dtype or input.dtype
    return _running(torch.mul, wide(input.to(dtype)) * 1, dim).to(dtype)


@jet_rule("prod")
@without_dimensions
def prod(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Multiply halves, without dividing."""
    dtype = dtype or input.dtype
    x = wide(input.to(dtype))
    x, dim = (x.flatten(), 0) if dim is None else (x, dim)
    if not x.shape[dim]:
        return torch.prod(input.primal, dim, keepdim, dtype=dtype)
    while half := x.shape[dim] // 2:
        halves = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([halves, x.narrow(dim, 2 * half, x.shape[dim] % 2)], dim)
    return (x if keepdim else x.squeeze(dim)).to(dtype)


@jet_rule("logcumsumexp")
@without_dimensions
def logcumsumexp(input: Any, dim: int) -> Any:
    return _running(torch.logaddexp, wide(input) * 1, dim).to(input.dtype)


# ---- norms and variances -----------------------------------------------------------------------


@without_dimensions
def euclidean_norm(
    x: Any, dim: Any = None, keepdim: bool = False, least: float = 0.0, size: Any = None
) -> Any:
    """Compute n = ‖x‖ along ``dim``; with e = x / n and p_i = x_i − n_i e:
    n_i = Σ e x_i;  n_ij = Σ e x_ij + Σ p_i p_j / n.

    At 0, where a norm has no derivative, the first order is 0, as torch's autograd has it. The
    second, and gradients of the first, are NaN there, as torch's double backward has them, so that
    no smooth function of a norm (its square, exp(−n²)) is finite and wrong; they are 0 along what
    does not move.

    Args:
        least: the derivatives are 0 for norms below, whose curvature may overflow; for callers that
            raise such norms to ``least``.
        size: the norm of the primal with its dimensions kept, if it is known.
    """
    if not isinstance(x, JetTensor):
        return torch.linalg.vector_norm(x, 2, dim, keepdim)
    streams, layout = wide(x).streams, x.jet_layout
    dims = behind_streams_all(varargs(dim), x.ndim) if dim not in (None, (), []) else []
    dims = dims or list(range(1, x.ndim + 1))
    if size is not None:
        size = size.unsqueeze(0)
    else:
        size = torch.linalg.vector_norm(streams[:1], 2, dims, True)
    flat = (size == 0) | (size < least)
    moves = (streams[1:].detach() != 0).any(dim=dims, keepdim=True) if least == 0 else None
    still = flat if moves is None else flat & ~moves.any(dim=0, keepdim=True)
    # Divided by 0 at a kink, for the gradient to be NaN there.
    unit = (streams[:1] / size.masked_fill(still, 1)).masked_fill(flat, 0)

    def along(tangents: Tensor) -> Tensor:
        return (unit * tangents).sum(dims, keepdim=True)

    first = along(streams[layout.first])
    across = streams[layout.first] - unit * first
    parts = [size, first]
    if layout.seconds:
        products = layout.quadratic(across, across) / size.masked_fill(flat, 1)
        curved = products.sum(dims, keepdim=True)
        curved = curved.masked_fill(flat, 0)
        if moves is not None:
            first_moves, second_moves = moves.split([layout.directions, layout.seconds])
            both = layout.quadratic(first_moves.to(size.dtype), first_moves.to(size.dtype)) > 0
            curved = curved.masked_fill(flat & (both | second_moves), math.nan)
        parts.append(along(streams[layout.second]) + curved)
    out = torch.cat(parts)
    return x.with_streams((out if keepdim else out.squeeze(dims)).to(x.dtype))


@jet_rule("hypot")
def hypot(input: Any, other: Any) -> Any:
    """Compute the norm of the two, whose derivatives at the origin are 0."""
    size = torch.hypot(primal_of(input), primal_of(other)).unsqueeze(0)
    return euclidean_norm(torch.stack(torch.broadcast_tensors(input, other)), 0, size=size)


@jet_rule("norm")
def norm(
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: Any = None,
) -> Any:
    """Compute the norm of a vector; other norms go to the general rule."""
    p = 2 if p in ("fro", None) else p
    if isinstance(p, str):
        said = f"p={p!r} is not covered, only numbers"
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
        out = rule(x, ord, dim, keepdim, dtype=dtype)
        if not isinstance(out, JetTensor) or ord in (0, -math.inf):
            return out
        undefined = euclidean_norm(x, dim, keepdim).streams.isnan()  # at 0, along what moves
        return out.with_streams(out.streams.masked_fill(undefined, math.nan))
    x = x if dtype is None else x.to(dtype)
    return euclidean_norm(x, dim, keepdim)


@jet_rule("pairwise_distance")
def pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@jet_rule(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        raise missing_rule(F.triplet_margin_loss, "size_average and reduce; use reduction")
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    losses = (margin + near - far).clamp_min(0)
    return losses if reduction == "none" else getattr(losses, reduction)()


@jet_rule(*filter(None, [torch_private.find("torch._weight_norm")]))
def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Compute v g / ‖v‖, the norm over all dimensions but ``dim``; over all where it is −1."""
    dims = [place for place in range(v.ndim) if dim == -1 or place != dim]
    return v * (g / euclidean_norm(v, dims, True))


@jet_rule("cdist")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


@jet_rule("dist")
def dist(input: Any, other: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(input - other, p)


@jet_rule(torch.linalg.matrix_norm)
def matrix_norm(
    A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord == "fro":
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    said = f"ord={ord!r} is not covered, only 'fro'"
    return general_rule(torch.linalg.matrix_norm, said)(A, ord, dim, keepdim, dtype=dtype)


@jet_rule(torch.linalg.norm)
def linalg_norm(
    A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    one_dimension = isinstance(dim, int) or (dim is None and A.ndim == 1)
    if ord is None or (ord in (2, 2.0) and one_dimension):
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    said = f"ord={ord!r} is covered for vectors only, and only 2"
    return general_rule(torch.linalg.norm, said)(A, ord, dim, keepdim, dtype=dtype)


def _moments(input: Any, args: tuple, named: dict, root: bool = False) -> tuple[Any, Any]:
    """Return variance and mean for ``(dim, *, correction, keepdim)`` and the older
    ``(dim, unbiased, keepdim)`` and ``(unbiased)``.

    With ``root``, the standard deviation instead, which has no derivative where all entries are
    equal (`euclidean_norm`).
    """
    if args and isinstance(args[0], bool):
        args = (None, *args)
    named.update(zip(("dim", "unbiased", "keepdim"), args, strict=False))
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    correction = named.get("correction")
    if correction is None:
        correction = int(named.get("unbiased", True))
    dims = list(range(input.ndim)) if dim is None else varargs(dim)
    mean = wide(input).mean(dims, keepdim=True)
    centred = wide(input) - mean
    count = input.shape.numel() // max(1, mean.shape.numel())
    left = max(0, count - correction)
    if root:
        # torch's own deviation does not overflow.
        own = torch.std(centred.primal, dims, correction=correction, keepdim=True)
        root_of_count = math.sqrt(left)
        size = own * root_of_count
        spread = euclidean_norm(centred, dims, keepdim, size=size) / root_of_count
    else:
        spread = (centred * centred).sum(dims, keepdim=keepdim) / left
    mean = mean if keepdim else mean.reshape(spread.shape)
    return spread.to(input.dtype), mean.to(input.dtype)


@jet_rule("var")
def var(input: Any, *args: Any, **named: Any) -> Any:
    return _moments(input, args, named)[0]


@jet_rule("std")
def std(input: Any, *args: Any, **named: Any) -> Any:
    return _moments(input, args, named, root=True)[0]


@jet_rule("var_mean")
def var_mean(input: Any, *args: Any, **named: Any) -> Any:
    return _moments(input, args, named)


@jet_rule("std_mean")
def std_mean(input: Any, *args: Any, **named: Any) -> Any:
    return _moments(input, args, named, root=True)
