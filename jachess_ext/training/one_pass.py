"""A stand-in for the model through which the Trainer's own loss code gets the penalty's forward."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..smoothness import DecisionOutput, DecisionPenalty, JacHess, JacHessOutput


class OnePass:
    """Looks like ``model``; called, it runs the regulariser and returns the model's output.

    Handing it to ``Trainer.compute_loss`` keeps label smoothing, ``compute_loss_func`` and the
    scaling by ``num_items_in_batch`` what they are, with one forward for task loss and penalty.

    Attributes:
        result: of the last call; None before.
    """

    def __init__(self, model: nn.Module, regulariser: JacHess | DecisionPenalty) -> None:
        self._model = model
        self._regulariser = regulariser
        self.result: JacHessOutput | DecisionOutput | None = None

    # isinstance() asks for it: the Trainer tells PEFT models and wrappers apart by it.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        self.result = self._regulariser(inputs)
        return self.result.model_output
