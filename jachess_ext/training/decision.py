"""Penalties on the decision's derivatives as methods: `DecisionPenalty` in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ..smoothness import DecisionPenalty, Isotropic, Substitution
from ..smoothness.perturbations import Perturbation
from .method import Batch, Loss, Method, Run
from .one_pass import OnePass

if TYPE_CHECKING:
    from .method_arguments import MethodArguments


def decision_penalty(
    form: str, settings: MethodArguments, model: nn.Module, tokenizer: Any, seed: int | None = None
) -> DecisionPenalty:
    """The penalty of a method's settings, its strength left at 1.

    Args:
        form: "fisher", "divergence" or "margin".
        tokenizer: a transformers tokenizer; says which tokens are special, for swaps.
        seed: of the directions; None: torch's CPU generator.
    """
    perturbation: Perturbation = Isotropic(settings.size)
    if settings.along == "swaps":
        perturbation = Substitution.of(
            tokenizer, share=settings.swapped, unknown_share=settings.unknown
        )
    return DecisionPenalty(
        model,
        form=form,
        perturbation=perturbation,
        directions=settings.directions,
        path=settings.path,
        every=settings.every,
        seed=seed,
    )


class Decision(Method):
    """+ strength · the penalty of the settings' form, from the forward pass of the task loss.

    Every ``every``-th optimiser step with ``every``-fold strength; the others are plain steps.
    """

    form: str
    tokenizer = True

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._penalty = decision_penalty(
            self.form, self.settings, trainer.model, trainer.processing_class
        )

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """Task loss and penalty from one forward pass."""
        self._penalty.model, self._penalty.seed = model, self.key()
        self._penalty.step = self.trainer.state.global_step
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
