"""`Method`: the configuration of a fine-tuning method, and what it does in a trainer's run."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from ...smoothness.decision import Kind, decision_kind

if TYPE_CHECKING:
    from typing_extensions import Self

Batch = Mapping[str, Any]
Run = Callable[..., tuple[Tensor, Any]]
"""``run(batch, called=model)``: the Trainer's own task loss of a batch (labels included), and the
model's output; of another callable than the Trainer's model, where one is given."""

METHODS: dict[str, type[Method]] = {}
"""Every method by name: a subclass ``class SAM(Method, name="sam")`` enters itself."""


def defaults_of(constructor: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that have a default, with it."""
    arguments = inspect.signature(constructor).parameters.values()
    return {a.name: a.default for a in arguments if a.default is not a.empty}


def _checker(expected: str, good: Callable[[Any], bool]) -> Callable[..., None]:
    def check(**settings: Any) -> None:
        for name, value in settings.items():
            if not good(value):
                raise ValueError(f"{name} is {value!r}; expected {expected}")

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


check_positive = _checker("a number above 0", lambda v: _is_number(v) and 0 < v < math.inf)
check_nonnegative = _checker("a number from 0 up", lambda v: _is_number(v) and 0 <= v < math.inf)
check_share = _checker("a share between 0 and 1", lambda v: _is_number(v) and 0 < v < 1)
check_smoothing = _checker("a share from 0 to below 1", lambda v: _is_number(v) and 0 <= v < 1)
check_fraction = _checker("a share from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1)
check_flag = _checker("yes or no", lambda v: isinstance(v, bool))
check_count = _checker("a whole number from 1 up", lambda v: type(v) is int and v >= 1)
check_count_or_none = _checker(
    "a whole number from 1 up", lambda v: v is None or (type(v) is int and v >= 1)
)


def check_choice(choices: tuple[str, ...], **settings: Any) -> None:
    """Check that each setting is one of the choices."""
    for name, value in settings.items():
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


class Loss(NamedTuple):
    """What a batch costs.

    Attributes:
        task: the loss on labels.
        outputs: the model's, of the plain pass.
        penalty: to be added, strength included; None without one.
        figures: to be logged beside the penalty, scalars or ``[K]``.
        instead: the loss of a step that is skipped; None as a rule.
    """

    task: Tensor
    outputs: Any
    penalty: Tensor | None = None
    figures: Mapping[str, Tensor | None] = {}
    instead: Tensor | None = None


class Method:
    """A fine-tuning method; its constructor's arguments are its settings.

    It is configuration until `MethodTrainer` binds it: `bind` gives the copy that acts in a run.
    A subclass keeps each argument as an attribute of the same name, checks it in the constructor,
    and overrides what it does otherwise than the plain Trainer.

    Args:
        mode: on which rows the penalty is: "train", the labelled ones; "joint", a batch of
            unlabelled ones; "unlab", unlabelled ones, apart from the steps of task loss.
        strength: factor of the penalty.
        swapped: share of the tokens swapped, of methods that swap.
        unknown: share of those for the unknown token, others for a random one.
        every: the penalty acts in every n-th optimiser step, with n-fold strength.
        smoothing: ε of label smoothing, the share spread over all labels.
        dropout: modes joint and unlab: whether dropout acts in the penalty's own pass.
        unlab_batch_size: modes joint and unlab; None: ``per_device_train_batch_size``.
        placebo: a control: each step's penalty gradient replaced by a random one of its norm.

    Attributes:
        name: in `METHODS`.
        modes: that it has, where it has any; the first is its own.
        control: whether reports take it for one that methods of this package have to beat.
        any_task: whether it leaves out what a task or the data does not offer (classes to smooth,
            unlabelled rows), in place of an error.
        one_process: whether it runs in one process only, and not under fp16's loss scaling.
        needs_unlabelled: whether it needs unlabelled data; may depend on the settings.
        needs_tokenizer: whether it needs the tokenizer; may depend on the settings.
        fixed: settings that make the method what it is, and are not taken.
        trainer: of the run, once it is bound.
    """

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ()
    control: ClassVar[bool] = True
    any_task: ClassVar[bool] = False
    one_process: ClassVar[bool] = False
    needs_unlabelled: bool = False
    needs_tokenizer: bool = False
    fixed: ClassVar[Mapping[str, Any]] = {}
    trainer: Any
    _draws: torch.Generator
    _drawn_for: int

    def __init_subclass__(
        cls, name: str | None = None, fixed: Mapping[str, Any] | None = None
    ) -> None:
        if name is not None:
            cls.name = name
            METHODS[name] = cls
        if fixed is not None:
            cls.fixed = fixed

    # Configuration ------------------------------------------------------------------------------

    def __init__(
        self,
        mode: str = "train",
        *,
        strength: float = 1.0,
        swapped: float = 0.15,
        unknown: float = 0.5,
        every: int = 1,
        smoothing: float = 0.0,
        dropout: bool = True,
        unlab_batch_size: int | None = None,
        placebo: bool = False,
    ) -> None:
        if self.modes:
            check_choice(self.modes, mode=mode)
        check_nonnegative(strength=strength)
        check_share(swapped=swapped)
        check_fraction(unknown=unknown)
        check_count(every=every)
        check_smoothing(smoothing=smoothing)
        check_flag(dropout=dropout, placebo=placebo)
        check_count_or_none(unlab_batch_size=unlab_batch_size)
        if mode == "train" and not dropout:
            raise ValueError(
                "dropout=False needs a pass of R alone, and mode='train' has one forward for both "
                "losses; use mode "
                + " or ".join(repr(other) for other in self.modes if other != "train")
            )
        self.mode, self.strength, self.every = mode, strength, every
        self.swapped, self.unknown, self.smoothing = swapped, unknown, smoothing
        self.dropout, self.unlab_batch_size, self.placebo = dropout, unlab_batch_size, placebo
        self.needs_unlabelled = self.needs_unlabelled or mode != "train"

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Return the settings that can be given, each with its default.

        Where a constructor takes ``**settings``, these are those of the one it extends.
        """
        known: dict[str, Any] = {}
        for owner in cls.__mro__:
            known = {**defaults_of(owner), **known}
            arguments = inspect.signature(owner).parameters.values()
            if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
                break
        return {name: value for name, value in known.items() if name not in cls.fixed}

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the constructor, as given or by default."""
        return {name: getattr(self, name) for name in self.parameters()}

    def replace(self, **settings: Any) -> Self:
        """Return a new method with other values of these settings."""
        return type(self)(**{**self.settings, **settings})

    @property
    def label(self) -> str:
        """The name with its mode: ``jachess-unlab``."""
        return f"{self.name}-{self.mode}" if "mode" in self.parameters() else self.name

    @property
    def knob(self) -> str | None:
        """The setting that says how much the method acts, to be tuned; None where there is none."""
        return "strength" if "strength" in self.parameters() else None

    # A run --------------------------------------------------------------------------------------

    def bind(self, trainer: Any) -> Self:
        """Return a copy that acts in the run of a trainer.

        Raises:
            ValueError: the trainer lacks what the method needs.
        """
        bound = copy.copy(self)
        bound.trainer = trainer
        bound._draws, bound._drawn_for = torch.Generator(), -1
        bound.prepare()
        return bound

    def prepare(self) -> None:
        """Check the trainer, and keep what the run needs of it; called by `bind`."""
        trainer = self.trainer
        if self.needs_unlabelled and not self.any_task and trainer.unlabelled_dataset is None:
            raise ValueError(
                f"method={self.label!r} needs unlabelled_dataset=..., which was not given"
            )
        if self.needs_tokenizer and not hasattr(trainer.processing_class, "all_special_ids"):
            raise ValueError(f"method={self.label!r} needs processing_class=<the tokenizer>")
        alone = trainer.args.world_size == 1 and not trainer.args.fp16
        if self.one_process and not alone:
            raise ValueError(
                f"method={self.label!r} runs in one process and not in fp16, whose loss scaling "
                "may skip steps; use bf16=True"
            )
        if self.placebo and not alone:
            raise ValueError("a placebo runs in one process and not in fp16; use bf16=True")
        if self.smoothing:
            reason = self._cannot_smooth()
            if reason is None:
                trainer.label_smoother = _Smoother(epsilon=self.smoothing)
            else:
                self._leave_out_smoothing(reason)

    def _cannot_smooth(self) -> str | None:
        """Why no label of one of several classes would be smoothed, as far as is known."""
        problem = self.problem()
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
        """Warn that labels stay as they are; an error, unless the method does what it can.

        Raises:
            ValueError: the method leaves nothing out.
        """
        if not self.any_task:
            raise ValueError(
                f"method={self.label!r} smooths the labels of one of several classes, but "
                f"{reason}; use smoothing=0 or another method"
            )
        warnings.warn(f"method={self.label!r} leaves out label smoothing: {reason}", stacklevel=2)
        self.trainer.label_smoother = None

    def check(self, inputs: Batch) -> None:
        """Check that the method can act on a training batch.

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
        """Return what a training batch costs."""
        task, outputs = run(inputs)
        penalty = self.penalty(model, inputs, outputs)
        return Loss(task, outputs, None if penalty is None else self.strength * penalty)

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        """Return a penalty beside the task loss, without its strength: a mean over the rows."""
        return None

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """Go forward and backward by way of ``run``; return the loss to be logged."""
        return run(inputs)

    def after_step(self) -> None:
        """An optimiser step was taken."""

    def after_epoch(self) -> None:
        """An epoch is over."""

    def end(self, model: nn.Module) -> None:
        """Training is over; `model` is without wrappers."""

    def zero_loss(self, task: Tensor) -> Tensor | None:
        """Return the loss of a step whose task loss is not finite; None where that is an error."""
        return None

    @property
    def saved_parts(self) -> tuple[str, ...]:
        """What a checkpoint should hold for the method to go on from it."""
        draws = self.mode != "train" and self.trainer.unlabelled_dataset is not None
        return ("unlabelled",) if draws else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the method's own parts of a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; parts may be missing.

        Raises:
            ValueError: a part is damaged, or of another model.
            FileNotFoundError: a part is missing that the method cannot do without.
        """

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU for the method's own draws.

        Decided by the number of the optimiser step, so that a resumed run draws what it would have
        drawn; goes on over the step's micro-batches.
        """
        step = self.trainer.state.global_step
        if self._drawn_for != step:
            self._draws.manual_seed(self.trainer.args.seed + (step << 32))
            self._drawn_for = step
        return self._draws

    def key(self) -> int:
        """Return a key for `drawing_apart`: of a second pass's dropout masks."""
        return int(torch.randint(2**63 - 1, (), generator=self.generator()))

    def kind(self, model: nn.Module, outputs: Any) -> Kind:
        """Return what the model's outputs decide."""
        return decision_kind(self.trainer.accelerator.unwrap_model(model), logits_of(outputs))

    def problem(self) -> str | None:
        """Return the model's ``problem_type``, as transformers takes it."""
        inner: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        config = getattr(inner, "config", None)
        stated = getattr(config, "problem_type", None)
        classifies = getattr(inner, "loss_type", None) == "ForSequenceClassification"
        if stated is None and classifies and getattr(config, "num_labels", None) == 1:
            return "regression"
        return stated


class Plain(Method, name="none"):
    """The task loss alone."""

    def __init__(self) -> None:
        super().__init__()


class LabelSmoothing(Method, name="label-smoothing"):
    """Cross-entropy against (1 − ε) one-hot + ε/C of C labels (Szegedy et al. 2016).

    Args:
        smoothing: ε, above 0.
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        check_share(smoothing=smoothing)
        super().__init__(smoothing=smoothing)


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
    given: dict[str, str] = {}
    for part in parts:
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            given[setting] = value
        elif given:  # weights=0.5,1,1
            given[list(given)[-1]] += f",{part}"
        else:
            raise ValueError(f"{text!r}: expected name,setting=value,…; {part!r} has no =")
    known = METHODS[name].parameters()
    if mode is not None:
        del known["mode"]
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(
            f"method {label!r} has no setting {unknown[0]!r}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    settings = {setting: _value(value, known[setting]) for setting, value in given.items()}
    if mode is not None:
        settings["mode"] = mode
    return METHODS[name](**settings)


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


_FLAGS = {"yes": True, "true": True, "no": False, "false": False}


def _value(text: str, default: Any) -> Any:
    """Convert to the default's type; the constructor refuses text that is no such value."""
    if isinstance(default, bool):
        return _FLAGS.get(text.lower(), text)
    number: type = float if isinstance(default, float) else int
    try:
        if isinstance(default, str):  # a word, or numbers: one a layer, or of layers
            return [_number(part) for part in text.split(",")]
        return number(text)
    except ValueError:
        return text


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


class _Smoother(LabelSmoother):
    """transformers' label smoothing, of labels that are one class each."""

    def __call__(self, model_output: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the smoothed loss.

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
    """Return the logits in a model's output.

    Raises:
        ValueError: it has none.
    """
    named = isinstance(outputs, Mapping)
    logits = outputs.get("logits") if named else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        names = f"; it has {', '.join(outputs)}" if named else ""
        raise ValueError(
            f"the model's output, a {type(outputs).__name__}, has no tensor called logits{names}; "
            "this method compares logits: let the model return a dict with 'loss' and 'logits', or "
            "use another method"
        )
    return logits
