"""Penalties on the decision's derivatives as methods: `DecisionPenalty` in a run."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..smoothness import DecisionPenalty, Isotropic, Substitution
from ..smoothness.decision import Perturbation
from ..smoothness.estimators import in_mode
from .method import Batch, Loss, Method, Run
from .one_pass import OnePass
from .random_state import drawing_apart


class Decision(Method):
    """+ strength · the penalty of the settings' form.

    Mode train: on the labelled rows, from the forward pass of the task loss.  Mode joint: on a
    batch of unlabelled rows, in a pass of its own.  Every ``every``-th optimiser step with
    ``every``-fold strength; the others are plain steps.
    """

    form: str

    def __init__(self, trainer: Any) -> None:
        settings = trainer.method
        self.tokenizer = settings.along == "swaps"
        super().__init__(trainer)
        perturbation: Perturbation = Isotropic(settings.size)
        if settings.along == "swaps":
            perturbation = Substitution.of(
                trainer.processing_class, share=settings.swapped, unknown_share=settings.unknown
            )
        self._penalty = DecisionPenalty(
            trainer.model,
            form=self.form,
            perturbation=perturbation,
            directions=settings.directions,
            path=settings.path,
            every=settings.every,
        )

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """Task loss and penalty, in mode train from one forward pass."""
        self._penalty.model, self._penalty.seed = model, self.key()
        self._penalty.step = self.trainer.state.global_step
        if self.settings.mode == "joint":
            task, outputs = run(inputs)
            if not self._penalty.due:
                return Loss(task, outputs)
            with drawing_apart(self.key()), in_mode(model, self.settings.dropout):
                return Loss(task, outputs, self._penalty(self.trainer.next_unlabelled()).loss)
        once: Any = OnePass(model, self._penalty)
        task, outputs = run(inputs, once)
        return Loss(task, outputs, once.result.loss)


class Fisher(Decision):
    """The second-order term of KL(p(x) ‖ p(x + u)), in nats."""

    form = "fisher"


class Margin(Decision):
    """log slope − log margin on rows that are right."""

    form = "margin"


class Divergence(Decision):
    """KL(p(z) ‖ p(z + D_u)), of the model made linear."""

    form = "divergence"
