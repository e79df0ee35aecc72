"""Penalties on the decision's derivatives (`jx.DecisionPenalty`) as methods."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...models import in_mode
from ...smoothness import DecisionPenalty, Isotropic, Substitution
from ...smoothness.decision import Perturbation
from ..batches import Batch, drawing_apart
from .base import Loss, Method, Run, check_choice, check_flag, check_positive
from .jachess import OnePass


class Decision(Method):
    """+ strength · `jx.DecisionPenalty` in the form of the method's name.

    Mode train: of the labelled rows, in the forward pass of the task loss.  Mode joint: of a batch
    of unlabelled rows, in a pass of its own.

    Args (others: `Method`):
        directions: directions u per step, 1 to 4.
        along: u is "swaps" of tokens or "noise".
        size: standard deviation of the noise over the embeddings' root mean square entry.
        path: take the derivatives, and in mode train the task loss, at a random point between x
            and x + u.
    """

    modes = ("train", "joint")
    control = False

    def __init__(
        self,
        mode: str = "train",
        *,
        directions: int = 2,
        along: str = "swaps",
        size: float = 1.0,
        path: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(mode=mode, **settings)
        check_choice(("swaps", "noise"), along=along)
        check_positive(size=size)
        check_flag(path=path)
        self.directions, self.along, self.size, self.path = directions, along, size, path
        self._penalty_of(nn.Module(), Isotropic())  # which checks the directions
        self.needs_tokenizer = along == "swaps"

    def prepare(self) -> None:
        super().prepare()
        perturbation: Perturbation = Isotropic(self.size)
        if self.along == "swaps":
            perturbation = Substitution.of(
                self.trainer.processing_class, share=self.swapped, unknown_share=self.unknown
            )
        self._penalty = self._penalty_of(self.trainer.model, perturbation)

    def _penalty_of(self, model: nn.Module, perturbation: Perturbation) -> DecisionPenalty:
        return DecisionPenalty(
            model,
            form=self.name,
            perturbation=perturbation,
            directions=self.directions,
            path=self.path,
            every=self.every,
        )

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        self._penalty.model, self._penalty.seed = model, self.key()
        self._penalty.step = self.trainer.state.global_step
        if self.mode == "joint":
            task, outputs = run(inputs)
            if not self._penalty.due:
                return Loss(task, outputs)
            with drawing_apart(self.key()), in_mode(model, self.dropout):
                penalty = self._penalty(self.trainer.next_unlabelled()).loss
        else:
            one_pass: Any = OnePass(model, self._penalty)
            task, outputs = run(inputs, one_pass)
            penalty = one_pass.result.loss
        return Loss(task, outputs, self.strength * penalty)


class Fisher(Decision, name="fisher"):
    """+ strength · the second-order term of KL(p(x) ‖ p(x + u)), in nats; see `Decision`."""


class Divergence(Decision, name="divergence"):
    """+ strength · KL(p(z) ‖ p(z + D_u)), of the model made linear; see `Decision`."""


class Margin(Decision, name="margin"):
    """+ strength · (log slope − log margin) of rows that are right; see `Decision`."""

    def __init__(self, mode: str = "train", *, strength: float = 0.01, **settings: Any) -> None:
        super().__init__(mode, strength=strength, **settings)
