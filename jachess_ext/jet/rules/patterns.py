"""Patterns, the formulas of deferred jets (`deferred.py`), and `defer`, with which a rule returns a
deferred jet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...ops.library import transformed
from ..engine.deferred import Deferred, Pattern
from ..engine.tensor import JetTensor
from ..engine.types import Args, Named, Rule


@dataclass(frozen=True)
class Sum(Pattern):
    """a + b, for two jets of one shape, dtype and layout."""

    a: JetTensor
    b: JetTensor


@dataclass(frozen=True)
class UnaryPattern(Pattern):
    """A function of one jet."""

    source: JetTensor


@dataclass(frozen=True)
class Activated(UnaryPattern):
    """An activation function of the source, element by element; ``kind`` is its name in
    `ops.ACTIVATION_KINDS`."""

    kind: str


class Cast(UnaryPattern):
    """The source in another floating-point dtype."""


class Square(UnaryPattern):
    """source²."""


class MeanSquare(UnaryPattern):
    """Mean of source² over the last dimension, which keeps size 1."""


@dataclass(frozen=True)
class ShiftedMeanSquare(UnaryPattern):
    """mean source² + ε."""

    eps: float


@dataclass(frozen=True)
class InverseRms(UnaryPattern):
    """(mean source² + ε)^(−½)."""

    eps: float


@dataclass(frozen=True)
class RepeatedHeads(UnaryPattern):
    """Key or value heads, each repeated for n queries: the source is ``[B, H, n, T, d]``, expanded
    along n, and the result its view ``[B, H n, T, d]``."""

    repeats: int


@dataclass(frozen=True)
class RmsNormed(UnaryPattern):
    """source (mean source² + ε)^(−½) · weight."""

    eps: float
    weight: Tensor | None


def defer(
    pattern: Pattern,
    rule: Rule,
    args: Args,
    kwargs: Named,
    like: JetTensor,
    shape: torch.Size | None = None,
    dtype: torch.dtype | None = None,
) -> JetTensor:
    """Return a jet whose streams are computed, by ``rule(*args, **kwargs)``, only when they are
    needed.

    Args:
        pattern: the formula of the result.
        like: a jet with the device and layout of the result.
        shape, dtype: those of the result; None: those of ``like``.
    """
    jets = [arg for arg in args if isinstance(arg, JetTensor)]
    plain = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, JetTensor)]
    # A deferred argument checks its own sources; accessing its streams here would compute them.
    stacks = [jet.streams for jet in jets if jet.pattern is None]
    deferred = Deferred(
        pattern,
        lambda: rule(*args, **kwargs).streams,
        (*stacks, *plain),
        like.shape if shape is None else shape,
        dtype or like.dtype,
        like.device,
    )
    return JetTensor.deferred(deferred, like.jet_layout)


def _are_compatible(first: JetTensor, *operands: JetTensor) -> bool:
    """Return whether the jets have the same shape, real dtype and layout, and the compiled
    operators support that layout."""
    return (
        not first.jet_layout.composed
        and not first.dtype.is_complex
        and all(
            jet.shape == first.shape
            and jet.dtype == first.dtype
            and jet.jet_layout == first.jet_layout
            for jet in operands
        )
        and first.ndim > 0  # operators work along the last dimension
        and first.jet_layout.has_operators
    )


def fusable(operator: str, first: JetTensor, *operands: JetTensor) -> bool:
    """Return whether the jets are compatible (`_are_compatible`) and ``operator`` has a kernel for
    their device and layout."""
    return _are_compatible(first, *operands) and ops.available(
        operator, first.device, sums=first.jet_layout.summed
    )


def attention_fuses(jet: JetTensor) -> bool:
    """Return whether `ops.attention_jet` takes the jet; False within a transform of torch.func."""
    return _are_compatible(jet) and not transformed()
