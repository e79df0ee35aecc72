"""`MethodTrainer`: every method of spec 01 through one Trainer, chosen by `MethodArguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..tasks.padding import padded_right
from . import tapt
from .arguments import JacHessArguments
from .dual import without_labels
from .method_arguments import MethodArguments
from .mixin import JacHessMixin
from .order import SeededOrder
from .penalties import half_square_norm, r3f_penalty
from .random_state import RandomState
from .sam import sharpness_aware_gradient


class MethodMixin(JacHessMixin):
    """Puts any method of `MethodArguments` into a class derived from ``transformers.Trainer``.

    Batches are padded on the right before the model sees them, whichever side they come padded
    on (`tasks.padding`), in training, evaluation and prediction.  With gradient accumulation SAM
    climbs once per optimiser step, along the gradient of all micro-batches, and a penalty is the
    mean over the micro-batches.  TAPT runs when training begins (not on resuming), trains all
    of the backbone also where LoRA follows (then save ``model.merge_and_unload()``: the adapters
    alone are not the model), and needs ``processing_class``.  Seed and epoch alone decide the
    order of rows, so that methods compared from one seed see the same batches.

    Logged as `JacHessMixin` does: ``jachess/task_loss`` and ``jachess/penalty`` of L2 and R3F, too.

    Args:
        method: `MethodArguments`, or what `MethodArguments.parse` takes.
        unlabelled_dataset: of TAPT and modes joint and unlab.  Methods that use none ignore it,
            so that one call serves them all.

    Raises:
        ValueError: as `JacHessMixin`; TAPT without unlabelled data or tokenizer; SAM in fp16 or in
            several processes.
    """

    def __init__(
        self,
        *args: Any,
        method: MethodArguments | str = "none",
        unlabelled_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        self.method = MethodArguments.parse(method) if isinstance(method, str) else method
        smooths = self.method.smooths
        super().__init__(
            *args,
            jachess=self.method if smooths else JacHessArguments(strength=0.0),
            unlabelled_dataset=unlabelled_dataset
            if smooths and self.method.uses_unlabelled
            else None,
            **kwargs,
        )
        self._adaptation_text = unlabelled_dataset
        self._window: list[tuple[dict[str, Any], RandomState]] = []
        self._noise, self._noise_step = torch.Generator(), -1
        self._check_method()

    def _check_method(self) -> None:
        name = self.method.method
        if name == "tapt" and self._adaptation_text is None:
            raise ValueError("method='tapt' needs unlabelled_dataset=..., which was not given")
        if name == "tapt" and not hasattr(self.processing_class, "pad"):
            raise ValueError("method='tapt' needs processing_class=<the tokenizer>")
        if name == "sam" and (self.args.fp16 or self.args.world_size > 1):
            raise ValueError(
                "method='sam' runs in one process and not in fp16, whose loss scaling may skip "
                "steps; use bf16=True"
            )

    # Data ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            return SeededOrder(sampler, self.args.seed)
        return sampler

    # The loss -----------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return padded_right(super()._prepare_inputs(inputs))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's task loss, plus the method's penalty in training."""
        strength = self.method.strength or 0.0
        if self.method.method not in ("l2", "r3f") or not strength or not model.training:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        task, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        penalty = strength * self._penalty(model, inputs, outputs)
        self._step_log.add(
            task_loss=task * self._share(num_items_in_batch, invert=True), penalty=penalty
        )
        loss = task + penalty * self._share(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _penalty(self, model: nn.Module, inputs: Mapping[str, Any], outputs: Any) -> Tensor:
        if self.method.method == "l2":
            return half_square_norm(model.parameters())
        # From the step's number, so that a resumed run draws what it would have drawn.
        step = self.state.global_step
        if self._noise_step != step:
            self._noise.manual_seed(self.args.seed + (step << 32))
            self._noise_step = step
        config = getattr(self.accelerator.unwrap_model(model), "config", None)
        return r3f_penalty(
            model,
            without_labels(inputs),
            outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits,
            noise=self.method.noise,
            distribution=self.method.noise_distribution,
            generator=self._noise,
            regression=getattr(config, "problem_type", None) == "regression",
        )

    # SAM's second pass --------------------------------------------------------------------------

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The Trainer's step; with SAM, after an optimiser step's last micro-batch, the ascent."""
        if self.method.method != "sam":
            return super().training_step(model, inputs, num_items_in_batch)
        self._window.append((inputs, RandomState()))
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            window, self._window = self._window, []
            after = RandomState()

            def again() -> None:
                for batch, random in window:
                    random.restore()
                    super(MethodMixin, self).training_step(model, batch, num_items_in_batch)

            sharpness_aware_gradient(model.parameters(), again, self.method.rho)
            after.restore()
        return loss

    # TAPT's first stage -------------------------------------------------------------------------

    def _begin_jachess(self, model: nn.Module) -> None:
        self._window, self._noise_step = [], -1
        if self.method.method == "tapt":
            self._begin_tapt(self.accelerator.unwrap_model(model))
        super()._begin_jachess(model)

    def _begin_tapt(self, model: nn.Module) -> None:
        if self.state.global_step == 0:
            self._adapt(model)
        elif hasattr(model, "peft_config"):
            raise ValueError(
                "method='tapt' with adapters cannot go on from a checkpoint: it has the adapters "
                "alone, not the backbone that TAPT changed; train from the start"
            )

    def _adapt(self, model: nn.Module) -> None:
        random = RandomState()
        made = tapt.language_model(model)
        masked = tapt.is_masked(made.config)
        with tapt.whole_backbone_trained(model):
            stage = MethodTrainer(
                model=made,
                args=tapt.training_arguments(self.args, self.method),
                data_collator=tapt.collator(self.processing_class, masked, self.method),
                train_dataset=tapt.UnlabelledRows(self._adaptation_text),
                processing_class=self.processing_class,
            )
            stage.train()
        self.log({"jachess/tapt_loss": stage.state.log_history[-1]["train_loss"]})
        random.restore()


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
