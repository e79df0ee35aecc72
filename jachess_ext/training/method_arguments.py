"""`MethodArguments`: which regularisation method, and its settings, for every method alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .arguments import MODES, JacHessArguments, _help

SMOOTHERS = ("jacobian", "cross-holder", "jachess")
"""Penalties on derivatives; each has the modes of `JacHessArguments`."""

METHODS = ("none", "l2", "tapt", "sam", "r3f", *SMOOTHERS)

_STRENGTHS = {"l2": 1e-5, "r3f": 1.0}  # Σ θ² of an encoder is in the ten thousands
_STRENGTH = 0.01  # of all others
_LOGITS = {"layers": "logits", "weights": "uniform"}
_PRESETS: dict[str, dict[str, Any]] = {
    "jacobian": _LOGITS | {"hessian": False},
    "cross-holder": _LOGITS | {"hessian": True},
}


@dataclass
class MethodArguments(JacHessArguments):
    """One method by name, with its settings (spec 01, "Baselines in the same harness").

    - ``none``: the task loss alone.
    - ``l2``: + strength · ½ Σ θ² over trained matrices (biases and norms are left free).
    - ``tapt``: first `tapt_epochs` of masked (decoders: causal) language modelling on the
      unlabelled text, then the task loss (Gururangan et al. 2020, *Don't Stop Pretraining*).
    - ``sam``: the gradient at θ + ρ g/‖g‖ (Foret et al. 2021).
    - ``r3f``: + strength · symmetric KL between the outputs at x and at x + noise (Aghajanyan et
      al. 2021, *Better Fine-Tuning by Reducing Representational Collapse*).
    - ``jacobian``, ``cross-holder``: JacHess on the logits alone, without and with the Hessian.
    - ``jachess``: Eq. 7 on the blocks.

    The last three take a mode, also as part of the name: ``jachess-unlab``.  Fields that a
    method does not use are refused where they are given by name (`parse`).

    Raises:
        ValueError: an unknown method or mode, or a field out of range; the message names it.
    """

    method: str = _help("one of " + ", ".join(METHODS), default="jachess")
    strength: float | None = _help(  # type: ignore[assignment]
        "factor of the penalty; default: 1e-5 for l2, 1 for r3f, else 0.01", default=None
    )
    rho: float = _help("sam: radius ρ of the ascent step", default=0.05)
    noise: float = _help("r3f: half width (uniform) or deviation (normal) of it", default=1e-5)
    noise_distribution: str = _help("r3f: uniform or normal", default="uniform")
    tapt_epochs: float = _help("tapt: epochs over the unlabelled text", default=3.0)
    tapt_lr: float = _help("tapt: learning rate", default=5e-5)
    tapt_masked: float = _help("tapt: share of tokens masked, encoders", default=0.15)

    def __post_init__(self) -> None:
        self.method, mode = _split(self.method)
        if mode is not None:
            self.mode = mode
        if self.strength is None:
            self.strength = _STRENGTHS.get(self.method, _STRENGTH)
        for name, value in _PRESETS.get(self.method, {}).items():
            setattr(self, name, value)
        super().__post_init__()
        for name in ("rho", "noise", "tapt_epochs", "tapt_lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0")
        if not 0 < self.tapt_masked < 1:
            raise ValueError(f"tapt_masked is {self.tapt_masked}; expected a share between 0 and 1")
        if self.noise_distribution not in ("uniform", "normal"):
            raise ValueError(
                f"noise_distribution is {self.noise_distribution!r}; expected uniform or normal"
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
            field, equals, value = (piece.strip() for piece in part.partition("="))
            if equals:
                given[field] = value
            elif given:  # weights=0.5,1,1
                given[list(given)[-1]] += f",{part}"
            else:
                raise ValueError(f"{text!r}: expected name,field=value,…; {part!r} has no =")
        method, mode = _split(name)
        known = set(_fields_of(method)) - ({"mode"} if mode else set())
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
        return self.method in SMOOTHERS

    @property
    def knob(self) -> str | None:
        """The field that says how much the method acts, to be tuned; None where there is none.

        In mode unlab AdamW undoes ``strength``, and the learning rate of the pass acts instead.
        """
        if self.smooths and self.mode == "unlab":
            return "unlab_lr_ratio"
        return "strength" if "strength" in _fields_of(self.method) else None

    @property
    def uses_unlabelled(self) -> bool:
        """Whether it needs unlabelled data."""
        return self.method == "tapt" or (self.smooths and self.mode != "train")

    @property
    def label(self) -> str:
        """The name with its mode: ``jachess-unlab``."""
        return f"{self.method}-{self.mode}" if self.smooths else self.method


_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "l2": ("strength",),
    "tapt": ("tapt_epochs", "tapt_lr", "tapt_masked"),
    "sam": ("rho",),
    "r3f": ("strength", "noise", "noise_distribution"),
}


def _fields_of(method: str) -> tuple[str, ...]:
    if method in _FIELDS:
        return _FIELDS[method]
    preset = _PRESETS.get(method, {})
    return tuple(f.name for f in fields(JacHessArguments) if f.name not in preset)


def _split(name: str) -> tuple[str, str | None]:
    """The method and, where the name says one, the mode."""
    if name in METHODS:
        return name, None
    method, _, mode = name.rpartition("-")
    if method in SMOOTHERS and mode in MODES:
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
