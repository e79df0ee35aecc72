"""`Method`: what a fine-tuning method does in a run of `MethodTrainer`; by itself, nothing."""

from __future__ import annotations

import warnings
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
        if self.settings.smoothing:
            reason = self._cannot_smooth()
            if reason is None:
                trainer.label_smoother = _Smoother(epsilon=self.settings.smoothing)
            else:
                self._leave_out_smoothing(reason)

    def _cannot_smooth(self) -> str | None:
        """Why no label of one of several classes would be smoothed, as far as is known."""
        problem = self._problem(self.trainer.model)
        if self.trainer.compute_loss_func is not None:
            return "compute_loss_func takes the labels"
        if problem == "multi_label_classification":
            return "the model has several labels a row"
        if problem == "regression":
            return "the model is a regression"
        if "labels" not in self.trainer.label_names:
            names = ", ".join(self.trainer.label_names) or "none"
            return f"the model's labels are not called 'labels' ({names})"
        return None

    def _leave_out_smoothing(self, reason: str) -> None:
        """Says that labels stay as they are; an error, unless the method does what it can.

        Raises:
            ValueError: the method leaves nothing out.
        """
        name = self.settings.method
        if not self.any_task:
            raise ValueError(
                f"method={name!r} smooths the labels of one of several classes, but {reason}; use "
                "smoothing=0 or another method"
            )
        warnings.warn(f"method={name!r} leaves out label smoothing: {reason}", stacklevel=2)
        self.trainer.label_smoother = None

    def check(self, inputs: Batch) -> None:
        """Whether the method can act on a training batch.

        Raises:
            ValueError: it cannot.
        """
        if not isinstance(self.trainer.label_smoother, _Smoother):
            return
        labels = inputs.get("labels")
        if labels is None:
            self._leave_out_smoothing(f"the batch has no 'labels'; it has {', '.join(inputs)}")
        elif labels.is_floating_point():
            self._leave_out_smoothing(f"the labels are numbers ({labels.dtype})")

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
        inner: Any = self.trainer.accelerator.unwrap_model(model)
        config = getattr(inner, "config", None)
        stated = getattr(config, "problem_type", None)
        classifies = getattr(inner, "loss_type", None) == "ForSequenceClassification"
        if stated is None and classifies and getattr(config, "num_labels", None) == 1:
            return "regression"  # as transformers takes it
        return stated


class _Smoother(LabelSmoother):
    """transformers' label smoothing, of labels that are one class each."""

    def __call__(self, model_output: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The smoothed loss.

        Raises:
            ValueError: there are no logits, or the labels are not one of their classes each.
        """
        named = isinstance(model_output, Mapping)
        logits = logits_of(model_output) if named else model_output[0]
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels have shape {list(labels.shape)} and logits {list(logits.shape)}; label "
                f"smoothing expects one class each, labels of shape {list(logits.shape[:-1])}; use "
                "smoothing=0 or another method"
            )
        return super().__call__(model_output, labels, *args, **kwargs)


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's output."""
    found = (
        outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    )
    if not isinstance(found, Tensor):
        names = f"; it has {', '.join(outputs)}" if isinstance(outputs, Mapping) else ""
        raise ValueError(
            f"the model's output, a {type(outputs).__name__}, has no tensor called logits{names}; "
            "this method compares logits: let the model return a dict with 'loss' and 'logits', or "
            "use another method"
        )
    return found
