"""Linear algebra: systems, determinants and factors of matrices.

The formulas replace torch's forward mode, which is wrong for: solutions and determinants at order
2; a Vandermonde matrix at 0; a triangular factor whose tangent has entries outside the triangle;
right-hand sides whose shape could be that of a batch of vectors; the gradient of a condition
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
    """Solve L Lᵀ X = B, or Uᵀ U X = B, by two triangular systems."""
    input, L = wide(input), wide(L)
    factor = L.triu() if upper else L.tril()
    lower = factor.mH if upper else factor
    half = torch.linalg.solve_triangular(lower, input, upper=False)
    return torch.linalg.solve_triangular(lower.mH, half, upper=True)


@jet_rule("triangular_solve")
def triangular_solve(
    input: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (X, A) of A X = B, as the deprecated function of torch does."""
    input, A = wide(input), wide(A)
    factor = A.triu() if upper else A.tril()
    factor = factor.mT if transpose else factor
    solution = torch.linalg.solve_triangular(
        factor, input, upper=upper != transpose, unitriangular=unitriangular
    )
    copy = A.mT.clone(memory_format=torch.contiguous_format).mT  # by columns, as torch's
    return torch.return_types.triangular_solve((solution, copy))


@jet_rule(torch.linalg.cond)
def cond(input: Tensor, p: float | str | None = None) -> Tensor:
    """Return ‖A‖ ‖A⁻¹‖; for p = 2 and −2 the ratio of the extreme singular values."""
    input = wide(input)
    if p in (None, 2, -2):
        values = torch.linalg.svdvals(input)
        largest, least = values[..., 0], values[..., -1]
        return least / largest if p == -2 else largest / least

    def norm(matrix: Tensor) -> Tensor:
        if p == "nuc":
            return torch.linalg.svdvals(matrix).sum(-1)
        if p == "fro":
            return matrix.square().sum((-2, -1)).sqrt()
        sums = matrix.abs().sum(-2 if p in (1, -1) else -1)  # of columns, or of rows
        return sums.amax(-1) if p in (1, torch.inf) else sums.amin(-1)

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
    solved = torch.linalg.solve_ex(*primal_of((A, B)), left=left, check_errors=check_errors)
    if not transformed() and bool(solved.info.any()):
        raise missing_rule(torch.linalg.solve_ex, "it failed, as its info says")
    return type(solved)((_solve_jets(A, B, solved.result, left), solved.info))


@jet_rule(torch.linalg.tensorsolve)
def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    return linalg.tensorsolve(A, B, dims, solve=solve)


@jet_rule("inverse")
def inverse(input: Tensor) -> Tensor:
    return torch.linalg.inv(wide(input))


def _solve_jets(A: Tensor, B: Tensor, value: Tensor, left: bool) -> Tensor:
    """Return the jet of X in A X = B, or X A = B:
    A X_i = B_i − A_i X;  A X_ij = B_ij − A_ij X − A_i X_j − A_j X_i.

    A ``[..., n, n]`` or B ``[..., n, k]`` may be constant.

    Args:
        value: X.
    """
    layout = common_layout(A, B)
    # B of the shape of a batch of vectors is one, as in torch, even if it could be a matrix.
    if B.ndim == 1 or B.shape == A.shape[:-1]:
        return _solve_jets(A, B.unsqueeze(-1), value.unsqueeze(-1), left).squeeze(-1)
    if not left:
        return _solve_jets(A.mT, B.mT, value.mT, True).mT
    matrix = primal_of(A)
    right = align_streams(lift(B, layout), value.ndim)
    first, second = right[layout.first], right[layout.second]
    if isinstance(A, JetTensor):
        streams = align_streams(A, value.ndim)
        first = first - streams[layout.first] @ value
        second = second - streams[layout.second] @ value
    first = _solve_stack(matrix, first.expand(-1, *value.shape))
    parts = [value.unsqueeze(0), first]
    if layout.seconds:
        if isinstance(A, JetTensor):
            second = second - layout.crossed(streams[layout.first], first, torch.matmul)
        parts.append(_solve_stack(matrix, second.expand(-1, *value.shape)))
    return JetTensor(torch.cat(parts), layout)


