"""Linear algebra: systems of equations, determinants and factors of matrices.

The formulas replace torch's forward mode, which is wrong for: solutions and determinants at order
2; a Vandermonde matrix at 0; a triangular factor whose tangent has entries outside the triangle;
right-hand sides that could be either matrices or a batch of vectors; the gradient of a condition
number's tangent.  16-bit matrices are computed in float32, as torch does under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ...differentiable import linalg
from ...ops.library import transformed
from ..engine.errors import missing_rule
from ..engine.registry import jet_rule
from ..engine.tensor import JetTensor, align_streams, common_layout, lift, primal_of
from .pointwise import push_forward, wide


@jet_rule(torch.linalg.vander)
def vander(x: Tensor, *, N: int | None = None) -> Tensor:
    x = x.unsqueeze(0) if x.ndim == 0 else x
    powers = [torch.ones_like(x)]
    for _ in range((x.shape[-1] if N is None else N) - 1):
        powers.append(powers[-1] * x)
    return torch.stack(powers, -1)


@jet_rule("cholesky_solve")
def cholesky_solve(input: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    """Solve L Lᵀ X = B, or Uᵀ U X = B, by two triangular systems; B is ``input``."""
    input, L = wide(input), wide(L)
    factor = L.triu() if upper else L.tril()
    lower = factor.mH if upper else factor
    forward = torch.linalg.solve_triangular(lower, input, upper=False)
    return torch.linalg.solve_triangular(lower.mH, forward, upper=True)


@jet_rule("triangular_solve")
def triangular_solve(
    input: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (X, A) with A X = B, as torch's deprecated function does; B is ``input``."""
    input, A = wide(input), wide(A)
    factor = A.triu() if upper else A.tril()
    factor = factor.mT if transpose else factor
    solution = torch.linalg.solve_triangular(
        factor, input, upper=upper != transpose, unitriangular=unitriangular
    )
    copy = A.mT.clone(memory_format=torch.contiguous_format).mT  # column-major, as torch's result
    return torch.return_types.triangular_solve((solution, copy))


@jet_rule(torch.linalg.cond)
def cond(input: Tensor, p: float | str | None = None) -> Tensor:
    """Return the condition number ‖A‖ ‖A⁻¹‖; for p = 2 and −2 it is the ratio of the extreme
    singular values."""
    input = wide(input)
    if p in (None, 2, -2):
        singular_values = torch.linalg.svdvals(input)
        largest, least = singular_values[..., 0], singular_values[..., -1]
        return least / largest if p == -2 else largest / least

    def norm(matrix: Tensor) -> Tensor:
        if p == "nuc":
            return torch.linalg.svdvals(matrix).sum(-1)
        if p == "fro":
            return matrix.square().sum((-2, -1)).sqrt()
        totals = matrix.abs().sum(-2 if p in (1, -1) else -1)  # column sums, or row sums
        return totals.amax(-1) if p in (1, torch.inf) else totals.amin(-1)

    return norm(input) * norm(torch.linalg.inv(input))


@jet_rule("cholesky_inverse")
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """Return (L Lᵀ)⁻¹, or (Uᵀ U)⁻¹."""
    L = wide(L)
    unit = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return cholesky_solve(unit.expand(L.shape), L, upper)


# ---- systems of linear equations ---------------------------------------------------------------


@jet_rule(torch.linalg.solve)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    A, B = wide(A), wide(B)
    return _solve_jets(A, B, torch.linalg.solve(*primal_of((A, B)), left=left), left)


@jet_rule(torch.linalg.solve_ex)
def solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    A, B = wide(A), wide(B)
    primals = torch.linalg.solve_ex(*primal_of((A, B)), left=left, check_errors=check_errors)
    if not transformed() and bool(primals.info.any()):
        raise missing_rule(torch.linalg.solve_ex, "it failed, as its info says")
    return type(primals)((_solve_jets(A, B, primals.result, left), primals.info))


@jet_rule(torch.linalg.tensorsolve)
def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    return linalg.tensorsolve(A, B, dims, solve=solve)


@jet_rule("inverse")
def inverse(input: Tensor) -> Tensor:
    return torch.linalg.inv(wide(input))


def _solve_jets(A: Tensor, B: Tensor, value: Tensor, left: bool) -> Tensor:
    """Return the jet of X in A X = B (``left``), or X A = B:
    A X_i = B_i − A_i X;  A X_ij = B_ij − A_ij X − A_i X_j − A_j X_i.

    Args:
        A, B: ``[..., n, n]`` and ``[..., n, k]``; one of them may be plain.
        value: the primal of X.
    """
    layout = common_layout(A, B)
    # As in torch, B is a batch of vectors if it has such a shape, even if it could be a matrix.
    if B.ndim == 1 or B.shape == A.shape[:-1]:
        return _solve_jets(A, B.unsqueeze(-1), value.unsqueeze(-1), left).squeeze(-1)
    if not left:
        return _solve_jets(A.mT, B.mT, value.mT, True).mT
    matrix = primal_of(A)
    rhs = align_streams(lift(B, layout), value.ndim)
    first, second = rhs[layout.first], rhs[layout.second]
    if isinstance(A, JetTensor):
        streams = align_streams(A, value.ndim)
        first = first - streams[layout.first] @ value
        second = second - streams[layout.second] @ value
    first = _solve_stack(matrix, first.expand(-1, *value.shape))
    results = [value.unsqueeze(0), first]
    if layout.num_second:
        if isinstance(A, JetTensor):
            second = second - layout.crossed(streams[layout.first], first, torch.matmul)
        results.append(_solve_stack(matrix, second.expand(-1, *value.shape)))
    return JetTensor(torch.cat(results), layout)


