"""The alternating ("unlab", dual) mode: passes of R alone between stretches of task loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..smoothness import JacHess
from ..smoothness.estimators import in_mode, without_labels
from .random_state import drawing_apart, step_key

Batch = Mapping[str, Any]
_FUSED = ("cpu", "cuda")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class PassSummary:
    """Means over one pass.

    Attributes:
        penalty: strength · R.
        jacobian, hessian: ``[K]``, on the CPU; ``hessian`` is None without a Hessian term.
        steps: how many optimiser steps were taken.
    """

    penalty: float
    jacobian: Tensor
    hessian: Tensor | None
    steps: int


class DualSchedule:
    """Runs a pass of R alone over unlabelled data after every epoch, or every n steps.

    R has an AdamW of its own: an adaptive step undoes the size of its loss, so moments shared
    with the task loss would mix two losses of very different size.  For the same reason the
    regulariser's strength has no say here: the learning rate decides how much a pass moves.

    Example:
        >>> dual = DualSchedule(reg, unlabelled_loader, lr=2e-6)
        >>> for epoch in range(3):
        ...     for batch in loader:
        ...         ...  # a step of task loss
        ...         dual.after_step()
        ...     dual.after_epoch()

    Args:
        regulariser: calibrated, where it needs to be.
        batches: gives the unlabelled batches each time it is iterated; labels are dropped.
        lr: learning rate, or a function called before each step for the current one.
        every: labelled optimiser steps between passes; None: a pass per epoch.
        steps: batches per pass, going on where the last pass ended; None: all of them.
        weight_decay: of the own AdamW; the task's optimiser has its own already.
        max_grad_norm: gradients are clipped to it; None: not at all.
        dropout: False runs the passes in evaluation mode.

    Raises:
        ValueError: ``every`` or ``steps`` below 1, no trainable parameters, or no batches.
    """

    def __init__(
        self,
        regulariser: JacHess,
        batches: Iterable[Batch],
        *,
        lr: float | Callable[[], float],
        every: int | None = None,
        steps: int | None = None,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        dropout: bool = True,
    ) -> None:
        for name, value in (("every", every), ("steps", steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected a whole number from 1 up, or None")
        parameters = [p for p in regulariser.model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("the model has no parameters that require gradients")
        self.regulariser = regulariser
        self.batches = batches
        self.every, self.steps = every, steps
        self.max_grad_norm, self.dropout = max_grad_norm, dropout
        self.taken = self.passes = 0
        self._lr: Callable[[], float] = lr if callable(lr) else lambda: lr
        self._parameters = parameters
        self._endless = endless(batches)
        # By default AdamW goes through the parameters operation by operation on the CPU.
        fused = all(p.device.type in _FUSED and p.is_floating_point() for p in parameters)
        self.optimizer = torch.optim.AdamW(
            parameters, lr=self._lr(), weight_decay=weight_decay, fused=fused
        )

    def after_step(self) -> PassSummary | None:
        """Call after each optimiser step of the task; runs a pass where one is due."""
        self.taken += 1
        return self.run() if self.every is not None and self.taken % self.every == 0 else None

    def after_epoch(self) -> PassSummary | None:
        """Call after each epoch of the task; runs a pass unless ``every`` was given."""
        return self.run() if self.every is None else None

    def run(self) -> PassSummary:
        """One pass of R alone; modes, the task's gradients and random numbers are kept."""
        kept = [p.grad for p in self._parameters]
        own_numbers = drawing_apart(*step_key(self.regulariser))
        try:
            with own_numbers, in_mode(self.regulariser.model, self.dropout):
                summary = _summary([self._step(batch) for batch in self._pass()])
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
        self.passes += 1
        return summary

    def _pass(self) -> Iterable[Batch]:
        return iter(self.batches) if self.steps is None else islice(self._endless, self.steps)

    def _step(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Penalty and norms, without their graph."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self.optimizer.zero_grad()
        out = self.regulariser(without_labels(batch))
        out.loss.backward()
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        hessian = None if out.hessian is None else out.hessian.detach()
        return out.loss.detach(), out.jacobian.detach(), hessian

    def state_dict(self) -> dict[str, Any]:
        """Steps and passes done, and the optimiser's moments by the parameter's number.

        Where ``batches`` stands is not in it: that is the loader's to know.
        """
        moments = self.optimizer.state_dict()["state"]
        return {"taken": self.taken, "passes": self.passes, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: the moments are of other parameters, or not AdamW's; the schedule stays as
                it was.
        """
        moments = {number: self._moments(number, of) for number, of in state["moments"].items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.taken, self.passes = int(state["taken"]), int(state["passes"])

    def _moments(self, number: int, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One parameter's, laid out in memory as it is, which a fused AdamW takes for granted."""
        count = len(self._parameters)
        if not 0 <= number < count:
            raise ValueError(f"there are moments of parameter {number}, but {count} are trained")
        parameter = self._parameters[number]
        shapes = {"step": [], "exp_avg": list(parameter.shape), "exp_avg_sq": list(parameter.shape)}
        found = {name: list(tensor.shape) for name, tensor in given.items()}
        if found != shapes:
            raise ValueError(f"parameter {number} has moments {found}; expected {shapes}")
        if not all(t.is_floating_point() and t.isfinite().all() for t in given.values()):
            raise ValueError(f"parameter {number} has moments that are not finite numbers")
        laid_out = {n: torch.empty_like(parameter).copy_(given[n]).detach() for n in _MOMENTS}
        return {"step": given["step"].clone(), **laid_out}


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Round after round; ends where a round has none."""
    batch: Batch | None = {}
    while batch is not None:
        batch = None
        for batch in batches:
            yield batch


def _summary(figures: list[tuple[Tensor, Tensor, Tensor | None]]) -> PassSummary:
    if not figures:
        raise ValueError("there are no unlabelled batches; expected at least one per pass")
    losses, jacobians, hessians = zip(*figures, strict=True)
    hessian = None if hessians[0] is None else torch.stack(hessians).mean(0).cpu()
    penalty = torch.stack(losses).mean().item()
    return PassSummary(penalty, torch.stack(jacobians).mean(0).cpu(), hessian, len(figures))
