"""`JacHessMixin`: the penalty in any Trainer, by way of ``compute_loss`` and ``log``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..smoothness import JacHess, JacHessOutput
from ..smoothness.decision import NO_LABEL
from ..smoothness.estimators import in_mode, without_labels
from ..smoothness.parallel import ranks_of
from . import checkpoint
from .arguments import JacHessArguments
from .dual import DualSchedule, PassSummary
from .looking import write_entry
from .loss_scaling import ignores_item_count, warn_of_ignored_item_count
from .one_pass import OnePass
from .random_state import drawing_apart, step_key
from .step_log import StepLog, flat
from .unlabelled import UnlabelledBatches

_LOG = logging.getLogger("jachess_ext")

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class JacHessMixin(_Base):
    """Puts JacHess (docs/how_it_works.md) into a class derived from ``transformers.Trainer``.

    Example:
        >>> class MyTrainer(JacHessMixin, Seq2SeqTrainer): ...

    The base model's norms are measured when training begins, on ``calibration_batches`` shuffled
    batches of the training data (of the unlabelled data in modes joint and unlab), unless
    ``trainer.regulariser.base`` is set before.  Label smoothing and ``compute_loss_func`` act on
    the task loss alone.  Evaluation and prediction compute no penalty.  With gradient accumulation
    the penalty is the mean over the micro-batches, whether or not the model scales its own loss (an
    epoch's last, smaller one counts as the others do, as in the task loss of most heads); a model
    that ignores ``num_items_in_batch`` is found out, warned of, and its task loss divided.
    Modes joint and unlab draw their dropout masks and directions apart from torch's generators, so
    that the steps of task loss draw what they would without them.  Checkpoints hold the
    regulariser's state, the place in the unlabelled data and the schedule's, so that a resumed run
    goes on as it would have; a pass due after a checkpoint at an epoch's end is made up for.

    Logged beside the loss, as means since the last entry over all ranks: ``jachess/task_loss``,
    ``jachess/penalty``, ``jachess/jacobian_<k>`` and ``jachess/hessian_<k>`` (batch means per
    chosen layer k), and ``jachess/skipped``, the share of steps skipped, where there were any; in
    mode unlab without the task loss, as an entry after each pass.

    Args:
        jachess: see `JacHessArguments`.
        unlabelled_dataset: of modes joint and unlab; labels in it are not looked at.

    Raises:
        ValueError: a mode that needs unlabelled data has none, or the other way round; mode unlab
            in fp16 or in several processes; several GPUs in one process.
    """

    def __init__(
        self,
        *args: Any,
        jachess: JacHessArguments | None = None,
        unlabelled_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.jachess = jachess or JacHessArguments()
        self.unlabelled_dataset = unlabelled_dataset
        self._check_jachess()
        assert self.model is not None
        self.regulariser: JacHess = self.jachess.regulariser(self.model, self.args.seed)
        self.dual: DualSchedule | None = None
        self._unlabelled: UnlabelledBatches | None = None
        self._resumed: checkpoint.Resumed = (None, None)
        self._step_log = StepLog()
        self.add_callback(_Schedule(self))

    def _check_jachess(self) -> None:
        mode, data = self.jachess.mode, self.unlabelled_dataset
        if mode == "train" and data is not None:
            raise ValueError(
                "unlabelled_dataset was given, but mode='train' does not use it; "
                "expected mode='joint' or mode='unlab'"
            )
        if mode != "train" and data is None:
            raise ValueError(f"mode={mode!r} needs unlabelled_dataset=..., which was not given")
        if mode == "unlab" and self.args.fp16:
            raise ValueError(
                "mode='unlab' has an optimiser of its own, which fp16's loss scaling does not "
                "reach; use bf16=True or mode='joint'"
            )
        if mode == "unlab" and self.args.world_size > 1:
            raise ValueError(
                f"mode='unlab' runs in one process, not in {self.args.world_size} "
                "(DistributedDataParallel needs the head in every loss); use mode='joint'"
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process (DataParallel) are not supported; launch "
                "one process per GPU with torchrun or accelerate"
            )

    # The loss -----------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's own task loss, plus the penalty in training and modes train and joint."""
        training = model.training and self.regulariser.strength > 0
        if not training or self.jachess.mode == "unlab":
            task, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            if model.training:
                task = self._finite(task, model, inputs)
            return (task, outputs) if return_outputs else task
        self.regulariser.model = model
        train = self.jachess.mode == "train"
        if train:
            self._require_labels(inputs)
        called: Any = OnePass(model, self.regulariser) if train else model
        task, outputs = super().compute_loss(
            called, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if train:
            out = called.result
        else:
            own_numbers = drawing_apart(*step_key(self.regulariser))
            with own_numbers, in_mode(model, self.jachess.dropout):
                out = self.regulariser(self.next_unlabelled())
        loss = self._step_loss(task, out, num_items_in_batch, inputs)
        return (loss, outputs) if return_outputs else loss

    def _step_loss(
        self, task: Tensor, out: JacHessOutput, num_items_in_batch: Any, inputs: Mapping[str, Any]
    ) -> Tensor:
        """Task loss + penalty; a step to be skipped has none that reaches a parameter."""
        self._step_log.add(skipped=torch.tensor(float(out.skipped is not None)))
        if out.skipped is not None:
            # fp16's loss scaling wants gradients to look at, and skips the step at a NaN
            return task * float("nan") if self.args.fp16 else out.loss
        if out.empty:
            return out.loss
        finite = self._finite(task, self.regulariser.model, inputs)
        if finite is not task:
            return finite
        self._step_log.add(
            task_loss=task * self._share(num_items_in_batch, invert=True),
            penalty=out.loss,
            jacobian=out.jacobian,
            hessian=out.hessian,
        )
        return task + self._felt(out.loss) * self._share(num_items_in_batch)

    def _finite(self, task: Tensor, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The task loss as it is, or, where steps are skipped, a zero that reaches no parameter.

        fp16's loss scaling skips such a step by itself.  A batch without any label (masked tokens,
        of which few rows may have none) has a mean over nothing, NaN, whose gradient is zero.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        if self.args.fp16:
            return task
        ranks = ranks_of(model)
        bad = ~torch.isfinite(task.detach()).all()
        labels = inputs.get("labels")
        if isinstance(labels, Tensor):
            bad = bad & (labels != NO_LABEL).any().to(bad.device)
        if not int(ranks.max(bad.int())):
            return task
        trouble = f"step {self.state.global_step}: the task loss is not finite ({task.item()})"
        if ranks.size > 1:
            trouble += " on a rank"
        if self.jachess.on_nonfinite == "raise":
            raise FloatingPointError(
                f"{trouble}: lower the learning rate, use a wider dtype, or set on_nonfinite='skip'"
            )
        _LOG.warning("%s; the step is skipped", trouble)
        return self.regulariser.zero_loss(task, ranks)

    def _felt(self, penalty: Tensor) -> Tensor:
        """What the parameters get of the penalty; a subclass may put a placebo there."""
        return penalty

    def _share(self, num_items_in_batch: Any, invert: bool = False) -> float:
        """What a mean over the micro-batch has to be multiplied by, so that micro-batches add up.

        The Trainer divides the loss by the number of micro-batches itself, unless the task loss
        was divided by the items of all of them already.
        """
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_model or self.compute_loss_func is not None
        if not scaled:
            return 1.0
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        return float(steps) if invert else 1.0 / steps

    def _require_labels(self, inputs: Mapping[str, Any]) -> None:
        names = self.label_names or ["labels"]
        if not any(inputs.get(name) is not None for name in names):
            raise ValueError(
                f"mode='train' adds the penalty to a labelled batch's task loss, but the batch has "
                f"none of {', '.join(names)}; it has {', '.join(inputs)}. Give labels, or use "
                "mode='joint' or 'unlab' with unlabelled_dataset=..."
            )

    # Data ---------------------------------------------------------------------------------------

    def _loader(self, dataset: Any, generator: torch.Generator) -> DataLoader:
        """Batches outside the Trainer's own order: shuffled, without touching torch's generator."""
        streamed = isinstance(dataset, IterableDataset)
        size = self.jachess.unlab_batch_size or self.args.per_device_train_batch_size
        if dataset is not self.unlabelled_dataset:
            size = self.args.train_batch_size
        grouped = self.args.train_sampling_strategy == "group_by_length" and not streamed
        sampler = None
        if grouped:
            sampler = LengthGroupedSampler(size, dataset, generator=generator)
        return DataLoader(
            dataset,
            batch_size=size,
            sampler=sampler,
            shuffle=not (streamed or grouped),
            generator=generator,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "JacHess"),
        )

    def next_unlabelled(self) -> dict[str, Any]:
        """The next batch of the unlabelled data, without labels; while training runs."""
        assert self._unlabelled is not None
        return dict(self._unlabelled.next())

    def _seeded_loader(self, dataset: Any) -> DataLoader:
        return self._loader(dataset, torch.Generator().manual_seed(self.args.seed))

    # Around training ----------------------------------------------------------------------------

    def _begin_jachess(self, model: nn.Module) -> None:
        """Calibrate, unless the norms are known; and start the schedule."""
        (position, schedule), self._resumed = self._resumed, (None, None)
        if self.unlabelled_dataset is not None:
            generator = torch.Generator()
            self._unlabelled = UnlabelledBatches(
                self._loader(self.unlabelled_dataset, generator),
                generator,
                seed=(self.args.seed, 1 + self.args.process_index),
                prepare=self._prepare_inputs,
            )
            if position is not None:
                self._unlabelled.load_state_dict(position)
        self._mend_loss_scaling(model)
        if self.regulariser.strength == 0:
            return
        self.regulariser.model = model
        if self.regulariser.base is None and self.regulariser.needs_base:
            train = self.jachess.mode == "train"
            loader = self._seeded_loader(self.train_dataset if train else self.unlabelled_dataset)
            first = islice(loader, self.jachess.calibration_batches)
            self.regulariser.calibrate(without_labels(self._prepare_inputs(b)) for b in first)
        if self._unlabelled is not None and self.jachess.mode == "unlab":
            self.dual = DualSchedule(
                self.regulariser,
                self._unlabelled,
                lr=self._pass_rate,
                every=self.jachess.unlab_every,
                steps=self.jachess.unlab_steps,
                max_grad_norm=self.args.max_grad_norm or None,
                dropout=self.jachess.dropout,
            )
            if schedule is not None:
                self._go_on(self.dual, schedule)

    def _go_on(self, dual: DualSchedule, state: dict[str, Any]) -> None:
        """A checkpoint after an epoch's last step is written before the pass that follows it."""
        dual.load_state_dict(state)
        if dual.every is None and dual.passes < int(self.state.epoch or 0):
            self._log_pass(dual.run())

    def _end_jachess(self, model: nn.Module) -> None:
        """Training is over."""

    def _mend_loss_scaling(self, model: nn.Module) -> None:
        steps = self.args.gradient_accumulation_steps
        own_loss = self.compute_loss_func is not None or self.label_smoother is not None
        if steps == 1 or own_loss or not self.model_accepts_loss_kwargs:
            return
        batch = next(iter(self._seeded_loader(self.train_dataset)))
        if ignores_item_count(model, self._prepare_inputs(batch)):
            warn_of_ignored_item_count(steps)
            self.model_accepts_loss_kwargs = False

    def _pass_rate(self) -> float:
        follows = self.jachess.unlab_schedule == "follow"
        rate = self._get_learning_rate() if follows else self.args.learning_rate
        return self.jachess.unlab_lr_ratio * rate

    def _log_pass(self, summary: PassSummary | None) -> None:
        if summary is not None:
            figures = {name: getattr(summary, name) for name in ("penalty", "jacobian", "hessian")}
            write_entry(flat(figures), self.control, self.log)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the means since the last entry to every entry that has the training loss."""
        if "loss" in logs:
            logs = {**logs, **self._step_log.take(self.args.world_size)}
        super().log(logs, *args, **kwargs)

    # Checkpoints --------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = f"{self._get_output_dir(trial=trial)}/checkpoint-{self.state.global_step}"
            checkpoint.save(folder, self.regulariser, self._unlabelled, self.dual)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        checkpoint.load(resume_from_checkpoint, self.regulariser)
        if self.regulariser.strength or self.unlabelled_dataset is not None:
            self._resumed = checkpoint.load_rest(resume_from_checkpoint, self.jachess.mode)


class _Schedule(TrainerCallback):
    """Tells the mixin when training begins and is over, and a step and an epoch."""

    def __init__(self, trainer: JacHessMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin_jachess(self._trainer.model_wrapped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.dual is not None:
            self._trainer._log_pass(self._trainer.dual.after_step())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.dual is not None:
            self._trainer._log_pass(self._trainer.dual.after_epoch())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._end_jachess(self._trainer.model_wrapped)


class JacHessTrainer(JacHessMixin, Trainer):
    """``transformers.Trainer`` with two arguments more; see `JacHessMixin`.

    Example:
        >>> trainer = JacHessTrainer(
        ...     model=model,
        ...     args=training_arguments,
        ...     train_dataset=train,
        ...     processing_class=tokenizer,
        ...     jachess=JacHessArguments(strength=0.1, weights="softmax"),
        ... )
        >>> trainer.train()
    """
