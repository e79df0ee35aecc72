"""`MethodTrainer`: transformers' Trainer with a method of `METHODS`."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from .. import graphs
from .._io import finite, parse_json, write_bytes
from ..models import NO_LABEL, in_mode
from ..ops import library
from ..smoothness.parallel import ranks_of
from .batches import (
    Batch,
    LeftPadding,
    Rows,
    SeededOrder,
    UnlabelledBatches,
    add_decoder_inputs,
    collate_unlabelled,
    drop_padding_targets,
    seeded_rng,
)
from .callbacks import StepLog
from .methods import Method, parse_method
from .methods.base import Outputs
from .methods.weights import placebo

STATE = "jachess.safetensors"
"""Name of the file with a method's state in a checkpoint."""
_HEADER = "state"
"""Key in the file's header under which everything but tensors is stored, as JSON."""
_MISSING_STATE = {
    "regulariser": "the directions start at step 0",
    "unlabelled": "unlabelled data starts anew",
    "schedule": "the passes' AdamW starts anew",
}
_OTHER_LOSS = "and the step trained on a loss that does not come from it: a compute_loss"
_BELOW = "or define it in a class below the mixin: class Own(Trainer), class Mine(MethodMixin, Own)"
UNUSED_HINTS = {
    "loss": f"MethodMixin.compute_loss, {_OTHER_LOSS} or training_step of your own stands in its "
    f"place. Return super().compute_loss(...) with your terms added, {_BELOW}",
    "step": "MethodMixin.training_step, and the step did not go through it: a training_step of "
    f"your own stands in its place. Call super().training_step(...) in it, {_BELOW}",
    "smoother": f"self.label_smoother, {_OTHER_LOSS} of your own takes the labels. Call loss = "
    "self.label_smoother(outputs, labels) in it, set smoothing=0, or use another method",
}
"""Part of a step in which a method may act → what the first step bypassed, and the remedy."""
_LOG = logging.getLogger("jachess_ext")

if TYPE_CHECKING:
    from torch.utils.data import Dataset, Sampler

    _Base = Trainer
else:
    _Base = object  # a mixin: the user's class brings its own Trainer


