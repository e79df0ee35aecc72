"""Nonlinear reductions: extreme values, products, norms, variances."""

from __future__ import annotations

import math
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ... import torch_private
from ...differentiable.linalg import associative_scan
from ...torch_private import functional as F
from ..engine.errors import missing_rule
from ..engine.registry import general_rule, jet_rule
from ..engine.tensor import JetTensor, primal_of
from ..engine.types import Dims
from .pointwise import wide
from .streamwise import accept_scalars, reduced_dims, stack_dims

Dtype: TypeAlias = "torch.dtype | None"
Pair: TypeAlias = "tuple[Tensor, Tensor]"
Norm: TypeAlias = "float | str | None"
"""The order of a norm, or its name."""


def register_extremum(name: str) -> None:
    """Register ``max`` or ``min``.

    Along a dimension the derivative is that of the entry whose index torch returns; over all
    entries, ties share the derivative equally.
    """

    @jet_rule(name)
    def rule(
        input: Tensor,
        dim: Tensor | int | None = None,
        keepdim: bool = False,
        *,
        other: Tensor | None = None,
    ) -> Tensor | Pair:
        if isinstance(dim, Tensor) or other is not None:
            return getattr(torch, f"{name}imum")(input, dim if other is None else other)
        return reduce_dim(input, dim, keepdim)

    @accept_scalars
    def reduce_dim(input: Tensor, dim: int | None, keepdim: bool) -> Tensor | Pair:
        if dim is None:
            return getattr(torch, f"a{name}")(input)
        values, index = getattr(torch, name)(primal_of(input), dim, keepdim=True)
        values = torch.gather(input, dim, index)
        if not keepdim:
            values, index = values.squeeze(dim), index.squeeze(dim)
        return getattr(torch.return_types, name)((values, index))


for _name in ("max", "min"):
    register_extremum(_name)


def register_extreme_value(name: str) -> None:
    """Register ``amax`` or ``amin``: ties share the derivative equally, as in torch's autograd."""

    @jet_rule(name)
    @accept_scalars
    def rule(input: JetTensor, dim: Dims = (), keepdim: bool = False) -> JetTensor:
        dims = reduced_dims(dim, input.ndim)
        value = getattr(torch, name)(input.primal, dims, True)
        # Each of n ties has the slope 1/n.  The second derivative is 0: a maximum is linear as long
        # as the order of the entries does not change.
        ties = (input.primal == value).to(input.dtype)
        slopes = ties / ties.sum(dims, True)
        stack_axes = stack_dims(dims, input.ndim)
        tangents = (input.streams[1:] * slopes).sum(stack_axes, keepdim=True)
        streams = torch.cat([value.unsqueeze(0), tangents])
        return input.with_streams(streams if keepdim else streams.squeeze(stack_axes))


for _name in ("amax", "amin"):
    register_extreme_value(_name)


