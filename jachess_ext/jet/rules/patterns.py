"""What deferred jets may compute, and how a rule defers one (`deferred.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ... import ops
from ..deferred import Deferred, Pattern
from ..registry import Rule
from ..tensor import JetTensor


@dataclass(frozen=True)
class Sum(Pattern):
    """a + b, for two jets of one shape, dtype and layout."""

    a: JetTensor
    b: JetTensor


@dataclass(frozen=True)
class OfOne(Pattern):
    """Something of one jet."""

    source: JetTensor


@dataclass(frozen=True)
class Activated(OfOne):
    """act(source), element by element."""

    kind: str


class Cast(OfOne):
    """source in another floating-point dtype."""


class Square(OfOne):
    """source²."""


class MeanSquare(OfOne):
    """Mean of source² over the last dimension, kept with size 1."""


@dataclass(frozen=True)
class ShiftedMeanSquare(OfOne):
    """mean source² + ε."""

    eps: float


@dataclass(frozen=True)
class InverseRms(OfOne):
    """(mean source² + ε)^(−½)."""

    eps: float


@dataclass(frozen=True)
class RepeatedHeads(OfOne):
    """Key or value heads ``[B, H, n, T, d]``, expanded along n, as ``[B, H n, T, d]``."""

    times: int


@dataclass(frozen=True)
class RmsNormed(OfOne):
    """source (mean source² + ε)^(−½) · weight."""

    eps: float
    weight: Tensor | None


def promise(
    pattern: Pattern, rule: Rule, args: tuple, named: dict, like: JetTensor, **shown: Any
) -> JetTensor:
    """Defer ``rule(*args, **named)``.

    Args:
        like: a jet with the shape, dtype, device and layout of the result.
        shown: ``shape`` or ``dtype`` of the result, if it differs from that of ``like``.
    """
    jets = [arg for arg in args if isinstance(arg, JetTensor)]
    plain = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, JetTensor)]
    stacks = [jet.streams for jet in jets if jet.pattern is None]
    deferred = Deferred(
        pattern,
        lambda: rule(*args, **named).streams,
        (*stacks, *plain),
        shown.get("shape", like.shape),
        shown.get("dtype", like.dtype),
        like.device,
    )
    return JetTensor.deferred(deferred, like.jet_layout)


def fusable(operator: str, *jets: Any) -> bool:
    """Return whether these are jets of one shape, dtype and layout that ``operator`` can take."""
    first = jets[0]
    return (
        all(isinstance(jet, JetTensor) for jet in jets)
        and not first.jet_layout.composed
        and not first.dtype.is_complex
        and all(
            jet.shape == first.shape
            and jet.dtype == first.dtype
            and jet.jet_layout == first.jet_layout
            for jet in jets[1:]
        )
        and first.ndim > 0
        and ops.available(operator, first.device, sums=first.jet_layout.summed)
        and first.jet_layout.has_operators
    )
