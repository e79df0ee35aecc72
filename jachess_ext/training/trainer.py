"""`MethodTrainer`: transformers' Trainer with a method of `METHODS`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..models import in_mode
from ..smoothness.decision import NO_LABEL
from ..smoothness.parallel import ranks_of
from .batches import (
    Batch,
    LeftPadding,
    SeededOrder,
    UnlabelledBatches,
    with_decoder_inputs,
    without_padding_targets,
)
from .callbacks import StepLog
from .methods import Method, parse_method
from .methods.weights import placebo

STATE = "jachess.pt"
"""Name of the file with a method's state in a checkpoint."""
_WITHOUT = {
    "regulariser": "the directions start at step 0",
    "unlabelled": "unlabelled data starts anew",
    "schedule": "the passes' AdamW starts anew",
}
_LOG = logging.getLogger("jachess_ext")

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class MethodMixin(_Base):
    """Put any method of `METHODS` into a class derived from ``transformers.Trainer``.

    Evaluation and prediction are the Trainer's; label smoothing and ``compute_loss_func`` act on
    the task loss alone.  Seed and epoch alone decide the order of rows, and a method's own draws
    leave torch's generators as they were: methods compared from one seed see the same batches.

    With gradient accumulation a penalty is the mean over the micro-batches (an epoch's smaller
    last micro-batch counts as the others do); the task loss of a model that ignores
    ``num_items_in_batch`` is divided, with a warning, on several ranks too.  Padding is read from
    the mask, on either side (`LeftPadding`); with left padding a causal language model is not asked
    for a row's first token.  Where TAPT precedes LoRA, save ``model.merge_and_unload()``: the
    adapters alone are not the model.

    A resumed run continues exactly: checkpoints hold the regulariser's state, the place in the
    unlabelled data and the schedule's state (``jachess.pt``).

    Logged beside the loss, as means since the last entry over all ranks: ``jachess/task_loss`` and
    ``jachess/penalty``; of JacHess also ``jachess/jacobian_<k>`` and ``jachess/hessian_<k>`` (batch
    means per chosen layer k), and ``jachess/skipped``, the share of skipped steps, if any; in mode
    unlab an entry without the task loss after each pass.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> class MyTrainer(MethodMixin, Seq2SeqTrainer): ...

    Args:
        method: a `Method`, or text for `parse_method`.
        unlabelled_dataset: rows for TAPT and the modes joint and unlab, whose labels are dropped;
            other methods ignore it.

    Attributes:
        method: the method, bound to this trainer.

    Raises:
        ValueError: a method without the unlabelled data or tokenizer it needs; mode unlab, SAM,
            FreeLB or a placebo in fp16 or in several processes; several GPUs in one process.
    """

    def __init__(
        self,
        *args: Any,
        method: Method | str = "none",
        unlabelled_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process (DataParallel) are not supported; launch "
                "one process per GPU with torchrun or accelerate"
            )
        self.unlabelled_dataset = unlabelled_dataset
        self.unlabelled: UnlabelledBatches | None = None
        self.step_log = StepLog()
        self._left_padding = LeftPadding()
        self._place: Mapping[str, int] | None = None  # a checkpoint's, in the unlabelled data
        self._unbound = parse_method(method) if isinstance(method, str) else method
        self.method = self._unbound.bind(self)
        self.add_callback(_Schedule(self))

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model anew and bind the method to it, so that nothing is left of another trial."""
        model = super().call_model_init(trial)
        if hasattr(self, "method"):
            self.model = model
            self._left_padding = LeftPadding()
            self.method = self._unbound.bind(self)
        return model

    # The loss -----------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the Trainer's task loss, in training with the method's penalty."""

        def run(batch: Batch, called: Any = model) -> Any:
            return super(MethodMixin, self).compute_loss(
                called, dict(batch), return_outputs=True, num_items_in_batch=num_items_in_batch
            )

        if not model.training:
            total, outputs = run(inputs)
            return (total, outputs) if return_outputs else total
        self.method.check(inputs)
        loss = self.method.loss(run, model, inputs)
        if not self._is_finite(loss.task, model, inputs):
            total = self._skipped(loss.task, model)
        elif loss.penalty is None:
            total = loss.task
        else:
            self.step_log.add(
                task_loss=loss.task * self._share(num_items_in_batch, invert=True),
                penalty=loss.penalty,
                **loss.figures,
            )
            penalty = loss.penalty
            if self.method.placebo:
                assert self.model is not None
                penalty = placebo(penalty, self.model.parameters(), self.method.key())
            total = loss.task + penalty * self._share(num_items_in_batch)
        return (total, loss.outputs) if return_outputs else total

    def _is_finite(self, task: Tensor, model: nn.Module, inputs: Batch) -> bool:
        """Tell whether the task loss is finite on every rank; a collective.

        fp16's loss scaling skips steps by itself.  The loss of a batch without any label is a mean
        over nothing, NaN with a gradient of zero, and passes.
        """
        if self.args.fp16:
            return True
        bad = ~torch.isfinite(task.detach()).all()
        if isinstance(inputs.get("labels"), Tensor):
            bad = bad & _has_labels(inputs)
        return not int(ranks_of(model).max(bad.int()))

    def _skipped(self, task: Tensor, model: nn.Module) -> Tensor:
        """Return a zero without any parameter's gradient, or raise a FloatingPointError."""
        trouble = f"step {self.state.global_step}: the task loss is not finite ({task.item()})"
        if ranks_of(model).size > 1:
            trouble += " on a rank"
        zero = self.method.zero_loss(task)
        if zero is None:
            raise FloatingPointError(
                f"{trouble}: lower the learning rate, use a wider dtype, or set on_nonfinite='skip'"
            )
        _LOG.warning("%s; the step is skipped", trouble)
        return zero

    def _share(self, num_items_in_batch: Any, invert: bool = False) -> float:
        """Return the factor of a mean over the micro-batch, 1 where the Trainer divides itself.

        It does not where the task loss is divided by the items of all micro-batches already.
        """
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_model or self.compute_loss_func is not None
        if not scaled:
            return 1.0
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        return float(steps) if invert else 1.0 / steps

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        def run(batch: Batch) -> Tensor:
            return super(MethodMixin, self).training_step(model, dict(batch), num_items_in_batch)

        return self.method.step(run, inputs)

    # Data ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            return SeededOrder(sampler, self.args.seed)
        return sampler

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        assert self.model is not None
        inputs = without_padding_targets(self.model, super()._prepare_inputs(inputs))
        inputs = with_decoder_inputs(self.model, inputs)
        return self._left_padding(self.model, inputs)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's samples and its count of the targets that the model is asked for."""
        assert self.model is not None
        model = self.model
        batches = (without_padding_targets(model, batch) for batch in epoch_iterator)
        return super().get_batch_samples(batches, *args, **kwargs)

    def next_unlabelled(self) -> dict[str, Any]:
        """Return the next batch of the unlabelled data, without labels."""
        assert self.unlabelled is not None
        return dict(self.unlabelled.next())

    def seeded_loader(self, dataset: Any) -> DataLoader:
        """Return batches shuffled by the seed alone."""
        return self._loader(dataset, torch.Generator().manual_seed(self.args.seed))

    def _loader(self, dataset: Any, generator: torch.Generator) -> DataLoader:
        streamed = isinstance(dataset, IterableDataset)
        size = self.args.train_batch_size
        if dataset is self.unlabelled_dataset:
            own = getattr(self.method, "unlab_batch_size", None)  # a setting of some methods
            size = own or self.args.per_device_train_batch_size
        grouped = self.args.train_sampling_strategy == "group_by_length" and not streamed
        return DataLoader(
            dataset,
            batch_size=size,
            sampler=LengthGroupedSampler(size, dataset, generator=generator) if grouped else None,
            shuffle=not (streamed or grouped),
            generator=generator,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "JacHess"),
        )

    def plain_trainer(self, **arguments: Any) -> MethodTrainer:
        """Return a trainer of the task loss alone, for a method's stage before the run."""
        return MethodTrainer(**arguments)

    # Around training ----------------------------------------------------------------------------

    def _begin(self) -> None:
        model: Any = self.model_wrapped
        self.step_log = StepLog()
        if self.method.mode != "train" and self.unlabelled_dataset is not None:
            generator = torch.Generator()
            self.unlabelled = UnlabelledBatches(
                self._loader(self.unlabelled_dataset, generator),
                generator,
                seed=(self.args.seed, 1 + self.args.process_index),
                prepare=self._prepare_inputs,
            )
            if self._place is not None:
                self.unlabelled.load_state_dict(self._place)
            self._place = None
        self._divide_where_the_model_does_not(model)
        self.method.begin(self.accelerator.unwrap_model(model))

    def _divide_where_the_model_does_not(self, model: nn.Module) -> None:
        """Let the Trainer divide the task loss, if the model ignores ``num_items_in_batch``.

        The Trainer takes any ``**kwargs`` in ``forward`` as a promise to divide by the items of all
        micro-batches and ranks: it does not divide by the number of micro-batches, and multiplies
        by that of the ranks.  The sequence classifiers of BERT, RoBERTa, GPT-2, OPT and Llama
        (transformers 5.24) do not divide.

        Raises:
            ValueError: ``compute_loss_func`` ignores it, which the Trainer cannot make up for.
        """
        steps = self.args.gradient_accumulation_steps
        ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if steps * ranks == 1 or not counted:
            return
        batches = map(self._prepare_inputs, self.seeded_loader(self.train_dataset))
        batch = next((b for b in batches if _has_labels(b)), None)
        if batch is None:
            return
        self.method.check(batch)
        with torch.no_grad(), in_mode(model, training=False):
            losses: list[Any] = [
                super(MethodMixin, self).compute_loss(
                    model, dict(batch), num_items_in_batch=torch.tensor(count)
                )
                for count in (1, 2)
            ]
        if not torch.equal(*losses):
            return
        trouble = (
            f"num_items_in_batch but does not use it, so with {steps} accumulation steps on "
            f"{ranks} ranks transformers' Trainer would make the task loss {steps * ranks} times "
            "too large"
        )
        if self.compute_loss_func is not None:
            raise ValueError(
                f"compute_loss_func is given {trouble}; return the sum of the losses divided by it"
            )
        warnings.warn(
            f"the model accepts {trouble}; this trainer divides it. For a plain Trainer set "
            "model.accepts_loss_kwargs = False first",
            stacklevel=2,
        )
        self.model_accepts_loss_kwargs = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, adding the means since the last entry to an entry with the training loss."""
        if "loss" in logs:
            logs = {**logs, **self.step_log.take(self.args.world_size)}
        super().log(logs, *args, **kwargs)

    # Checkpoints --------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        state = self.method.state_dict()
        if self.unlabelled is not None:
            state["unlabelled"] = self.unlabelled.state_dict()
        if self.args.should_save and state:
            folder = self._get_output_dir(trial=trial)
            path = Path(folder, f"checkpoint-{self.state.global_step}", STATE)
            partial = path.with_suffix(".partial")
            torch.save(state, partial)
            os.replace(partial, path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = Path(resume_from_checkpoint, STATE)
        state = read_state(path)
        try:
            self.method.load_state_dict(state)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{path}: {error}; resume from another checkpoint") from error
        for part in self.method.saved_parts:
            if part not in state:
                _LOG.warning("%s has no %s: %s", path, part, _WITHOUT[part])
        self._place = state.get("unlabelled")


def _has_labels(inputs: Batch) -> bool:
    labels = inputs.get("labels")
    return isinstance(labels, Tensor) and bool((labels != NO_LABEL).any())


def read_state(path: Path) -> dict[str, Any]:
    """Read a method's parts of a checkpoint; empty without such a file.

    Raises:
        ValueError: the file cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(part, dict) for part in state.values()):
            raise TypeError("expected a dict of dicts")
    except Exception as error:  # torch.load has no error of its own
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{path} cannot be read ({reason}); resume from another checkpoint"
        ) from error
    return state


class _Schedule(TrainerCallback):
    """Call the method when training, a step or an epoch begins or ends."""

    def __init__(self, trainer: MethodMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.method.after_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.method.after_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer.method.end(trainer.accelerator.unwrap_model(trainer.model_wrapped))


class MethodTrainer(MethodMixin, Trainer):
    """``transformers.Trainer`` with any of the methods; see `MethodMixin`.

    Example:
        >>> trainer = MethodTrainer(
        ...     model=model, args=arguments, train_dataset=rows, method="sam,rho=0.1"
        ... )
        >>> trainer.train().global_step
        1
    """
