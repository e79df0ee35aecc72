"""`MethodArguments`: which regularisation method, and its settings, for every method alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .adversarial import SMART, FreeLB, NEFTune
from .arguments import MODES, JacHessArguments, _help
from .consistency import CorruptAugment, CorruptConsistency, RDrop, Recommended
from .decision import Divergence, Fisher, Margin
from .method import Method
from .penalties import L2, R3F
from .sam import SAM
from .start import L2SP, WiSEFT
from .tapt import TAPT

_JACHESS = tuple(f.name for f in fields(JacHessArguments))
_JOINT = ("mode", "dropout", "unlab_batch_size")
_LOGITS: dict[str, Any] = {"layers": "logits", "weights": "uniform"}


@dataclass(frozen=True)
class Entry:
    """A method of the table below.

    Attributes:
        acts: what it does in a run, and what it needs; `Method` itself for penalties on derivatives
            (`smooths`), which `JacHessMixin` adds.
        settings: fields of `MethodArguments` it takes.
        defaults: of those that are None where they are not given.
        fixed: settings that make the method what it is, and are not taken.
        control: whether reports take it for one that methods of this package have to beat.
        modes: that it has, where it has any; the first is its own.
    """

    acts: type[Method]
    settings: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    smooths: bool = False
    control: bool = True
    modes: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """The settings that can be given."""
        return tuple(name for name in self.settings if name not in self.fixed)


def _smoother(strength: float = 0.01, **fixed: Any) -> Entry:
    settings = (*_JACHESS, "placebo")
    return Entry(
        *(Method, settings, {"strength": strength}, fixed),
        smooths=True,
        control=False,
        modes=MODES,
    )


def _decision(acts: type[Method], strength: float) -> Entry:
    settings = ("strength", "placebo", "directions", "along", "size", "path", "every")
    return Entry(
        *(acts, (*settings, "smoothing", "swapped", "unknown", *_JOINT), {"strength": strength}),
        {"hessian": False},  # one direction is enough
        control=False,
        modes=("train", "joint"),
    )


_ADVERSARIAL = ("adv_steps", "adv_lr", "adv_start", "adv_radius")

METHODS: dict[str, Entry] = {
    "none": Entry(Method),
    "recommended": Entry(
        Recommended,
        defaults={"strength": 1.0},
        fixed={"mode": "joint", "swapped": 0.15, "unknown": 0.5, "every": 2, "smoothing": 0.1},
        modes=("joint",),
    ),
    # Σ θ² of an encoder is in the ten thousands
    "l2": Entry(L2, ("strength", "placebo"), {"strength": 1e-5}),
    "l2-sp": Entry(L2SP, ("strength", "placebo"), {"strength": 0.01}),
    "wise-ft": Entry(WiSEFT, ("mix",)),
    "tapt": Entry(TAPT, ("tapt_epochs", "tapt_lr", "tapt_masked")),
    "sam": Entry(SAM, ("rho",)),
    "label-smoothing": Entry(Method, ("smoothing",), {"smoothing": 0.1}),
    "r-drop": Entry(RDrop, ("strength", "placebo", "smoothing"), {"strength": 1.0}),
    "r3f": Entry(R3F, ("strength", "placebo", "noise", "noise_distribution"), {"strength": 1.0}),
    "neftune": Entry(NEFTune, ("alpha",)),
    "freelb": Entry(
        *(FreeLB, _ADVERSARIAL),
        {"adv_steps": 3, "adv_lr": 0.1, "adv_start": 0.1, "adv_radius": 0.0},
    ),
    "smart": Entry(
        *(SMART, ("strength", "placebo", *_ADVERSARIAL)),
        {"strength": 1.0, "adv_steps": 1, "adv_lr": 1.0, "adv_start": 0.1, "adv_radius": 0.5},
    ),
    "corrupt-augment": Entry(CorruptAugment, ("swapped", "unknown", "clean", "smoothing")),
    "corrupt-consistency": Entry(
        CorruptConsistency,
        ("strength", "placebo", "swapped", "unknown", "every", "smoothing", *_JOINT),
        {"strength": 1.0},
        modes=("train", "joint"),
    ),
    "fisher": _decision(Fisher, 1.0),
    "divergence": _decision(Divergence, 1.0),
    "margin": _decision(Margin, 0.01),
    "jacobian": _smoother(**_LOGITS, hessian=False),
    "cross-holder": _smoother(**_LOGITS, hessian=True),
    "jachess": _smoother(),
    # What the paper's code computes: its Hessian term has no gradient
    "published": _smoother(
        1.0,
        squared=True,
        scope="first",
        weights="raw_softmax",
        hessian_gradient=False,
        normalize=False,
    ),
}
"""Every method by name.  A new one: a subclass of `Method` in a file of its own, a line here, a
field of `MethodArguments` for each setting that no other method has, a line in docs/methods.md."""


@dataclass
class MethodArguments(JacHessArguments):
    """One of `METHODS` by name, with its settings; docs/methods.md describes them.

    Penalties on derivatives take a mode, also as part of the name: ``jachess-unlab``,
    ``fisher-joint``.  Fields that a method does not use are refused where they are
    given by name (`parse`).

    Raises:
        ValueError: an unknown method or mode, or a field out of range; the message names it.
    """

    method: str = _help("one of " + ", ".join(METHODS), default="jachess")
    strength: float | None = _help(  # type: ignore[assignment]
        "factor of the penalty; its default is the method's", default=None
    )
    placebo: bool = _help(
        "a control: each step's penalty gradient replaced by a random one of its norm",
        default=False,
    )
    rho: float = _help("sam: radius ρ of the ascent step", default=0.05)
    noise: float = _help("r3f: half width (uniform) or deviation (normal) of it", default=1e-5)
    noise_distribution: str = _help("r3f: uniform or normal", default="uniform")
    tapt_epochs: float = _help("tapt: epochs over the unlabelled text", default=3.0)
    tapt_lr: float = _help("tapt: learning rate", default=5e-5)
    tapt_masked: float = _help("tapt: share of tokens masked, encoders", default=0.15)
    mix: float = _help("wise-ft: share of the fine-tuned weights, from 0 to 1", default=0.5)
    smoothing: float | None = _help(
        "ε of label smoothing, the share spread over all labels; default: 0.1 of label-smoothing, "
        "else 0",
        default=None,
    )
    alpha: float = _help("neftune: noise is uniform, ± α / √(T d)", default=5.0)
    adv_steps: int | None = _help("freelb, smart: steps of ascent", default=None)
    adv_lr: float | None = _help("freelb, smart: length of one", default=None)
    adv_start: float | None = _help("freelb, smart: size of the noise to start from", default=None)
    adv_radius: float | None = _help(
        "freelb: norm of a row's noise, 0: any; smart: largest entry", default=None
    )
    swapped: float = _help("corrupt-…, swaps: share of tokens swapped", default=0.15)
    unknown: float = _help(
        "corrupt-…, swaps: share of those for the unknown token, others for a random one",
        default=0.5,
    )
    along: str = _help("fisher, divergence, margin: directions: swaps or noise", default="swaps")
    size: float = _help("noise: its deviation over the embeddings' rms entry", default=1.0)
    path: bool = _help(
        "… : at a random point on the way, where the task loss is too", default=False
    )
    every: int = _help("… : in every n-th step, with n-fold strength", default=1)
    clean: float = _help("corrupt-augment: share of the clean rows' loss", default=0.5)

    def __post_init__(self) -> None:
        self.method, mode = _split(self.method)
        if mode is not None:
            self.mode = mode
        entry = METHODS[self.method]
        for name, value in entry.defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, value in entry.fixed.items():
            setattr(self, name, value)
        if entry.modes and self.mode in MODES and self.mode not in entry.modes:
            raise ValueError(
                f"method {self.method!r} has no mode {self.mode!r}; expected "
                f"{' or '.join(entry.modes)}"
            )
        kept, self.strength = self.strength, self.strength or 0.0
        super().__post_init__()
        self.strength = kept
        lowest = 1e-9 if "smoothing" in entry.defaults else 0.0
        self.smoothing = self.smoothing or 0.0
        if not lowest <= self.smoothing < 1:
            raise ValueError(f"smoothing is {self.smoothing}; expected a share between 0 and 1")
        for names, good, wanted in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not good(value):
                    raise ValueError(f"{name} is {value!r}; expected {wanted}")
        if self.placebo and entry.smooths and self.mode == "unlab":
            raise ValueError(
                "placebo acts on penalties added to the task loss, and mode unlab steps along its "
                "own; use mode train or joint"
            )

    @classmethod
    def parse(cls, text: str) -> MethodArguments:
        """From ``"name"`` or ``"name,field=value,…"``, as on the command line.

        Example:
            >>> MethodArguments.parse("jachess-unlab,strength=0.1,weights=norm").mode
            'unlab'

        Raises:
            ValueError: an unknown method or field, a field of another method, a bad value.
        """
        name, *parts = (part.strip() for part in text.split(","))
        given: dict[str, str] = {}
        for part in parts:
            name_of, equals, value = (piece.strip() for piece in part.partition("="))
            if equals:
                given[name_of] = value
            elif given:  # weights=0.5,1,1
                given[list(given)[-1]] += f",{part}"
            else:
                raise ValueError(f"{text!r}: expected name,field=value,…; {part!r} has no =")
        method, mode = _split(name)
        known = set(METHODS[method].known) - ({"mode"} if mode else set())
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"method {name!r} has no setting {unknown[0]!r}; it has "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        return cls(method=name, **{f: _value(f, value) for f, value in given.items()})

    @property
    def smooths(self) -> bool:
        """Whether it penalises derivatives, through `JacHess`."""
        return METHODS[self.method].smooths

    @property
    def knob(self) -> str | None:
        """The field that says how much the method acts, to be tuned; None where there is none.

        In mode unlab AdamW undoes ``strength``, and the learning rate of the pass acts instead.
        """
        if self.smooths and self.mode == "unlab":
            return "unlab_lr_ratio"
        return "strength" if "strength" in METHODS[self.method].known else None

    @property
    def uses_unlabelled(self) -> bool:
        """Whether it needs unlabelled data."""
        return METHODS[self.method].acts.unlabelled or self.draws_unlabelled

    @property
    def draws_unlabelled(self) -> bool:
        """Whether its penalty is of unlabelled batches."""
        return bool(METHODS[self.method].modes) and self.mode != "train"

    @property
    def label(self) -> str:
        """The name with its mode: ``jachess-unlab``."""
        named = self.smooths or (self.draws_unlabelled and "mode" in METHODS[self.method].known)
        return f"{self.method}-{self.mode}" if named else self.method


_INFINITY = float("inf")
_POSITIVE = ("rho", "noise", "tapt_epochs", "tapt_lr", "alpha", "adv_lr", "adv_start", "size")
# Fields, what their values satisfy where they are given, and that in words.
_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_POSITIVE, lambda value: 0 < value < _INFINITY, "a number above 0"),
    (("adv_radius",), lambda value: 0 <= value < _INFINITY, "a number from 0 up"),
    (("tapt_masked", "swapped"), lambda value: 0 < value < 1, "a share between 0 and 1"),
    (("mix", "unknown", "clean"), lambda value: 0 <= value <= 1, "a share from 0 to 1"),
    (("adv_steps", "every"), lambda value: value >= 1, "a whole number from 1 up"),
    (("along",), ("swaps", "noise").__contains__, "swaps or noise"),
    (("noise_distribution",), ("uniform", "normal").__contains__, "uniform or normal"),
)


def _split(name: str) -> tuple[str, str | None]:
    """The method and, where the name says one, the mode."""
    if name in METHODS:
        return name, None
    method, _, mode = name.rpartition("-")
    entry = METHODS.get(method)
    if entry is not None and mode in entry.modes and "mode" not in entry.fixed:
        return method, mode
    modes = ", ".join(f"jachess-{mode}" for mode in MODES)
    raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)} ({modes}, …)")


def _value(field: str, text: str) -> Any:
    """The text as the field's type."""
    kind = next(f.type for f in fields(MethodArguments) if f.name == field)
    if "bool" in str(kind):
        words = {"true": True, "yes": True, "false": False, "no": False}
        if text.lower() not in words:
            raise ValueError(f"{field} is {text!r}; expected yes or no")
        return words[text.lower()]
    try:
        if "int" in str(kind):
            return int(text)
        return float(text) if "float" in str(kind) else text
    except ValueError:
        raise ValueError(f"{field} is {text!r}; expected a number") from None
