"""`Method`, the base class of all fine-tuning methods; plain training and label smoothing."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother
from typing_extensions import Self, dataclass_transform  # torch depends on it

from ...models import learns_prompts
from ..batches import Batch
from ..decision import Kind, decision_kind
from .settings import count_or_none, flag, nonnegative, share

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


Outputs: TypeAlias = "ModelOutput | Mapping[str, Tensor] | tuple[Tensor, ...] | None"
"""A model's output; None if neither the method nor the caller needs it."""

Run = Callable[..., tuple[Tensor, Outputs]]
"""``run(batch, called=model)`` returns the Trainer's own task loss of a labelled batch and the
output of the callable ``called``, which replaces the model."""

METHODS: dict[str, type[Method]] = {}
"""Every method by name: a subclass ``class SAM(Method, name="sam")`` registers itself."""


class Loss(NamedTuple):
    """The loss of a training batch.

    Attributes:
        task: the task loss (on the labels), a scalar.
        outputs: the model's output of the plain pass.
        penalty: strength · penalty, which is added to the task loss; None without a penalty.
        figures: figures to log with the penalty, scalars or ``[K]``.
    """

    task: Tensor
    outputs: Outputs
    penalty: Tensor | None = None
    figures: Mapping[str, Tensor | None] = {}


