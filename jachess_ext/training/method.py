"""`Method`: what a fine-tuning method does in a run of `MethodTrainer`; by itself, nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from ..smoothness.decision import Kind, decision_kind

Batch = Mapping[str, Any]
Run = Callable[..., tuple[Tensor, Any]]
"""``run(batch, called=model)``: the Trainer's own task loss of a batch (labels included), and the
model's output; of another callable than the Trainer's model, where one is given."""


class Loss(NamedTuple):
    """What a batch costs.

    Attributes:
        task: the loss on labels.
        outputs: the model's, of the plain pass.
        penalty: to be multiplied by the method's strength and added; None without one.
    """

    task: Tensor
    outputs: Any
    penalty: Tensor | None = None


class Method:
    """One method in one run; a subclass overrides what it does otherwise than the plain Trainer.

    Attributes:
        unlabelled: whether it needs unlabelled data.
        tokenizer: whether it needs the tokenizer.
        one_process: whether it runs in one process only, and not under fp16's loss scaling.
        any_task: whether it leaves out what a task or the data does not offer (classes to smooth,
            unlabelled rows), in place of an error.

    Args:
        trainer: the `MethodTrainer`, made; its ``method`` has the settings.
    """

    unlabelled: ClassVar[bool] = False
    tokenizer: bool = False
    one_process: ClassVar[bool] = False
    any_task: ClassVar[bool] = False

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.settings = trainer.method
        self._draws, self._drawn_for = torch.Generator(), -1
        name = self.settings.method
        if self.tokenizer and not hasattr(trainer.processing_class, "all_special_ids"):
            raise ValueError(f"method={name!r} needs processing_class=<the tokenizer>")
        if self.one_process and (trainer.args.fp16 or trainer.args.world_size > 1):
            raise ValueError(
                f"method={name!r} runs in one process and not in fp16, whose loss scaling may skip "
                "steps; use bf16=True"
            )
        several = self._problem(trainer.model) == "multi_label_classification"
        classes = not several and not self.is_regression(trainer.model)
        if self.settings.smoothing and (classes or not self.any_task):
            if not classes:
                what = "has several labels a row" if several else "is a regression"
                raise ValueError(
                    f"method={name!r} smooths the labels of one of several classes, and the model "
                    f"{what}; use smoothing=0 or another method"
                )
            trainer.label_smoother = LabelSmoother(epsilon=self.settings.smoothing)

    def begin(self, model: nn.Module) -> None:
        """Training begins, or goes on; `model` is without wrappers."""
        self._drawn_for = -1

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """What a training batch costs."""
        task, outputs = run(inputs)
        return Loss(task, outputs, self.penalty(model, inputs, outputs))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        """A penalty beside the task loss, a mean over the rows."""
        return None

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """Forward and backward of a micro-batch, by way of ``run``; gives the loss to be logged."""
        return run(inputs)

    def end(self, model: nn.Module) -> None:
        """Training is over; `model` is without wrappers."""

    def generator(self) -> torch.Generator:
        """For the method's own draws, on the CPU: the same for every method, seed and step.

        Decided by the number of the optimiser step, so that a resumed run draws what it would have
        drawn; goes on over the step's micro-batches.
        """
        step = self.trainer.state.global_step
        if self._drawn_for != step:
            self._draws.manual_seed(self.trainer.args.seed + (step << 32))
            self._drawn_for = step
        return self._draws

    def key(self) -> int:
        """A key for `drawing_apart`: of a second pass's dropout masks."""
        return int(torch.randint(2**63 - 1, (), generator=self.generator()))

    def is_regression(self, model: nn.Module) -> bool:
        """Whether the outputs are numbers, not logits."""
        return self._problem(model) == "regression"

    def kind(self, model: nn.Module, outputs: Any) -> Kind:
        """What the model's outputs decide."""
        return decision_kind(self.trainer.accelerator.unwrap_model(model), logits_of(outputs))

    def _problem(self, model: nn.Module) -> str | None:
        config = getattr(self.trainer.accelerator.unwrap_model(model), "config", None)
        return getattr(config, "problem_type", None)


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's output."""
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
