"""`Method`, the base of every fine-tuning method, with the plain one and label smoothing."""

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
"""What a model returns; None where neither the method nor the caller reads it."""

Run = Callable[..., tuple[Tensor, Outputs]]
"""``run(batch, called=model)``: the Trainer's own task loss of a labelled batch and the output of
the model, or of ``called`` in its place."""

METHODS: dict[str, type[Method]] = {}
"""Every method by name: a subclass ``class SAM(Method, name="sam")`` registers itself."""


class Loss(NamedTuple):
    """The loss of a training batch.

    Attributes:
        task: the loss on the labels.
        outputs: the model's output of the plain pass.
        penalty: what is added to the task loss, strength included; None without a penalty.
        figures: scalars or ``[K]`` to log beside the penalty.
    """

    task: Tensor
    outputs: Outputs
    penalty: Tensor | None = None
    figures: Mapping[str, Tensor | None] = {}


@dataclass_transform(kw_only_default=True)
@dataclasses.dataclass(kw_only=True, eq=False)
class Method:
    """A fine-tuning method; the annotated attributes of its class are its settings.

    Every subclass is made a dataclass, whose constructor takes the settings by name and checks
    them.  It overrides the steps in which it differs from plain training.  `MethodTrainer` binds a
    copy of the method to its run (`bind`).

    Example:
        >>> class HalfLoss(Method):
        ...     part: float = share(0.5)
        ...
        ...     def loss(self, run, model, inputs):
        ...         task, outputs = run(inputs)
        ...         return Loss(self.part * task, outputs)
        >>> HalfLoss(part=0.25).settings
        {'part': 0.25}

    Attributes:
        name: its name in `METHODS`.
        modes: the modes it has, the default first; empty without modes.
        control: reports count it among the methods that this package's own have to beat.
        capturable: whether a step is the same list of kernels each time, as a CUDA graph needs.
        any_task: leave out what the task or the data does not allow, in place of an error.
        one_process: refuse to run in several processes or under fp16's loss scaling.
        needs_unlabelled, needs_tokenizer: whether it needs them with these settings.
        needs_outputs: whether `penalty` or `loss` reads the model's output, which some trainers
            compute for it alone; False hands them None.
        mode, strength, placebo: see `WithModes` and `Penalised`; of a method without the setting
            they are what changes nothing.
        smoothing: ε of label smoothing, the share spread over all labels; a setting of some.
        trainer: the run's trainer, once bound.
    """

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ()
    control: ClassVar[bool] = True
    any_task: ClassVar[bool] = False
    # Without an annotation, so that they are no settings until a subclass declares them.
    needs_unlabelled = needs_tokenizer = one_process = capturable = False
    mode, strength, placebo, smoothing = "train", 1.0, False, 0.0
    _drawn_for = -1  # the step that `generator` draws for

    def __init_subclass__(cls, name: str | None = None) -> None:
        # Methods compare and hash as objects: settings may be lists, and a bound copy is not equal.
        dataclasses.dataclass(kw_only=True, eq=False)(cls)
        if name is not None:
            cls.name = name
            METHODS[name] = cls
        elif not hasattr(cls, "name"):
            cls.name = cls.__name__  # for messages

    # Configuration ------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: one is out of range; the message names it.
        """
        for declared in dataclasses.fields(self):
            value = getattr(self, declared.name)
            if declared.metadata and not declared.metadata["good"](value):
                expected = declared.metadata["expected"]
                raise ValueError(f"{declared.name} is {value!r}; expected {expected}")
        self.trainer: Any  # of a bound method

    @classmethod
    def parameters(cls) -> dict[str, object]:
        """Return the settings that can be given, each with its default."""
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    @property
    def settings(self) -> dict[str, object]:
        """Return all settings that can be given, as given or by default."""
        return {name: getattr(self, name) for name in self.parameters()}

    def replace(self, **settings: object) -> Self:
        """Return a new method with other values of these settings."""
        return dataclasses.replace(self, **settings)

    @property
    def label(self) -> str:
        """Return the name with its mode: ``jachess-unlab``."""
        return f"{self.name}-{self.mode}" if "mode" in self.parameters() else self.name

    @property
    def knob(self) -> str | None:
        """Return the name of the setting that scales the method, or None; it is what is tuned."""
        return "strength" if "strength" in self.parameters() else None

    def error(self, reason: str) -> ValueError:
        """Return an error whose message names the method."""
        return ValueError(f"method={self.label!r} {reason}")

    # A run --------------------------------------------------------------------------------------

    def bind(self, trainer: Any) -> Self:
        """Return a copy for the run of a trainer.

        Raises:
            ValueError: the trainer lacks what the method needs.
        """
        # A search binds one method to many trainers, one after the other.  What a run keeps (noise,
        # a schedule, a copy of the weights) goes into the copy, so that no trial sees another's.
        bound = copy.copy(self)
        bound.trainer = trainer
        bound.prepare()
        return bound

    def prepare(self) -> None:
        """Check the trainer and keep what the run needs of it; called by `bind`."""
        trainer = self.trainer
        if self.needs_unlabelled and not self.any_task and trainer.unlabelled_dataset is None:
            raise self.error("needs unlabelled_dataset=..., which was not given")
        if self.needs_tokenizer and not hasattr(trainer.processing_class, "all_special_ids"):
            raise self.error("needs processing_class=<the tokenizer>")
        alone = self.one_process or self.placebo
        if alone and (trainer.args.world_size > 1 or trainer.args.fp16):
            raise self.error(
                f"{'with a placebo ' * self.placebo}runs in one process and not in fp16, whose "
                "loss scaling may skip steps; use bf16=True"
            )
        if self.smoothing:
            trainer.label_smoother = _Smoother(self.smoothing, trainer)
            problem = self.problem()
            if trainer.compute_loss_func is not None:
                self._leave_out_smoothing("compute_loss_func takes the labels")
            elif learns_prompts(trainer.model):
                self._leave_out_smoothing(
                    "with prompt tuning transformers smooths no labels (LoRA's it does)"
                )
            elif problem == "multi_label_classification":
                self._leave_out_smoothing("the model has several labels a row")
            elif problem == "regression":
                self._leave_out_smoothing("the model is a regression")
            elif "labels" not in trainer.label_names:
                names = ", ".join(trainer.label_names) or "none"
                self._leave_out_smoothing(f"the model's labels are not called 'labels' ({names})")

    def _leave_out_smoothing(self, reason: str) -> None:
        if not self.any_task:
            raise self.error(
                f"smooths the labels of one of several classes, but {reason}; use smoothing=0 or "
                "another method"
            )
        warnings.warn(f"method={self.label!r} leaves out label smoothing: {reason}", stacklevel=2)
        self.trainer.label_smoother = None

    def check(self, inputs: Batch) -> None:
        """Check that the method can train on a batch.

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
        """Start or resume training; ``model`` is without wrappers."""
        self._drawn_for = -1

    @property
    def needs_outputs(self) -> bool:
        """Whether the method reads the model's output; see the class."""
        return self._in_loss

    # A method acts where it overrides `loss`, `penalty` or `step`, or smooths the labels.  Each has
    # a place in the Trainer that a subclass of the user's can bypass without an error, and the run
    # would be a plain one under the method's name.  `active_parts` says which of them the first
    # step has to pass through; the trainer checks it (`MethodMixin.check_active_parts`).

    @property
    def _in_loss(self) -> bool:
        cls = type(self)
        return cls.loss is not Method.loss or cls.penalty is not Method.penalty

    def active_parts(self) -> set[str]:
        """Return the parts of a training step in which it acts: "loss", "step", "smoother"."""
        smooths = isinstance(self.trainer.label_smoother, _Smoother)
        parts = {
            "loss": self._in_loss,
            "step": type(self).step is not Method.step,
            "smoother": smooths,
        }
        return {part for part, acts in parts.items() if acts}

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """Return the loss of a training batch."""
        task, outputs = run(inputs)
        penalty = self.penalty(model, inputs, outputs)
        return Loss(task, outputs, None if penalty is None else self.strength * penalty)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Outputs) -> Tensor | None:
        """Return the penalty before its strength, a mean over the rows; None without one."""
        return None

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """Go forward and backward through ``run``; return the loss to log."""
        return run(inputs)

    def after_step(self) -> None:
        """Act after an optimiser step."""

    def after_epoch(self) -> None:
        """Act after an epoch."""

    def end(self, model: nn.Module) -> None:
        """Finish training; ``model`` is without wrappers."""

    def zero_loss(self, task: Tensor) -> Tensor | None:
        """Return the loss of a step whose task loss is not finite; None makes that an error."""
        return None

    @property
    def saved_parts(self) -> tuple[str, ...]:
        """Name the parts that a checkpoint needs for the run to be resumed exactly."""
        draws = self.mode != "train" and self.trainer.unlabelled_dataset is not None
        return ("unlabelled",) if draws else ()

    def state_dict(self) -> dict[str, Mapping[str, object]]:
        """Return the method's own parts of a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Restore the parts of a checkpoint; some may be missing.

        Raises:
            ValueError: a part is damaged, or of another model.
            FileNotFoundError: a part is missing that the method needs.
        """

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU for the method's own draws.

        The optimiser step's number seeds it, so that a resumed run draws the same numbers; the
        step's micro-batches draw one after the other.
        """
        # The step goes into the upper 32 bits: seed + step would give step 1 of seed 0 the numbers
        # of step 0 of seed 1, and runs of neighbouring seeds would not be independent.
        step = self.trainer.state.global_step
        if self._drawn_for != step:
            self._draws = torch.Generator().manual_seed(self.trainer.args.seed + (step << 32))
            self._drawn_for = step
        return self._draws

    def key(self) -> int:
        """Draw a key for `drawing_apart`, for a second pass with dropout masks of its own."""
        return int(torch.randint(2**63 - 1, (), generator=self.generator()))

    def kind(self, model: nn.Module, outputs: Outputs) -> Kind:
        """Return what the model's outputs decide."""
        return decision_kind(self.trainer.accelerator.unwrap_model(model), logits_of(outputs))

    def problem(self) -> str | None:
        """Return the model's ``problem_type``, as transformers takes it."""
        inner = self.trainer.accelerator.unwrap_model(self.trainer.model)
        config = getattr(inner, "config", None)
        stated = getattr(config, "problem_type", None)
        classifies = getattr(inner, "loss_type", None) == "ForSequenceClassification"
        if stated is None and classifies and getattr(config, "num_labels", None) == 1:
            return "regression"
        return stated


