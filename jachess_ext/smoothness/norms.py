"""From the streams of a block's jet to the norms of its Jacobian and Hessian (spec 01)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_correction(pairs: int) -> float:
    """c_P = E[χ_P]/√P = √(2/P) Γ((P+1)/2)/Γ(P/2).

    The square root of a mean of P squares of a Gaussian is c_P times its standard deviation in
    the mean, and uᵀHw is asymptotically Gaussian given u; dividing by c_P takes that bias out.
    """
    return math.sqrt(2 / pairs) * math.exp(math.lgamma((pairs + 1) / 2) - math.lgamma(pairs / 2))


def safe_sqrt(squares: Tensor) -> Tensor:
    """Square root with derivative 0, not infinity, at 0 (a norm's subgradient there)."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0)


def accumulation(tensor: Tensor) -> Tensor:
    """Halves in float32: norms are summed in at least that (spec 01, mixed precision)."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def first_squares(first: Tensor) -> Tensor:
    """Mean over directions of ‖(J u_i)_t‖²: ``[q, ..., d]`` → ``[...]``.  Its mean is ‖J_t‖²."""
    return accumulation(first).square().sum(-1).mean(0)


def second_squares(second: Tensor, indices: Tensor | None) -> Tensor:
    """Mean over pairs of (u_iᵀ H_{t,j} u_i')²: ``[P, ..., d]`` → ``[..., |D|]``.

    Its mean is ‖H_{t,j}‖², since u_i and u_i' are independent.  ``indices`` is D; None: all.
    """
    if indices is not None:
        second = second.index_select(-1, indices.to(second.device))
    return accumulation(second).square().mean(0)


def hessian_norm(
    squares: Tensor, *, pairs: int, scale: float, per_dimension: bool, squared: bool
) -> Tensor:
    """From ‖H_{t,j}‖² of the j in D to one number per token: ``[..., |D|]`` → ``[...]``.

    Args:
        pairs: how many pairs the squares are means of; 0 where they are exact.
        scale: of the sum over D, from `scope.sample_dimensions`.
        per_dimension: Σ_j ‖H_j‖ (Eq. 7); False: √(Σ_j ‖H_j‖²), the tensor's Frobenius norm.
        squared: the squares of these norms.
    """
    if not per_dimension:
        total = squares.sum(-1)
        return total if squared else safe_sqrt(total)
    if squared:
        return squares.sum(-1) * scale
    correction = chi_correction(pairs) if pairs else 1.0
    return safe_sqrt(squares).sum(-1) * (scale / correction)