@dataclass_transform(kw_only_default=True)
@dataclasses.dataclass(kw_only=True, eq=False)
class Method:
    """A fine-tuning method; the annotated attributes of its class are its settings.

    Every subclass becomes a dataclass, whose constructor takes the settings by name and checks
    them.  A subclass overrides the hooks in which it differs from plain training.  `MethodTrainer`
    binds a copy of the method to its run (`bind`).

    Examples:
        >>> class HalfLoss(Method):
        ...     part: float = share(0.5)
        ...
        ...     def loss(self, run, model, inputs):
        ...         task, outputs = run(inputs)
        ...         return Loss(self.part * task, outputs)
        >>> HalfLoss(part=0.25).settings
        {'part': 0.25}

    Attributes:
        name: the method's name in `METHODS`.
        modes: the method's modes, the default first; empty without modes.
        control: whether reports count the method as a baseline for this package's own methods.
        capturable: whether every step launches the same kernels, as a CUDA graph requires.
        any_task: whether the method skips the parts that the task does not allow, instead of
            raising an error.
        one_process: whether to refuse several processes and fp16's loss scaling.
        needs_unlabelled, needs_tokenizer: whether the method needs unlabelled data or a tokenizer
            with its current settings.
        needs_outputs: whether `penalty` or `loss` uses the model's output, which some trainers
            compute only for this; if False, ``outputs`` is None.
        mode, strength, placebo: see `WithModes` and `Penalised`; neutral values if they are not
            settings of the method.
        smoothing: ε of label smoothing; 0 if it is not a setting of the method.
        trainer: the run's trainer; set by `bind`.
    """

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ()
    control: ClassVar[bool] = True
    any_task: ClassVar[bool] = False
    # Not annotated, so that they are not settings until a subclass declares them.
    needs_unlabelled = needs_tokenizer = one_process = capturable = False
    mode, strength, placebo, smoothing = "train", 1.0, False, 0.0
    _drawn_for = -1  # the optimiser step that `generator` was seeded for

    def __init_subclass__(cls, name: str | None = None) -> None:
        # Methods compare and hash as objects: settings may be lists, and a bound copy is not equal.
        dataclasses.dataclass(kw_only=True, eq=False)(cls)
        if name is not None:
            cls.name = name
            METHODS[name] = cls
        elif not hasattr(cls, "name"):
            cls.name = cls.__name__  # for messages only

    # Configuration ------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting has an invalid value; the message names the setting.
        """
        for declared in dataclasses.fields(self):
            value = getattr(self, declared.name)
            if declared.metadata and not declared.metadata["is_valid"](value):
                expected = declared.metadata["expected"]
                raise ValueError(f"{declared.name} is {value!r}; expected {expected}")
        self.trainer: Any  # of a bound method

    @classmethod
    def parameters(cls) -> dict[str, object]:
        """Return the settings' names and defaults."""
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings' names and values."""
        return {name: getattr(self, name) for name in self.parameters()}

    def replace(self, **settings: object) -> Self:
        """Return a copy of the method with these settings changed."""
        return dataclasses.replace(self, **settings)

    @property
    def label(self) -> str:
        """Return the method's name and mode, such as ``jachess-unlab``."""
        return f"{self.name}-{self.mode}" if "mode" in self.parameters() else self.name

    @property
    def knob(self) -> str | None:
        """Return the name of the setting that a search tunes, or None."""
        return "strength" if "strength" in self.parameters() else None

    def error(self, reason: str) -> ValueError:
        """Return an error whose message names the method."""
        return ValueError(f"method={self.label!r} {reason}")

    # A run --------------------------------------------------------------------------------------

    def bind(self, trainer: Any) -> Self:
        """Return a copy of the method that is bound to a trainer's run.

        Raises:
            ValueError: the trainer lacks the data or the tokenizer that the method needs, or runs
                in a way that the method does not support.
        """
        # A search binds one method to many trainers, one after the other.  A run's state (noise, a
        # schedule) is kept in the copy, so that trials do not share it.
        bound = copy.copy(self)
        bound.trainer = trainer
        bound.prepare()
        return bound

    def prepare(self) -> None:
        """Check that the trainer supports the method, and prepare the run; called by `bind`.

        Raises:
            ValueError: see `bind`.
        """
        trainer = self.trainer
        if self.needs_unlabelled and trainer.unlabelled_dataset is None:
            raise self.error("needs unlabelled_dataset=<rows like those of train_dataset>")
        if self.needs_tokenizer and not hasattr(trainer.processing_class, "all_special_ids"):
            raise self.error("needs processing_class=<the tokenizer>")
        needs_one_process = self.one_process or self.placebo
        if needs_one_process and (trainer.args.world_size > 1 or trainer.args.fp16):
            raise self.error(
                f"{'with a placebo ' * self.placebo}runs in one process and not in fp16, whose "
                "loss scaling may skip steps; use bf16=True"
            )
        if self.smoothing:
            trainer.label_smoother = _Smoother(self.smoothing, trainer)
            problem, names = self.problem_type(), trainer.label_names
            reasons = {
                "compute_loss_func takes the labels": trainer.compute_loss_func is not None,
                "with prompt tuning transformers smooths no labels (with LoRA it does)": (
                    learns_prompts(trainer.model)
                ),
                "the model has several labels a row": problem == "multi_label_classification",
                "the model is a regression": problem == "regression",
                f"the model's labels are called {', '.join(names) or 'nothing'}, not 'labels'": (
                    "labels" not in names
                ),
            }
            for reason in [reason for reason, applies in reasons.items() if applies][:1]:
                self._leave_out_smoothing(reason)

    def _leave_out_smoothing(self, reason: str) -> None:
        if not self.any_task:
            raise self.error(
                f"smooths the labels of one of several classes, but {reason}; use smoothing=0 or "
                "another method"
            )
        warnings.warn(f"method={self.label!r} leaves out label smoothing: {reason}", stacklevel=2)
        self.trainer.label_smoother = None

    def check_batch(self, inputs: Batch) -> None:
        """Check that the method can train on a batch.

        Raises:
            ValueError: label smoothing is set, and the batch has no labels of classes.
        """
        if not isinstance(self.trainer.label_smoother, _Smoother):
            return
        labels = inputs.get("labels")
        if labels is None:
            self._leave_out_smoothing(f"the batch has no 'labels'; it has {', '.join(inputs)}")
        elif labels.is_floating_point():
            self._leave_out_smoothing(f"the labels are numbers ({labels.dtype})")

    def begin(self, model: nn.Module) -> None:
        """Start or resume training.

        Args:
            model: the model without wrappers such as DistributedDataParallel.
        """
        self._drawn_for = -1

    @property
    def needs_outputs(self) -> bool:
        """Whether the method uses the model's output; see the class."""
        return self._in_loss

    # A method acts by overriding `loss`, `penalty` or `step`, or by smoothing the labels.  A user's
    # trainer subclass can bypass each of these without an error, and the run would be plain
    # training under the method's name: the trainer checks that the first step used all
    # `active_parts`.

    @property
    def _in_loss(self) -> bool:
        cls = type(self)
        return cls.loss is not Method.loss or cls.penalty is not Method.penalty

    def active_parts(self) -> set[str]:
        """Return the parts of a step that the method changes, of "loss", "step" and "smoother"."""
        parts = {
            "loss": self._in_loss,
            "step": type(self).step is not Method.step,
            "smoother": isinstance(self.trainer.label_smoother, _Smoother),
        }
        return {part for part, is_active in parts.items() if is_active}

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """Return the loss of a training batch.

        Args:
            run: computes the task loss and the model's output of a batch; see `Run`.
        """
        task_loss, outputs = run(inputs)
        penalty = self.penalty(model, inputs, outputs)
        return Loss(task_loss, outputs, None if penalty is None else self.strength * penalty)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor | None:
        """Return the penalty without its factor ``strength``, a mean over rows; None: none."""
        return None

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """Take a training step up to the gradients; return the loss to log.

        Args:
            run: runs the forward and backward pass of a batch, and returns its loss.
        """
        return run(inputs)

    def after_step(self) -> None:
        """Hook after an optimiser step."""

    def after_epoch(self) -> None:
        """Hook after an epoch."""

    def end(self, model: nn.Module) -> None:
        """Hook after training.

        Args:
            model: the model without wrappers such as DistributedDataParallel.
        """

    def zero_loss(self, task: Tensor) -> Tensor | None:
        """Return the loss that replaces a task loss that is not finite, so that the step changes
        nothing; None if the trainer is to raise an error instead."""
        return None

    @property
    def saved_parts(self) -> tuple[str, ...]:
        """Return the keys of the state that an exact resumption needs from a checkpoint."""
        reads_unlabelled = self.mode != "train" and self.trainer.unlabelled_dataset is not None
        return ("unlabelled",) if reads_unlabelled else ()

    def state_dict(self) -> dict[str, Mapping[str, object]]:
        """Return the method's state for a checkpoint, by keys of `saved_parts`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Restore the state of a checkpoint; keys that the method can do without may be missing.

        Raises:
            ValueError: the state is damaged, or that of another model.
            FileNotFoundError: a key that the method needs is missing.
        """

    def generator(self) -> torch.Generator:
        """Return a CPU generator for the method's own draws.

        It is seeded by the run's seed and the optimiser step, so that a resumed run draws the same
        numbers; the micro-batches of a step share it, one after the other.
        """
        # The step goes into the upper 32 bits: seed + step would give step 1 of seed 0 the numbers
        # of step 0 of seed 1, and runs of neighbouring seeds would not be independent.
        step = self.trainer.state.global_step
        if self._drawn_for != step:
            self._draws = torch.Generator().manual_seed(self.trainer.args.seed + (step << 32))
            self._drawn_for = step
        return self._draws

    def key(self) -> int:
        """Draw a seed for `seeded_rng`, for a further pass with other dropout masks."""
        return int(torch.randint(2**63 - 1, (), generator=self.generator()))

    def decision_kind(self, model: nn.Module, outputs: Outputs) -> Kind:
        """Return the kind of prediction of the outputs' logits; see `decision.decision_kind`."""
        return decision_kind(self.trainer.accelerator.unwrap_model(model), logits_of(outputs))

    def problem_type(self) -> str | None:
        """Return the ``problem_type`` of the model's config, or "regression" for a sequence
        classifier with one label, as transformers infers it; None if it is not determined."""
        inner = self.trainer.accelerator.unwrap_model(self.trainer.model)
        config = getattr(inner, "config", None)
        problem_type = getattr(config, "problem_type", None)
        is_classifier = getattr(inner, "loss_type", None) == "ForSequenceClassification"
        if problem_type is None and is_classifier and getattr(config, "num_labels", None) == 1:
            return "regression"
        return problem_type


