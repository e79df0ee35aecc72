"""Distances between points."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.library import wide
from .formulas import formula, result_dtype, without_autocast


@formula(torch.cdist, refuses="forward, second, mixed")
def cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> Tensor:
    """Take the root of squared distances from one matrix product for p = 2, in P × R memory; for
    other p the norm of P × R differences."""
    dtype = result_dtype(x1)
    x1, x2 = wide(x1), wide(x2)
    if p != 2 or not x1.numel() or not x2.numel():
        return _norm((x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs(), p).to(dtype)
    with without_autocast(x1):
        value = torch.cdist(x1.detach(), x2.detach(), 2.0, compute_mode).detach()
        # Distances do not change if both are shifted; a shift by the mean loses the fewest digits.
        mean = x2.detach().mean(-2, keepdim=True)
        if x1.shape[:-2] != x2.shape[:-2]:
            mean = mean.mean((*range(mean.ndim - 2),), keepdim=True)
        a, b = x1 - mean.detach(), x2 - mean.detach()
        squares = a.square().sum(-1)[..., None] + b.square().sum(-1)[..., None, :] - 2 * (a @ b.mT)
    squares = squares + (value.square() - squares.detach())  # torch's value, our derivatives
    is_zero = value == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, squares).sqrt()).to(dtype)


@formula(torch.pdist, refuses="forward, second, mixed")
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Take the norm of the differences of all pairs."""
    dtype, points = result_dtype(input), wide(input)
    left_rows, right_rows = torch.triu_indices(len(points), len(points), 1, device=points.device)
    # Not points[first], whose backward does not support the batched tensors of is_grads_batched.
    difference = points.index_select(0, left_rows) - points.index_select(0, right_rows)
    return _norm(difference.abs(), p).to(dtype)


def _norm(sizes: Tensor, p: float) -> Tensor:
    """Return the norm (Σ size^p)^(1/p) over the last dimension.

    As in torch, the gradient is 0 where the norm is 0; for p < 2, so is the gradient with respect
    to a size of 0.
    """
    if p == 0:
        return sizes.ne(0).to(sizes.dtype).sum(-1) + 0 * sizes.sum(-1)
    if p == 1:
        return sizes.sum(-1)
    if p == torch.inf:
        return sizes.amax(-1)
    is_zero = sizes == 0
    total = torch.where(is_zero, 0, torch.where(is_zero, 1, sizes) ** p).sum(-1)
    is_zero = total == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, total) ** (1 / p))
