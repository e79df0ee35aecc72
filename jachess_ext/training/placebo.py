"""A penalty's placebo: steps of its size in directions that mean nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def placebo(penalty: Tensor, parameters: Iterable[nn.Parameter], seed: int) -> Tensor:
    """A scalar with the penalty's value, whose gradient is random and has its gradient's norm.

    The direction is uniform over all directions of the trained parameters together.

    Args:
        penalty: attached to the graph, which is kept for the task loss's backward pass.
        parameters: those that are trained.
        seed: of the direction, from 0 up.
    """
    trained = [p for p in parameters if p.requires_grad]
    found = torch.autograd.grad(penalty, trained, retain_graph=True, allow_unused=True)
    norm = total_norm([g for g in found if g is not None])
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(p.shape, generator=generator).to(p) for p in trained]
    scale = norm / total_norm(drawn)
    # Its value is taken out again: the gradient alone is wanted.
    along = torch.stack([(p * (scale.to(p) * z)).sum().to(penalty) for p, z in zip(trained, drawn)])  # noqa: B905
    along = along.sum()
    return penalty.detach() + along - along.detach()


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Of all of them together, float64 on the CPU."""
    squares = [t.double().square().sum().cpu() for t in tensors]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