class Plain(Method, name="none"):
    """The task loss alone."""

    capturable = True


class LabelSmoothing(Method, name="label-smoothing"):
    """Cross-entropy against (1 − ε) one-hot + ε/C of C labels (Szegedy et al. 2016).

    Args:
        smoothing: ε, above 0.
    """

    smoothing: float = share(0.1)


class Penalised(Method):
    """A method that adds a penalty to the task loss.

    Args:
        strength: factor of the penalty.
        placebo: replace each step's penalty gradient by a random one of its norm, as a control.
    """

    strength: float = nonnegative(1.0)
    placebo: bool = flag(False)


class WithModes(Penalised):
    """A method whose penalty may be of unlabelled rows.

    Args:
        mode: rows of the penalty: "train", the labelled ones; "joint", a batch of unlabelled ones
            in the same step; "unlab", unlabelled ones in steps of their own.
        dropout: modes joint and unlab: keep dropout on in the penalty's own pass.
        unlab_batch_size: modes joint and unlab; None: ``per_device_train_batch_size``.
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
    """transformers' label smoothing, which refuses labels that are not one class each."""

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
    """Build a method from ``"name,setting=value"``; a mode may be part of the name.

    Example:
        >>> parse_method("jachess-unlab,strength=0.1,weights=norm").mode
        'unlab'
        >>> parse_method("sam,rho=0.1").rho
        0.1

    Raises:
        ValueError: an unknown method or setting, a setting of another method, a bad value.
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
    settings = {setting: _value(value, defaults[setting]) for setting, value in texts.items()}
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


def _value(text: str, default: object) -> object:
    """Convert to the default's type; text that cannot be converted is left to the constructor."""
    if isinstance(default, bool):
        return {"yes": True, "true": True, "no": False, "false": False}.get(text.lower(), text)
    try:
        if isinstance(default, str):  # a word, or numbers: one per layer, or layers
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
        trained: they are to carry the gradient of a training pass.

    Raises:
        ValueError: it has none, or none with a gradient.
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