@jet_rule("topk")
@accept_scalars
def topk(
    input: JetTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Pair:
    _, index = torch.topk(input.primal, k, dim, largest, sorted)
    return torch.return_types.topk((torch.gather(input, dim, index), index))


@jet_rule("sort")
@accept_scalars
def sort(input: JetTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Pair:
    _, index = torch.sort(input.primal, dim=dim, descending=descending, stable=stable)
    return torch.return_types.sort((torch.gather(input, dim, index), index))


# ---- products, and cumulative products ---------------------------------------------------------


@jet_rule("cumprod")
@accept_scalars
def cumprod(input: Tensor, dim: int, *, dtype: Dtype = None) -> Tensor:
    """Compute cumulative products by an associative scan.

    Derivatives computed as product / entry would fail at zeros.
    """
    dtype = dtype or input.dtype
    return associative_scan(torch.mul, wide(input.to(dtype)) * 1, dim).to(dtype)


@jet_rule("prod")
@accept_scalars
def prod(
    input: JetTensor, dim: int | None = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Tensor:
    """Compute the product by multiplying one half of the entries by the other, repeatedly.

    Derivatives computed as product / entry would fail at zeros.
    """
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
@accept_scalars
def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    return associative_scan(torch.logaddexp, wide(input) * 1, dim).to(input.dtype)


# ---- norms and variances -----------------------------------------------------------------------


@accept_scalars
def euclidean_norm(
    x: Tensor, dim: Dims = None, keepdim: bool = False, floor: float = 0, norm: Tensor | None = None
) -> Tensor:
    """Compute n = ‖x‖ along ``dim``; with e = x / n and p_i = x_i − n_i e:
    n_i = Σ e x_i;  n_ij = Σ e x_ij + Σ p_i p_j / n.

    At x = 0 a norm has no derivative.  There the first derivatives are 0, as in torch's autograd.
    The second derivatives, and the gradients of the first, are NaN, as in torch's double backward,
    so that a smooth function of a norm (its square, exp(−n²)) never gets finite, wrong derivatives;
    along zero tangents they are 0.

    Args:
        floor: norms below ``floor`` get zero derivatives, since their curvature may overflow; for
            callers that clamp norms at ``floor``.
        norm: the norm of the primal, with the reduced dimensions kept; None: it is computed.
    """
    if not isinstance(x, JetTensor):
        return torch.linalg.vector_norm(x, 2, dim, keepdim)
    streams, layout = wide(x).streams, x.jet_layout
    dims = stack_dims(reduced_dims(dim, x.ndim), x.ndim)
    if norm is not None:
        norm = norm.unsqueeze(0)
    else:
        norm = torch.linalg.vector_norm(streams[:1], 2, dims, True)
    at_kink = (norm == 0) | (norm < floor)
    # [S-1, ...]: which tangents are not 0.  Norms that are clamped at ``floor`` have no kink at 0.
    moves = (streams[1:].detach() != 0).any(dim=dims, keepdim=True) if floor == 0 else None
    is_constant = at_kink if moves is None else at_kink & ~moves.any(dim=0, keepdim=True)
    # Division by 0 at a kink makes the gradient NaN there.
    unit = (streams[:1] / norm.masked_fill(is_constant, 1)).masked_fill(at_kink, 0)

    def project(tangents: Tensor) -> Tensor:
        return (unit * tangents).sum(dims, keepdim=True)

    first = project(streams[layout.first])
    perpendicular = streams[layout.first] - unit * first  # p_i
    results = [norm, first]
    if layout.num_second:
        products = layout.quadratic(perpendicular, perpendicular) / norm.masked_fill(at_kink, 1)
        curvature = products.sum(dims, keepdim=True)
        curvature = curvature.masked_fill(at_kink, 0)
        if moves is not None:
            # n_ij is undefined at 0 if x_ij is not 0, or if neither x_i nor x_j is 0: the quadratic
            # form of 0s and 1s counts such pairs.
            first_moves, second_moves = moves.split([layout.directions, layout.num_second])
            pairs = layout.quadratic(first_moves.to(norm.dtype), first_moves.to(norm.dtype)) > 0
            curvature = curvature.masked_fill(at_kink & (pairs | second_moves), math.nan)
        results.append(project(streams[layout.second]) + curvature)
    out = torch.cat(results)
    return x.with_streams((out if keepdim else out.squeeze(dims)).to(x.dtype))


@jet_rule("hypot")
def hypot(input: Tensor, other: Tensor) -> Tensor:
    """Compute √(input² + other²)."""
    # torch's own value does not overflow where the squares would.
    norm = torch.hypot(primal_of(input), primal_of(other)).unsqueeze(0)
    return euclidean_norm(torch.stack(torch.broadcast_tensors(input, other)), 0, norm=norm)


@jet_rule("norm")
def norm(
    input: Tensor,
    p: Norm = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: None = None,
    dtype: Dtype = None,
) -> Tensor:
    """Compute the norm of a vector; for a norm by name call the forward-mode rule."""
    p = 2 if p in ("fro", None) else p
    if isinstance(p, str):
        rule = general_rule(torch.norm, f"p={p!r} is not covered, only numbers")
        return rule(input, p, dim, keepdim, dtype=dtype)
    return vector_norm(input, p, dim, keepdim, dtype=dtype)


@jet_rule(torch.linalg.vector_norm)
def vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Tensor:
    if ord in (1, math.inf):
        magnitudes = x.abs() if dtype is None else x.abs().to(dtype)
        dims = reduced_dims(dim, x.ndim)
        return magnitudes.sum(dims, keepdim) if ord == 1 else magnitudes.amax(dims, keepdim)
    if ord not in (2, 2.0):
        rule = general_rule(torch.linalg.vector_norm, f"ord={ord!r} is not covered, only 2")
        out = rule(x, ord, dim, keepdim, dtype=dtype)
        if not isinstance(out, JetTensor) or ord in (0, -math.inf):
            return out
        # At 0, where there is no derivative, torch's forward mode gives 0.
        is_undefined = cast(JetTensor, euclidean_norm(x, dim, keepdim)).streams.isnan()
        return out.with_streams(out.streams.masked_fill(is_undefined, math.nan))
    x = x if dtype is None else x.to(dtype)
    return euclidean_norm(x, dim, keepdim)


@jet_rule("pairwise_distance")
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@jet_rule(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
    **legacy: bool | None,
) -> Tensor:
    if set(legacy.values()) - {None}:
        raise missing_rule(F.triplet_margin_loss, "size_average and reduce; use reduction")
    d_positive, d_negative = (F.pairwise_distance(anchor, x, p, eps) for x in (positive, negative))
    if swap:
        d_negative = torch.minimum(d_negative, F.pairwise_distance(positive, negative, p, eps))
    losses = (margin + d_positive - d_negative).clamp_min(0)
    return losses if reduction == "none" else getattr(losses, reduction)()


@jet_rule(*filter(None, [torch_private.find("torch._weight_norm")]))
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Compute v g / ‖v‖, with the norm over all dimensions except ``dim``; over all if it is −1."""
    dims = [d for d in range(v.ndim) if dim == -1 or d != dim]
    return v * (g / euclidean_norm(v, dims, True))


@jet_rule("cdist")
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


@jet_rule("dist")
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(input - other, p)


@jet_rule(torch.linalg.matrix_norm)
def matrix_norm(
    A: Tensor, ord: Norm = "fro", dim: Dims = (-2, -1), keepdim: bool = False, **kwargs: Dtype
) -> Tensor:
    if ord == "fro":
        return vector_norm(A, 2, dim, keepdim, **kwargs)
    rule = general_rule(torch.linalg.matrix_norm, f"ord={ord!r} is not covered, only 'fro'")
    return rule(A, ord, dim, keepdim, **kwargs)


@jet_rule(torch.linalg.norm)
def linalg_norm(
    A: Tensor, ord: Norm = None, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Tensor:
    is_vector_norm = isinstance(dim, int) or (dim is None and A.ndim == 1)
    if ord is None or (ord in (2, 2.0) and is_vector_norm):
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    raise missing_rule(torch.linalg.norm, f"ord={ord!r} is covered for vectors only, and only 2")


def register_variance(name: str) -> None:
    """Register ``var``, ``std``, ``var_mean`` or ``std_mean``.

    Their arguments are ``(dim, *, correction, keepdim)``, or the older ``(dim, unbiased, keepdim)``
    and ``(unbiased)``.  A standard deviation has no derivative if all entries are equal (see
    `euclidean_norm`).
    """

    @jet_rule(name)
    def rule(
        input: Tensor,
        dim: Dims = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Tensor | Pair:
        if isinstance(dim, bool):
            unbiased, dim = dim, None
        if correction is None:
            correction = int(unbiased)
        dims = reduced_dims(dim, input.ndim)
        mean = wide(input).mean(dims, keepdim=True)
        centred = wide(input) - mean
        divisor = max(0, input.shape.numel() // max(1, mean.shape.numel()) - correction)
        if name.startswith("std"):
            # torch's own standard deviation does not overflow where the squares would.
            deviation = torch.std(primal_of(centred), dims, correction=correction, keepdim=True)
            norm = deviation * math.sqrt(divisor)
            result = euclidean_norm(centred, dims, keepdim, norm=norm) / math.sqrt(divisor)
        else:
            result = (centred * centred).sum(dims, keepdim=keepdim) / divisor
        result = result.to(input.dtype)
        if name in ("var", "std"):
            return result
        return result, (mean if keepdim else mean.reshape(result.shape)).to(input.dtype)


for _name in ("var", "std", "var_mean", "std_mean"):
    register_variance(_name)
