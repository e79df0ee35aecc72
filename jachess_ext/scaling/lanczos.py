"""Quadratic forms of a matrix function by Lanczos quadrature (Golub & Meurant 2010)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_INVARIANT = 1e-10  # of the largest entry of T: the Krylov space is exhausted


def positive_quadratic(
    product: Callable[[Tensor], Tensor], v: Tensor, steps: int
) -> tuple[float, float]:
    """vᵀ H⁺ v for a symmetric H known by its products, H⁺ without the negative eigenvalues.

    With the Lanczos tridiagonal T_k started at v/‖v‖, vᵀ f(H) v ≈ ‖v‖² (f(T_k))₁₁, here with
    f(λ) = max(λ, 0); exact once the Krylov space is exhausted.  Full reorthogonalisation, twice.

    Args:
        product: u -> H u, [n] -> [n].
        v: [n].
        steps: products at most; as many vectors of v's size are kept.

    Returns:
        The value and its uncertainty: what it changes by if every Ritz value moves by its residual,
        ‖v‖² Σ_i s_1i² β_k |s_ki|; 0 where the Krylov space is exhausted.
    """
    norm = v.norm()
    if norm == 0:
        return 0.0, 0.0
    square = float(norm) ** 2
    basis = [v / norm]
    diagonal: list[float] = []
    beside: list[float] = []
    last = min(steps, v.numel())
    while True:
        w = product(basis[-1])
        diagonal.append(float(torch.dot(w, basis[-1])))
        stacked = torch.stack(basis)
        for _ in range(2):
            w = w - stacked.T @ (stacked @ w)
        size = float(w.norm())
        largest = max(map(abs, [*diagonal, *beside]))
        if size <= _INVARIANT * largest or len(basis) == v.numel():
            return square * _first_entry(diagonal, beside)[0], 0.0
        if len(basis) == last:
            value, residual = _first_entry(diagonal, beside)
            return square * value, square * size * residual
        beside.append(size)
        basis.append(w / size)


def _first_entry(diagonal: list[float], beside: list[float]) -> tuple[float, float]:
    """(max(T, 0))₁₁ of the tridiagonal T, and Σ_i s_1i² |s_ki| of its eigenvectors s."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
        matrix = matrix + off + off.T
    values, vectors = torch.linalg.eigh(matrix)
    weights = vectors[0].square()
    return float(weights @ values.clamp(min=0)), float(weights @ vectors[-1].abs())