class Plain(Method, name="none"):
    """Plain training on the task loss, without a penalty."""

    capturable = True


class LabelSmoothing(Method, name="label-smoothing"):
    """Cross-entropy against targets (1 − ε) one-hot + ε/C with C labels (Szegedy et al. 2016).

    Args:
        smoothing: ε, above 0.
    """

    smoothing: float = share(0.1)


class Penalised(Method):
    """A method that adds a penalty to the task loss.

    Args:
        strength: factor of the penalty.
        placebo: whether to replace each step's gradient of the penalty by a random one of the same
            norm, as a control.
    """

    strength: float = nonnegative(1.0)
    placebo: bool = flag(False)


class WithModes(Penalised):
    """A method whose penalty may be computed on unlabelled rows.

    Args:
        mode: rows that the penalty is computed on: "train", the labelled batch; "joint", a batch of
            unlabelled rows in the same step; "unlab", unlabelled rows in separate steps.
        dropout: in modes joint and unlab, whether the penalty's own pass uses dropout.
        unlab_batch_size: number of rows of an unlabelled batch in modes joint and unlab; None:
            ``per_device_train_batch_size``.
    """

    mode: str = "train"
    dropout: bool = flag(True)
    unlab_batch_size: int | None = count_or_none(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in self.modes:
            raise ValueError(f"mode is {self.mode!r}; expected one of {', '.join(self.modes)}")
        if self.mode == "train" and not self.dropout:
            modes = " or ".join(repr(mode) for mode in self.modes if mode != "train")
            raise ValueError(
                f"dropout=False needs a pass of R alone: mode {modes}, not 'train', whose one "
                "forward serves both losses"
            )
        self.needs_unlabelled = self.mode != "train"


class _Smoother(LabelSmoother):
    """transformers' label smoothing, but with an error for labels that do not match the logits."""

    def __init__(self, epsilon: float, trainer: Any) -> None:
        super().__init__(epsilon=epsilon)
        self._trainer = trainer

    def __call__(
        self, model_output: ModelOutput, labels: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        logits = logits_of(model_output) if isinstance(model_output, Mapping) else model_output[0]
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"label smoothing expects one class each: of logits {list(logits.shape)} labels "
                f"{list(logits.shape[:-1])}, not {list(labels.shape)}; use smoothing=0"
            )
        loss = super().__call__(model_output, labels, *args, **kwargs)
        self._trainer.mark_when_reached("smoother", loss)
        return loss


def parse_method(text: str) -> Method:
    """Return the method described by ``"name,setting=value,..."``; the name may include a mode.

    Examples:
        >>> parse_method("jachess-unlab,strength=0.1,weights=norm").mode
        'unlab'
        >>> parse_method("sam,rho=0.1").rho
        0.1

    Raises:
        ValueError: the method or a setting is unknown, the method does not have a setting, or a
            value is invalid.
    """
    label, *parts = (part.strip() for part in text.split(","))
    name, mode = _name_and_mode(label)
    texts: dict[str, str] = {}
    for part in parts:
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            texts[setting] = value
        elif texts:  # a list: weights=0.5,1,1
            texts[list(texts)[-1]] += f",{part}"
        else:
            raise ValueError(f"{text!r}: expected name,setting=value,…; {part!r} has no =")
    fixed = {} if mode is None else {"mode": mode}
    defaults = {n: v for n, v in METHODS[name].parameters().items() if n not in fixed}
    if unknown := sorted(texts.keys() - defaults.keys()):
        raise ValueError(
            f"method {label!r} has no setting {unknown[0]!r}; it has "
            f"{', '.join(sorted(defaults)) or 'none'}"
        )
    settings = {setting: _convert(value, defaults[setting]) for setting, value in texts.items()}
    return METHODS[name](**settings, **fixed)


def _name_and_mode(label: str) -> tuple[str, str | None]:
    if label in METHODS:
        return label, None
    name, _, mode = label.rpartition("-")
    method = METHODS.get(name)
    if method is not None and mode in method.modes and "mode" in method.parameters():
        return name, mode
    raise ValueError(
        f"unknown method {label!r}; expected one of {', '.join(METHODS)} (with a mode: "
        "jachess-train, jachess-joint, jachess-unlab, …)"
    )


def _convert(text: str, default: object) -> object:
    """Return the text converted to the default's type, or the text itself if that is impossible;
    the method's constructor then refuses it."""
    if isinstance(default, bool):
        return {"yes": True, "true": True, "no": False, "false": False}.get(text.lower(), text)
    try:
        if isinstance(default, str):  # the setting takes a word or a list of numbers
            return [_number(part) for part in text.split(",")]
        return float(text) if isinstance(default, float) else int(text)
    except ValueError:
        return text


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def logits_of(outputs: object, *, trained: bool = False) -> Tensor:
    """Return the logits in a model's output.

    Args:
        trained: whether the logits must have a gradient.

    Raises:
        ValueError: the output has no logits, or, if ``trained``, they have no gradient.
    """
    fields = outputs if isinstance(outputs, Mapping) else {}
    logits = fields.get("logits", getattr(outputs, "logits", None))
    if not isinstance(logits, Tensor):
        names = f"; it has {', '.join(fields)}" if fields else ""
        raise ValueError(
            f"the model's output, a {type(outputs).__name__}, has no tensor called logits{names}; "
            "let it return a dict with 'loss' and 'logits', or use a method that compares none"
        )
    if trained and torch.is_grad_enabled() and not logits.requires_grad:
        raise ValueError(
            "this trainer's compute_loss takes the logits from a pass without a gradient (as TRL's "
            "do), so that a method that compares logits would train nothing through them; use "
            "another method, or a compute_loss that returns the output of its training pass"
        )
    return logits
