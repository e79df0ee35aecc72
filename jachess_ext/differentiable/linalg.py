"""Linear algebra."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ops.library import wide
from .formulas import formula, result_dtype, without_autocast

_NESTED_FORWARD = "jvp(jvp), vjp(jvp)"


@formula(torch.cholesky, Tensor.cholesky, refuses="forward, mixed")
def cholesky(input: Tensor, upper: bool = False) -> Tensor:
    """`torch.linalg.cholesky`."""
    return torch.linalg.cholesky(input.mH).mH if upper else torch.linalg.cholesky(input)


@formula(torch.ormqr, Tensor.ormqr, refuses="forward, mixed")
def ormqr(
    input: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False
) -> Tensor:
    """Apply the Householder reflections I − τ v vᴴ one by one.

    Each v is a column of ``input``: its entries below the diagonal, 1 on the diagonal, 0 above.
    """
    if not left:  # C Q = (Qᴴ Cᴴ)ᴴ
        return ormqr(input, tau, other.mH, True, not transpose).mH
    dtype = result_dtype(other, ["cpu"])
    input, tau, other = wide(input), wide(tau), wide(other)
    num_rows, count = input.shape[-2], tau.shape[-1]
    unit = torch.eye(num_rows, count, dtype=input.dtype, device=input.device)
    vectors = input[..., :count].tril(-1) + unit
    for n in range(count) if transpose else reversed(range(count)):
        v, factor = vectors[..., n : n + 1], tau[..., n, None, None]
        factor = factor.conj() if transpose else factor
        with without_autocast(input):
            other = other - factor * v @ (v.mH @ other)
    return other.to(dtype)


@formula(torch.linalg.householder_product, torch.orgqr, Tensor.orgqr, wrong=_NESTED_FORWARD)
def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """Apply `ormqr` to the identity."""
    unit = torch.eye(*input.shape[-2:], dtype=input.dtype, device=input.device)
    return ormqr(input, tau, unit.expand(input.shape))


def associative_scan(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Return the inclusive scan x_1, x_1 ∘ x_2, x_1 ∘ x_2 ∘ x_3, … along ``dim``, in ⌈log₂ n⌉ steps
    (Hillis and Steele 1986); ``combine`` is the associative operation ∘."""
    step, size = 1, x.shape[dim]
    while step < size:
        # Before this step entry i combines the last ``step`` entries up to x_i, or all of them if
        # there are fewer; after the step, twice as many.
        combined = combine(x.narrow(dim, 0, size - step), x.narrow(dim, step, size - step))
        x = torch.cat([x.narrow(dim, 0, step), combined], dim)
        step *= 2
    return x


@formula(torch.cumprod, Tensor.cumprod, wrong="jvp(jvp), vjp(jvp) at a zero")
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply neighbours 1, 2, 4, … entries away."""
    x = torch.atleast_1d(input.to(dtype or input.dtype))
    return associative_scan(torch.mul, x, dim).reshape(input.shape)


# ---- systems of linear equations ----------------------------------------------------------------


@formula(torch.linalg.solve, wrong=_NESTED_FORWARD)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Add A⁻¹ (B − A X), which is 0 and has the derivatives, to torch's solution X, a constant."""
    if B.ndim == 1 or B.shape == A.shape[:-1]:
        return solve(A, B.unsqueeze(-1)).squeeze(-1)
    if not left:
        return solve(A.mT, B.mT).mT
    value = torch.linalg.solve(A.detach(), B.detach()).detach()
    return value + torch.linalg.inv(A) @ (B - A @ value)


@formula(torch.linalg.solve_ex, wrong=_NESTED_FORWARD)
def solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """Solve by `solve`."""
    solved = torch.linalg.solve_ex(A.detach(), B.detach(), left=left, check_errors=check_errors)
    return type(solved)((solve(A, B, left=left), solved.info))


@formula(torch.linalg.tensorsolve, wrong=_NESTED_FORWARD)
def tensorsolve(
    A: Tensor,
    B: Tensor,
    dims: Sequence[int] | None = None,
    *,
    solve: Callable[[Tensor, Tensor], Tensor] = solve,
) -> Tensor:
    """Solve by `solve`, after the dimensions ``dims`` of A are moved to the end."""
    if dims is not None:
        A = A.movedim(tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    size = B.shape.numel()
    return solve(A.reshape(size, size), B.flatten()).reshape(A.shape[B.ndim :])


# ---- determinants -------------------------------------------------------------------------------


def _diagonal(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return det P (1 or −1) and the diagonal of U of the decomposition A = P L U."""
    permutation, _, upper = torch.linalg.lu(A)
    sign = torch.linalg.det(permutation.detach().real).round().to(A.dtype)
    return sign, upper.diagonal(dim1=-2, dim2=-1)


@formula(torch.linalg.slogdet, torch.slogdet, Tensor.slogdet, wrong=_NESTED_FORWARD)
def slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the logarithms of the diagonal of the LU decomposition."""
    sign, diagonal = _diagonal(A)
    magnitudes = diagonal.abs()
    results = sign * (diagonal / magnitudes).prod(-1), magnitudes.log().sum(-1)
    return torch.return_types.linalg_slogdet(results)  # type: ignore[attr-defined,no-any-return]


@formula(torch.logdet, Tensor.logdet, wrong=_NESTED_FORWARD)
def logdet(A: Tensor) -> Tensor:
    """Add the logarithm of the sign to the result of `slogdet`."""
    sign, log_magnitude = slogdet(A)
    return log_magnitude + sign.log()


@formula(torch.linalg.det, torch.det, Tensor.det, wrong=_NESTED_FORWARD)
def det(A: Tensor) -> Tensor:
    """Compute det B (d − c B⁻¹ b) from the blocks [[B, b], [c, d]] of Uᴴ A V, with the singular
    vectors U and V of A held constant.

    d holds the smallest singular value, so that B has an inverse even where A is singular.
    """
    if not A.shape[-1]:
        return torch.linalg.det(A)
    left, _, right = torch.linalg.svd(A.detach())
    phase = (torch.linalg.det(left) * torch.linalg.det(right)).detach().sgn()
    rotated = left.detach().mH @ A @ right.detach().mH
    block, last = rotated[..., :-1, :-1], rotated[..., -1, -1]
    if not block.shape[-1]:
        return phase * last
    sign, diagonal = _diagonal(block)
    product = rotated[..., -1:, :-1] @ solve(block, rotated[..., :-1, -1:])
    return phase * sign * diagonal.prod(-1) * (last - product[..., 0, 0])
