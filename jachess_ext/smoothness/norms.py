"""From the streams of a block's jet to the norms of its Jacobian and Hessian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..jet.layout import JetLayout
from ..ops import jet_mean_squares


def chi_correction(pairs: int) -> float:
    """c_P = E[χ_P]/√P = √(2/P) Γ((P+1)/2)/Γ(P/2).

    The square root of a mean of P squares of a Gaussian is c_P times its standard deviation in
    the mean, and uᵀHw is asymptotically Gaussian given u; dividing by c_P takes that bias out.
    """
    return math.sqrt(2 / pairs) * math.exp(math.lgamma((pairs + 1) / 2) - math.lgamma(pairs / 2))


def safe_sqrt(squares: Tensor) -> Tensor:
    """Square root with derivative 0, not infinity, at 0 (a norm's subgradient there); NaN stays."""
    zero = squares == 0
    return torch.where(zero, 0, torch.where(zero, 1, squares).sqrt())


def stream_squares(
    streams: Tensor, layout: JetLayout, indices: Tensor | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Means of squares of a block's streams ``[S, ..., d]``, in float32 at least.

    Args:
        indices: D, the output dimensions whose second derivatives are wanted; None: all.
        tokens: ``[...]`` booleans, true where a token counts; elsewhere everything is zero.

    Returns:
        ``[...]``, mean over directions of ‖(J u_i)_t‖², whose expectation is ‖J_t‖²; and
        ``[..., |D|]``, mean over pairs of (u_iᵀ H_{t,j} u_i')², whose expectation is ‖H_{t,j}‖²
        since u_i and u_i' are independent (empty where the layout has no pairs).
    """
    indices = None if indices is None else indices.to(streams.device)
    return jet_mean_squares(streams, layout.directions, tokens.to(streams.device), indices)


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