class MethodMixin(_Base):
    """Add the fine-tuning methods of `METHODS` to a class derived from ``transformers.Trainer``.

    Evaluation and prediction are the Trainer's; label smoothing and ``compute_loss_func`` act on
    the task loss only.  A ``compute_loss`` of your own belongs in a class below the mixin (``class
    Mine(MethodMixin, Own)``); if one bypasses the method, the first step raises an error.  The
    order of rows depends on seed and epoch only, and a method's own draws leave torch's generators
    unchanged: methods compared with one seed get the same batches.

    With gradient accumulation a penalty is the mean over the micro-batches (an epoch's smaller
    last micro-batch has the same weight); the task loss of a model that ignores
    ``num_items_in_batch`` is divided, with a warning, on several ranks too.  Padding on either side
    is recognised by the mask (`LeftPadding`); with left padding a causal language model does not
    predict a row's first token.  If TAPT precedes LoRA, save ``model.merge_and_unload()``: TAPT
    changes the backbone, which the adapters do not contain.

    A resumed run continues exactly: checkpoints hold the regulariser's state, the position in the
    unlabelled data and the schedule's state (``jachess.safetensors``).

    Log entries also have, as means since the last entry over all ranks: ``jachess/task_loss`` and
    ``jachess/penalty``; for JacHess ``jachess/jacobian_<k>`` and ``jachess/hessian_<k>`` (batch
    means for chosen layer k), and ``jachess/skipped``, the fraction of skipped steps, if any.  In
    mode unlab there is an entry without the task loss after each pass.

    Examples:
        >>> from transformers import Seq2SeqTrainer
        >>> class MyTrainer(MethodMixin, Seq2SeqTrainer): ...

    Args:
        method: a `Method`, or text for `parse_method`.
        unlabelled_dataset: tokenised rows, as in ``train_dataset``, for TAPT, `recommended` and the
            modes joint and unlab, whose labels are dropped; other methods ignore it.
        graphed: whether to run forward and backward of training batches as a CUDA graph
            (`jx.graphed`), for methods none, jachess in mode train and those derived from it.
            Batches need one shape: a collator that pads to a fixed length, and
            ``dataloader_drop_last=True``.  On a CPU it only gives a warning.
        compile: backend of torch.compile, "aot_eager" or "inductor", for the model's training
            passes and the step of `jx.JacHess`; None: that of ``TrainingArguments(torch_compile=
            True)``, if it is set.  The model stays compiled (``nn.Module.compile``).

    Attributes:
        method: the method, bound to this trainer.

    Raises:
        ValueError: the method needs unlabelled data or a tokenizer, and has none; the data collator
            does not take the rows of ``unlabelled_dataset``; mode unlab, SAM, GradientNorm or a
            placebo runs in fp16 or in several processes; one process has several GPUs; ``graphed``
            is set with another method, gradient accumulation or several processes; or, in the first
            step, the method had no effect.
        TypeError: ``method`` is neither a `Method` nor text.
    """

    model: nn.Module

    def __init__(
        self,
        *args: Any,
        method: Method | str = "none",
        unlabelled_dataset: Rows | None = None,
        graphed: bool = False,
        compile: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(f"{self.args.n_gpu} GPUs in one process; use torchrun, one per GPU")
        self.unlabelled_dataset = unlabelled_dataset
        self.unlabelled: UnlabelledBatches | None = None
        self.step_log = StepLog()
        self._left_padding = LeftPadding()
        self._unlabelled_position: Mapping[str, int] | None = None  # read from a checkpoint
        self._reached: set[str] | None = None  # parts of the method in the first step; then None
        self._division_unchecked = False
        self._unbound = parse_method(method) if isinstance(method, str) else method
        if not isinstance(self._unbound, Method):
            raise TypeError(
                f"method is {type(method)}; expected a Method such as jachess_ext.training.JacHess("
                "strength=0.01), not jachess_ext.JacHess, or text such as 'jachess,strength=0.01'"
            )
        self._compile = compile
        is_compiled = compile is None and self.args.torch_compile
        self.backend = self.args.torch_compile_backend if is_compiled else compile
        self.method = self._unbound.bind(self)
        self._graphed = graphed
        self._graph: Callable[..., tuple[Tensor, dict[str, Tensor]]] | None = None
        is_single = self.args.gradient_accumulation_steps * self.args.world_size == 1
        if graphed and not (is_single and self.method.capturable):
            raise self.method.error(
                "cannot run with graphed=True: a CUDA graph takes none, or jachess in mode train "
                "without a placebo, in one process and without gradient accumulation"
            )
        self.add_callback(_MethodCallback(self))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model, and bind the method to it without the state of an earlier trial."""
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
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Outputs]:
        """Return the Trainer's task loss, plus the method's penalty in training mode."""

        # A method computes the task loss only by `run`, which is compute_loss of the class below:
        # label smoothing, compute_loss_func and the user's own losses apply in all of its passes.
        def run(batch: Batch, called: nn.Module = model) -> tuple[Tensor, Outputs]:
            with_outputs = return_outputs or self.method.needs_outputs
            return self._task_loss(called, batch, with_outputs, num_items_in_batch)

        if not model.training:
            total, outputs = self._task_loss(model, inputs, return_outputs, num_items_in_batch)
            return (total, outputs) if return_outputs else total
        self.method.check_batch(inputs)
        loss = self.method.loss(run, model, inputs)
        if not self._is_finite(loss.task, model, inputs):
            total = self._skip_or_raise(loss.task, model)
        elif loss.penalty is None:
            total = loss.task
        else:
            self.step_log.add(
                task_loss=loss.task / self._accumulation_factor(num_items_in_batch),
                penalty=loss.penalty,
                **loss.figures,
            )
            penalty = loss.penalty
            if not penalty.requires_grad:
                raise self.method.error(
                    "has a penalty that depends on no weight that is trained, so that it would "
                    "change nothing; unfreeze what it acts on, or use another method"
                )
            if self.method.placebo:
                penalty = placebo(penalty, self.model.parameters(), self.method.key())
            total = loss.task + penalty * self._accumulation_factor(num_items_in_batch)
        self.mark_when_reached("loss", total)
        return (total, loss.outputs) if return_outputs else total

    def _task_loss(
        self, model: nn.Module, batch: Batch, with_outputs: bool, items: Tensor | int | None
    ) -> tuple[Tensor, Outputs]:
        """Return the task loss of the class below, and the model's output if ``with_outputs``.

        The output is requested only if needed: TRL computes it in a further pass.

        Args:
            items: ``num_items_in_batch``.
        """
        compute_loss = super().compute_loss
        if not with_outputs:
            return compute_loss(model, dict(batch), num_items_in_batch=items), None  # type: ignore[return-value]
        parameters = inspect.signature(compute_loss).parameters.values()
        result = None
        if any(p.name == "return_outputs" or p.kind is p.VAR_KEYWORD for p in parameters):
            result = compute_loss(model, dict(batch), return_outputs=True, num_items_in_batch=items)
        if not isinstance(result, tuple):
            raise self.method.error(
                "needs the model's output: let this trainer's compute_loss take return_outputs "
                "and, where that is True, return (loss, outputs), or use l2 or sam"
            )
        return result

    def mark_when_reached(self, part: str, loss: Tensor) -> None:
        """Mark a part of the method as active once a backward pass reaches ``loss``.

        Args:
            part: a key of `UNUSED_HINTS`.
        """
        # A call of compute_loss is not enough: the user's override may discard its result.
        reached = self._reached
        if reached is not None and loss.requires_grad:
            loss.register_hook(lambda gradient: reached.add(part))

    def check_active_parts(self) -> None:
        """Raise ValueError if an active part of the method had no effect on the first step's
        gradient."""
        reached, self._reached = self._reached, None
        for part in sorted(set() if reached is None else self.method.active_parts() - reached):
            raise self.method.error(f"acts in {UNUSED_HINTS[part]}")

    def _is_finite(self, task_loss: Tensor, model: nn.Module, inputs: Batch) -> bool:
        """Return whether the task loss is finite on every rank; a collective.

        True in fp16, whose loss scaling skips steps by itself, and for a batch without any label,
        whose loss is an empty mean: NaN with a gradient of zero.
        """
        if self.args.fp16 or library.capturing():
            return True
        # All ranks must agree: DistributedDataParallel sums their gradients, and ranks in different
        # branches would wait for each other's collectives forever.
        is_bad = ~torch.isfinite(task_loss.detach()).all()
        if isinstance(inputs.get("labels"), Tensor):
            is_bad = is_bad & _has_labels(inputs)
        return not int(ranks_of(model).max(is_bad.int()))

    def _skip_or_raise(self, task: Tensor, model: nn.Module) -> Tensor:
        """Return a zero loss, which skips the step of a non-finite task loss, or raise
        FloatingPointError if the method does not skip."""
        where = " on a rank" * (ranks_of(model).size > 1)
        text = f"step {self.state.global_step}: the task loss is not finite ({task.item()}){where}"
        zero = self.method.zero_loss(task)
        if zero is None:
            raise FloatingPointError(
                f"{text}: lower the learning rate, use a wider dtype, or set on_nonfinite='skip'"
            )
        _LOG.warning("%s; the step is skipped", text)
        return zero

    def _accumulation_factor(self, num_items_in_batch: Tensor | int | None) -> float:
        """Return the factor of the penalty with A accumulated micro-batches: 1 if the Trainer
        divides the loss by A, 1/A if it does not.

        The Trainer does not divide a task loss that is a sum over its items, divided by the number
        of items of all micro-batches.
        """
        # A step of A micro-batches has the loss Σ_a l_a / A.  If l_a is a mean over its own items,
        # the Trainer divides the sum of task loss and penalty by A.  If l_a is a sum over its items
        # divided by the items of all A, the Trainer does not divide: the penalty, a mean over its
        # own rows, then needs the factor 1/A, and the logged task loss the factor A.  Newer
        # transformers have the attribute loss_is_scaled_for_ga; for older ones the conditions are
        # those of their training_step.
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = by_model or self.compute_loss_func is not None
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        return 1.0 / steps if is_scaled else 1.0

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        def run(batch: Batch) -> Tensor:
            return super(MethodMixin, self).training_step(model, dict(batch), num_items_in_batch)

        if self._reached is not None:
            self._reached.add("step")
        if not self._graphed:
            return self.method.step(run, inputs)
        if self._graph is None:
            step = functools.partial(self._logged_step, model)
            self._graph = graphs.graphed(step, parameters=self.model.parameters())
        loss, figures = self._graph(self._prepare_inputs(inputs), num_items_in_batch)
        self.step_log.add(**figures)
        return loss

    def _logged_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take a step, to be captured in a CUDA graph; return its loss and the figures to log,
        which every replay recomputes."""
        log, self.step_log = self.step_log, StepLog()
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
            return loss, self.step_log.sums
        finally:
            self.step_log = log

    # Data ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            return SeededOrder(sampler, self.args.seed)
        return sampler

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if graphs.is_graphed_step():  # already prepared; no value can be copied to the host here
            return inputs
        inputs = drop_padding_targets(self.model, super()._prepare_inputs(inputs))
        inputs = add_decoder_inputs(self.model, inputs)
        return self._left_padding(self.model, inputs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], *args: Any, **kwargs: Any
    ) -> tuple[list[dict[str, Tensor]], Tensor | int | None]:
        """Return the Trainer's micro-batches of a step and its count of targets, both without the
        targets that would be predicted from padding."""
        # The Trainer counts the labels here, before `_prepare_inputs`: a target dropped only there
        # would still be in the count that the loss is divided by.
        batches = (drop_padding_targets(self.model, batch) for batch in epoch_iterator)
        micro_batches, count = super().get_batch_samples(batches, *args, **kwargs)
        if self._division_unchecked and micro_batches:
            self._check_loss_division(micro_batches)
            if not (self.model_accepts_loss_kwargs or self.compute_loss_func):
                count = None
        return micro_batches, count

    def next_unlabelled(self) -> dict[str, Tensor]:
        """Return the next batch of the unlabelled data, without labels."""
        assert self.unlabelled is not None
        return dict(self.unlabelled.next())

    def make_loader(
        self, dataset: Rows, generator: torch.Generator
    ) -> DataLoader[dict[str, Tensor]]:
        """Return a loader of the data set's batches, shuffled by ``generator`` only."""
        is_stream = isinstance(dataset, IterableDataset)
        size = self.args.per_device_train_batch_size
        collate = self._get_collator_with_removed_columns(self.data_collator, "JacHess")
        if dataset is self.unlabelled_dataset:
            collate = functools.partial(collate_unlabelled, collate)
            size = getattr(self.method, "unlab_batch_size", None) or size  # of methods with modes
        by_length = self.args.train_sampling_strategy == "group_by_length" and not is_stream
        rows = cast("Dataset[dict[str, Tensor]]", dataset)
        return DataLoader(
            rows,
            batch_size=size,
            sampler=LengthGroupedSampler(size, rows, generator=generator) if by_length else None,
            shuffle=not (is_stream or by_length),
            generator=generator,
            collate_fn=collate,
        )

    def plain_trainer(self, **arguments: Any) -> MethodTrainer:
        """Return a trainer of the task loss alone, for a method's stage before the run."""
        return MethodTrainer(**arguments)

    # Around training ----------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Start the method's run; the Trainer's callback calls it when training begins."""
        self.step_log, self._graph = StepLog(), None
        if self.method.mode != "train" and self.unlabelled_dataset is not None:
            generator = torch.Generator()
            self.unlabelled = UnlabelledBatches(
                self.make_loader(self.unlabelled_dataset, generator),
                generator,
                seed=(self.args.seed, 1 + self.args.process_index),
                prepare=self._prepare_inputs,
            )
            if self._unlabelled_position is not None:
                self.unlabelled.load_state_dict(self._unlabelled_position)
            self._unlabelled_position = None
        ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        counts_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        steps = self.args.gradient_accumulation_steps
        self._division_unchecked = steps * ranks > 1 and counts_items
        self._reached = set()
        if self._compile and self.model._compiled_call_impl is None:
            self.model.compile(backend=self._compile)
        self.method.begin(self.accelerator.unwrap_model(self.model_wrapped))

    def _check_loss_division(self, samples: list[dict[str, Tensor]]) -> None:
        """Make the Trainer divide the task loss if the model ignores ``num_items_in_batch``.

        The Trainer assumes that a ``forward`` with ``**kwargs`` divides the loss by the number of
        items of all micro-batches and ranks: it does not divide by the number of micro-batches, and
        multiplies by the number of ranks.  The sequence classifiers of BERT, RoBERTa, GPT-2, OPT
        and Llama (transformers 5.24) do not divide.

        Args:
            samples: the micro-batches of the coming step.  The model runs on the first labelled one
                (a stream yields its rows only once).

        Raises:
            ValueError: ``compute_loss_func`` ignores ``num_items_in_batch``, which the Trainer
                cannot correct.
        """
        model = self.model_wrapped
        ranks = ranks_of(model)
        batches = [self._prepare_inputs(sample) for sample in samples]
        batch = next((b for b in batches if _has_labels(b)), None)
        labelled = torch.tensor(int(batch is not None), device=self.args.device)
        if not int(ranks.max(labelled)):
            return  # no rank has a labelled batch to check on yet
        self._division_unchecked = False
        batch = batches[0] if batch is None else batch
        self.method.check_batch(batch)
        # Whether forward uses the number is found by running one batch with 1 and with 2: equal
        # losses show that it does not.  Without gradients, in evaluation mode and with a generator
        # state of its own, so that the check does not change the run.
        metrics = copy.deepcopy(getattr(self, "_metrics", None))  # TRL counts every pass in it
        with torch.no_grad(), in_mode(model, training=False), seeded_rng(0):
            losses = [
                self._task_loss(model, batch, False, torch.tensor(count))[0] for count in (1, 2)
            ]
        if metrics is not None:
            self._metrics = metrics
        if int(ranks.max(labelled * (not torch.equal(*losses)))):
            return
        steps, count = self.args.gradient_accumulation_steps, self.args.world_size
        count = count if self.args.average_tokens_across_devices else 1
        message = (
            f"num_items_in_batch and ignores it: of {steps} accumulation steps on {count} ranks "
            f"transformers' Trainer would make the task loss {steps * count} times too large"
        )
        if self.compute_loss_func is not None:
            raise ValueError(
                f"compute_loss_func is given {message}; return the sum of the losses divided by it"
            )
        warnings.warn(
            f"the model accepts {message}; this trainer divides it. For a plain Trainer set "
            "model.accepts_loss_kwargs = False first",
            stacklevel=2,
        )
        self.model_accepts_loss_kwargs = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log an entry; an entry with the training loss also gets the means of the method's figures
        since the last such entry."""
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
            write_state(Path(folder, f"checkpoint-{self.state.global_step}", STATE), state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer, the scheduler and the method's state.

        The Trainer calls this method whenever it resumes, also under DeepSpeed or FSDP.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint, STATE)
        state = read_state(path)
        try:
            self.method.load_state_dict(state)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{path}: {error}; resume from another checkpoint") from error
        for part in self.method.saved_parts:
            if part not in state:
                _LOG.warning("%s has no %s: %s", path, part, _MISSING_STATE[part])
        self._unlabelled_position = state.get("unlabelled")


def _has_labels(inputs: Batch) -> bool:
    labels = inputs.get("labels")
    return isinstance(labels, Tensor) and bool((labels != NO_LABEL).any())


def write_state(path: Path, state: Mapping[str, Mapping[str, object]]) -> None:
    """Write a method's state to a safetensors file; its other values than tensors go into the
    header, as JSON."""
    tensors: dict[str, Tensor] = {}

    def move_tensors(value: object, *path: str) -> object:
        """Move the tensors of nested dicts into ``tensors``, with their paths as keys; return the
        dicts without them."""
        if not isinstance(value, Mapping):
            return value
        remaining = {}
        for key, item in value.items():
            if isinstance(item, Tensor):
                tensors["/".join([*path, str(key)])] = item.contiguous()
            else:
                remaining[str(key)] = move_tensors(item, *path, str(key))
        return remaining

    text = json.dumps(finite(move_tensors(state)), allow_nan=False)
    write_bytes(path, safetensors.torch.save(tensors, {_HEADER: text}))


def read_state(path: Path) -> dict[str, dict[str, Any]]:
    """Read a method's state from a file that `write_state` wrote; {} if the file does not exist.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            state = parse_json(file.metadata()[_HEADER], str(path))
            for name in file.keys():  # noqa: SIM118  file is not a mapping
                *keys, last = name.split("/")
                functools.reduce(operator.getitem, keys, state)[last] = file.get_tensor(name)
        if not all(isinstance(part, dict) for part in state.values()):
            raise TypeError("expected a dict of dicts")
    except (
        safetensors.SafetensorError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path} cannot be read; resume from another checkpoint") from error
    return state


class _MethodCallback(TrainerCallback):
    """Call the method's hooks at the Trainer's events, whose arguments are not used."""

    def __init__(self, trainer: MethodMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self._trainer.begin_training()

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self._trainer.check_active_parts()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self._trainer.method.after_step()

    def on_epoch_end(self, *args: object, **kwargs: object) -> None:
        self._trainer.method.after_epoch()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        trainer = self._trainer
        trainer.method.end(trainer.accelerator.unwrap_model(trainer.model_wrapped))


class MethodTrainer(MethodMixin, Trainer):
    """``transformers.Trainer`` with any of the methods; see `MethodMixin`.

    Examples:
        >>> trainer = MethodTrainer(
        ...     model=model, args=arguments, train_dataset=rows, method="sam,rho=0.1"
        ... )
        >>> trainer.train().global_step
        1
    """
