"""`MethodTrainer`: every method of `METHODS` through one Trainer, chosen by `MethodArguments`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from .arguments import JacHessArguments
from .left_padding import LeftPadding, without_padding_targets
from .method import Batch
from .method_arguments import METHODS, MethodArguments
from .mixin import JacHessMixin
from .order import SeededOrder
from .placebo import placebo


class MethodMixin(JacHessMixin):
    """Puts any method of `MethodArguments` into a class derived from ``transformers.Trainer``.

    Padding is known by the mask, on either side.  Where batches are padded on the left, a model
    that counts positions from the first column is given ``position_ids`` (`left_padding`), a causal
    language model is not asked for a row's first token, and one whose head reads the first column
    is warned of: it sees what it sees in the plain Trainer.  With gradient accumulation SAM
    climbs once per optimiser step, along the gradient of all micro-batches, and a penalty is the
    mean over the micro-batches.  TAPT runs when training begins (not on resuming), trains all
    of the backbone also where LoRA follows (then save ``model.merge_and_unload()``: the adapters
    alone are not the model), and needs ``processing_class``.  Seed and epoch alone decide the
    order of rows, so that methods compared from one seed see the same batches.

    Logged as `JacHessMixin` does: ``jachess/task_loss`` and ``jachess/penalty`` of all penalties.

    Args:
        method: `MethodArguments`, or what `MethodArguments.parse` takes.
        unlabelled_dataset: of TAPT and modes joint and unlab.  Methods that use none ignore it,
            so that one call serves them all.

    Raises:
        ValueError: as `JacHessMixin`; a method without the unlabelled data or tokenizer it needs;
            SAM, FreeLB or a placebo in fp16 or in several processes.
    """

    def __init__(
        self,
        *args: Any,
        method: MethodArguments | str = "none",
        unlabelled_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        self.method = MethodArguments.parse(method) if isinstance(method, str) else method
        self._left_padding = LeftPadding()
        acts = METHODS[self.method.method].acts
        draws = self.method.draws_unlabelled
        if acts.any_task and unlabelled_dataset is None:
            draws = False
        super().__init__(
            *args,
            jachess=self.method if self.method.smooths else _without_jachess(self.method, draws),
            unlabelled_dataset=unlabelled_dataset if draws else None,
            **kwargs,
        )
        self.unlabelled_text = unlabelled_dataset
        if acts.unlabelled and unlabelled_dataset is None:
            raise ValueError(
                f"method={self.method.method!r} needs unlabelled_dataset=..., which was not given"
            )
        if self.method.placebo and (self.args.fp16 or self.args.world_size > 1):
            raise ValueError("a placebo runs in one process and not in fp16; use bf16=True")
        self._acting = acts(self)

    # Data ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            return SeededOrder(sampler, self.args.seed)
        return sampler

    # The loss -----------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        assert self.model is not None
        inputs = without_padding_targets(self.model, super()._prepare_inputs(inputs))
        return self._left_padding(self.model, inputs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, whose count of targets is of those the model is asked for."""
        assert self.model is not None
        model = self.model
        batches = (without_padding_targets(model, batch) for batch in epoch_iterator)
        return super().get_batch_samples(batches, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's task loss, plus the method's penalty in training."""

        def run(batch: Batch, called: Any = model) -> tuple[Tensor, Any]:
            return super(MethodMixin, self).compute_loss(
                *(called, dict(batch)), return_outputs=True, num_items_in_batch=num_items_in_batch
            )

        if not model.training:
            loss, outputs = run(inputs)
        else:
            self._acting.check(inputs)
            loss, outputs, penalty = self._acting.loss(run, model, inputs)
            if penalty is not None:
                assert self.method.strength is not None
                penalty = self.method.strength * penalty
                self._step_log.add(
                    task_loss=loss * self._share(num_items_in_batch, invert=True), penalty=penalty
                )
                loss = loss + self._felt(penalty) * self._share(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _felt(self, penalty: Tensor) -> Tensor:
        if not self.method.placebo:
            return penalty
        assert self.model is not None
        return placebo(penalty, self.model.parameters(), self._acting.key())

    # What a method does beside the loss ---------------------------------------------------------

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The Trainer's step, as the method takes it."""

        def run(batch: Batch) -> Tensor:
            return super(MethodMixin, self).training_step(model, dict(batch), num_items_in_batch)

        return self._acting.step(run, inputs)

    def _begin_jachess(self, model: nn.Module) -> None:
        self._acting.begin(self.accelerator.unwrap_model(model))
        super()._begin_jachess(model)

    def _end_jachess(self, model: nn.Module) -> None:
        self._acting.end(self.accelerator.unwrap_model(model))


def _without_jachess(method: MethodArguments, draws: bool) -> JacHessArguments:
    """No penalty on hidden states, but the unlabelled batches of a method that draws them."""
    return JacHessArguments(
        strength=0.0,
        mode="joint" if draws else "train",
        unlab_batch_size=method.unlab_batch_size,
    )


class MethodTrainer(MethodMixin, Trainer):
    """``transformers.Trainer`` with any of the methods; see `MethodMixin`.

    Example:
        >>> trainer = MethodTrainer(
        ...     model=model,
        ...     args=training_arguments,
        ...     train_dataset=train,
        ...     unlabelled_dataset=unlabelled,
        ...     processing_class=tokenizer,
        ...     method="jachess-unlab,weights=norm",
        ... )
        >>> trainer.train()
    """