def _solve_stack(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Return the solutions ``[N, ..., n, k]`` for a stack of right-hand sides of that shape.

    The right-hand sides become ``k N`` columns of one system, so that ``matrix``, ``[..., n, n]``,
    is factorised once.
    """
    columns = torch.linalg.solve(matrix, rhs.movedim(0, -1).flatten(-2))
    return columns.unflatten(-1, (rhs.shape[-1], len(rhs))).movedim(-1, 0)


# ---- determinants ------------------------------------------------------------------------------


def _log_abs_det(matrix: JetTensor, value: Tensor) -> JetTensor:
    """Return the jet of ln |det A|; for complex A, that of ln det A.

    With M_i = A⁻¹ A_i and M_ij = A⁻¹ A_ij, its streams are tr M_i and tr M_ij − tr M_i M_j (by
    Jacobi's formula, and (A⁻¹)_j = −A⁻¹ A_j A⁻¹).

    Args:
        value: the primal, ln |det A|.
    """
    layout = matrix.jet_layout

    def trace_of_product(a: Tensor, b: Tensor) -> Tensor:
        return (a * b.mT).sum((-2, -1))

    ratios = _solve_stack(matrix.primal, matrix.streams[1:])
    first = ratios[: layout.directions]
    tangents = ratios.diagonal(dim1=-2, dim2=-1).sum(-1)
    results = [value.unsqueeze(0).to(tangents.dtype), tangents[: layout.directions]]
    if layout.num_second:
        # `crossed` adds tr M_i M_j and tr M_j M_i, which are equal.
        products = layout.crossed(first, first, trace_of_product) / 2
        results.append(tangents[layout.directions :] - products)
    return matrix.with_streams(torch.cat(results))


def register_slogdet(function: Callable[[Tensor], torch.return_types.slogdet]) -> None:
    """Register a spelling of ``slogdet``."""

    @jet_rule(function)
    def rule(input: JetTensor) -> torch.return_types.slogdet:
        input = wide(input)
        value = function(input.primal)
        if not transformed() and bool((value.logabsdet == -torch.inf).any()):
            raise missing_rule(function, "its matrix is singular, where it has no derivative")
        log = _log_abs_det(input, value.logabsdet)
        if not input.dtype.is_complex:
            return type(value)((value.sign, log))
        # The sign is value.sign · e^(iφ), where φ has the primal 0 and the tangents of Im ln det A.
        change = log.with_streams(torch.cat([torch.zeros_like(log.streams[:1]), log.streams[1:]]))
        return type(value)((value.sign * torch.exp(1j * change.imag), log.real))


for _function in (torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet):
    register_slogdet(_function)


@jet_rule("logdet")
def logdet(input: Tensor) -> Tensor:
    sign, log_magnitude = torch.linalg.slogdet(input)
    return log_magnitude + sign.log()  # NaN if the determinant is negative, as in torch


@jet_rule("det", torch.linalg.det)
def det(A: JetTensor) -> Tensor:
    """Compute det A = σ det B (d − c B⁻¹ b), |σ| = 1, from the blocks [[B, b], [c, d]] of Uᴴ A V,
    where U and V are the singular vectors of A, as constants.

    B is invertible even if one singular value of A is 0.
    """
    A = wide(A)
    if not A.shape[-1]:
        return torch.linalg.det(A.primal)
    U, singular_values, Vh = torch.linalg.svd(A.primal.detach())
    if singular_values.shape[-1] > 1 and not transformed():
        # Below the bound, the second derivatives of det B would lose more than half of the digits.
        bound = torch.finfo(A.dtype).eps ** 0.5 * singular_values[..., 0]
        if bool((singular_values[..., -2] <= bound).any()):
            raise missing_rule(
                torch.linalg.det, "two singular values of its matrix, or more, are 0 up to rounding"
            )
    # det A = det U · det(Uᴴ A V) · det Vᴴ for any unitary U and V, so these may be constants: the
    # derivatives of an SVD would be infinite if singular values are equal.
    sign = (torch.linalg.det(U) * torch.linalg.det(Vh)).sgn()
    rotated = U.mH @ A @ Vh.mH
    block, corner = cast(JetTensor, rotated[..., :-1, :-1]), rotated[..., -1, -1]
    if not block.shape[-1]:
        return sign * corner
    column = rotated[..., :-1, -1:]
    solution = _solve_jets(block, column, torch.linalg.solve(*primal_of((block, column))), True)
    product = rotated[..., -1:, :-1] @ solution
    value = torch.linalg.det(block.primal)
    # det B = e^(ln det B), whose derivatives by ln det B are det B.  `push_forward` uses only the
    # tangents of ln det B, so that its primal may be any number.
    block_det = push_forward(_log_abs_det(block, value.detach()), (value, value, value))
    return sign * block_det * (corner - product[..., 0, 0])
