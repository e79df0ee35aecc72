"""From the streams of a block's jet to the norms of its Jacobian and Hessian (spec 01)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..jet.layout import JetLayout


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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms of halves are summed in float32 (spec 01, mixed precision)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _StreamSquares(torch.autograd.Function):
    """Σ_d x_i² averaged over i, and x_ij² averaged over the pairs.

    Written out because slicing a stack costs a zero-filled stack and an addition per slice in the
    composed backward, for every layer.
    """

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, layout: JetLayout, indices: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(streams, indices)
        ctx.layout = layout
        wide = accumulation_dtype(streams.dtype)
        first = torch.linalg.vector_norm(streams[layout.first], dim=-1, dtype=wide).square().mean(0)
        if not layout.pairs:
            return first, first.new_zeros(())
        return first, _chosen(streams[layout.second], indices).to(wide).square().mean(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Tensor, None, None]:
        streams, indices = ctx.saved_tensors
        layout = ctx.layout
        grad = torch.empty_like(streams)
        grad[0] = 0
        scale = (2 / layout.directions * grad_first).unsqueeze(-1).to(streams.dtype)
        torch.mul(streams[layout.first], scale, out=grad[layout.first])
        if layout.pairs:
            second = streams[layout.second]
            scale = (2 / len(layout.pairs) * grad_second).to(streams.dtype)
            if indices is None:
                torch.mul(second, scale, out=grad[layout.second])
            else:
                grad[layout.second] = 0
                grad[layout.second].index_copy_(-1, indices, _chosen(second, indices) * scale)
        return grad, None, None


def stream_squares(
    streams: Tensor, layout: JetLayout, indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means of squares of a block's streams ``[S, ..., d]``.

    Args:
        indices: D, the output dimensions whose second derivatives are wanted; None: all.

    Returns:
        ``[...]``, mean over directions of ‖(J u_i)_t‖², whose expectation is ‖J_t‖²; and
        ``[..., |D|]``, mean over pairs of (u_iᵀ H_{t,j} u_i')², whose expectation is ‖H_{t,j}‖²
        since u_i and u_i' are independent (empty where the layout has no pairs).
    """
    indices = None if indices is None else indices.to(streams.device)
    return _StreamSquares.apply(streams, layout, indices)


def _chosen(second: Tensor, indices: Tensor | None) -> Tensor:
    return second if indices is None else second.index_select(-1, indices)


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
