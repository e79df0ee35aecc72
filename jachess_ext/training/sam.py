"""Sharpness-aware minimisation: the gradient at θ + ρ g/‖g‖ (Foret et al. 2021, Eq. 3).

Written here: the implementations on the index (pytorch-optimizer among them) are optimisers that
wrap another and want both passes from the caller, which the Trainer, with its gradient
accumulation and its clipping, does not offer.  This one leaves the optimiser alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .method import Batch, Method
from .placebo import total_norm
from .random_state import RandomState


class SAM(Method):
    """The gradient at θ + ρ g/‖g‖; once per optimiser step, g of all its micro-batches.

    Both passes have the same dropout masks, and later steps those of the plain run.
    """

    one_process = True

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._window: list[tuple[Batch, RandomState]] = []

    def begin(self, model: nn.Module) -> None:
        """Forget what a run that was broken off left."""
        super().begin(model)
        self._window = []

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """The plain step; after an optimiser step's last micro-batch, the ascent and all again."""
        self._window.append((inputs, RandomState()))
        loss = run(inputs)
        if self.trainer.accelerator.sync_gradients:
            window, self._window = self._window, []
            after = RandomState()

            def again() -> None:
                for batch, random in window:
                    random.restore()
                    run(batch)

            sharpness_aware_gradient(self.trainer.model.parameters(), again, self.settings.rho)
            after.restore()
        return loss


def sharpness_aware_gradient(
    parameters: Iterable[nn.Parameter], backward: Callable[[], None], rho: float
) -> float:
    """Replaces the gradients g at θ by those at θ + ρ g/‖g‖; θ stays exactly as it was.

    The scale of g cancels, so clipping and loss scaling before it change nothing.  A gradient of
    zero (or one that is not finite, which loss scaling will skip) is left alone.

    Args:
        parameters: with gradients g of the whole batch.
        backward: computes the same batch's loss and adds its gradients to ``.grad``.

    Returns:
        ‖g‖.
    """
    found = [p for p in parameters if p.grad is not None]
    norm = total_norm([p.grad for p in found if p.grad is not None]).item()
    if not 0 < norm < float("inf"):
        return norm
    kept = [p.detach().clone() for p in found]
    with torch.no_grad():
        for p in found:
            assert p.grad is not None
            p.add_(p.grad.to(p.dtype), alpha=rho / norm)
            p.grad = None
    try:
        backward()
    finally:
        with torch.no_grad():
            for p, before in zip(found, kept, strict=True):
                p.copy_(before)
    return norm