def _solve_stack(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solutions ``[N, ..., n, k]`` for a stack of right-hand sides of that shape.

    They become ``k N`` columns of one system, so that ``matrix [..., n, n]`` is factorised once.
    """
    columns = torch.linalg.solve(matrix, right.movedim(0, -1).flatten(-2))
    return columns.unflatten(-1, (right.shape[-1], len(right))).movedim(-1, 0)


# ---- determinants ------------------------------------------------------------------------------


def _log_abs_det(matrix: JetTensor, value: Tensor) -> JetTensor:
    """Return the jet of ln |det A|, of complex matrices that of ln det A, by M = A⁻¹ A_…:
    tr M_i;  tr M_ij − tr M_i M_j (Jacobi's formula, and A⁻¹_j = −A⁻¹ A_j A⁻¹).

    Args:
        value: ln |det A|.
    """
    layout = matrix.jet_layout

    def trace_of_product(a: Tensor, b: Tensor) -> Tensor:
        return (a * b.mT).sum((-2, -1))

    ratios = _solve_stack(matrix.primal, matrix.streams[1:])
    first = ratios[: layout.directions]
    tangents = ratios.diagonal(dim1=-2, dim2=-1).sum(-1)
    parts = [value.unsqueeze(0).to(tangents.dtype), tangents[: layout.directions]]
    if layout.seconds:
        # Both orders of a product have the same trace, and `crossed` adds them.
        products = layout.crossed(first, first, trace_of_product) / 2
        parts.append(tangents[layout.directions :] - products)
    return matrix.with_streams(torch.cat(parts))


def register_slogdet(function: Callable[[Tensor], torch.return_types.slogdet]) -> None:
    @jet_rule(function)
    def rule(input: JetTensor) -> torch.return_types.slogdet:
        input = wide(input)
        value = function(input.primal)
        if not transformed() and bool((value.logabsdet == -torch.inf).any()):
            raise missing_rule(function, "its matrix is singular, where it has no derivative")
        log = _log_abs_det(input, value.logabsdet)
        if not input.dtype.is_complex:
            return type(value)((value.sign, log))
        # The sign moves as e^(iφ), φ = Im ln det A from 0 on: the primal's angle is in value.sign.
        turn = log.with_streams(torch.cat([torch.zeros_like(log.streams[:1]), log.streams[1:]]))
        return type(value)((value.sign * torch.exp(1j * turn.imag), log.real))


for _function in (torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet):
    register_slogdet(_function)


@jet_rule("logdet")
def logdet(input: Tensor) -> Tensor:
    sign, size = torch.linalg.slogdet(input)
    return size + sign.log()  # NaN where the determinant is negative, as in torch


@jet_rule("det", torch.linalg.det)
def det(A: JetTensor) -> Tensor:
    """Compute det A = ± det B (d − c B⁻¹ b) from the blocks [[B, b], [c, d]] of Uᴴ A V, with the
    singular vectors of A as constants.  B is invertible even if one singular value of A is 0.
    """
    A = wide(A)
    if not A.shape[-1]:
        return torch.linalg.det(A.primal)
    left, sizes, right = torch.linalg.svd(A.primal.detach())
    if sizes.shape[-1] > 1 and not transformed():
        # The second derivatives of det B would keep less than half of the digits.
        least = torch.finfo(A.dtype).eps ** 0.5 * sizes[..., 0]
        if bool((sizes[..., -2] <= least).any()):
            raise missing_rule(
                torch.linalg.det, "two singular values of its matrix, or more, are 0 up to rounding"
            )
    # det A = det U · det(Uᴴ A V) · det Vᴴ for any unitary U and V: constants are as good, and
    # spare the derivatives of an SVD, which are infinite where singular values tie.
    sign = (torch.linalg.det(left) * torch.linalg.det(right)).sgn()
    turned = left.mH @ A @ right.mH
    block, last = cast(JetTensor, turned[..., :-1, :-1]), turned[..., -1, -1]
    if not block.shape[-1]:
        return sign * last
    column = turned[..., :-1, -1:]
    solution = _solve_jets(block, column, torch.linalg.solve(*primal_of((block, column))), True)
    across = turned[..., -1:, :-1] @ solution
    value = torch.linalg.det(block.primal)
    # det B = e^(ln det B), with itself for both derivatives by ln det B, of which `push_forward`
    # reads the tangents alone: any primal will do.
    size = push_forward(_log_abs_det(block, value.detach()), (value, value, value))
    return sign * size * (last - across[..., 0, 0])
