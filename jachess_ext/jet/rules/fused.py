"""Recognisers of the sequences of functions that models use in place of one operator.

    RMS norm    x.pow(2).mean(-1, keepdim=True) + ε → rsqrt (or pow −½) → times x, times weight,
                with casts to and from float32 anywhere; Llama's, T5's and Gemma's classes
    gated MLP   act(g) · u
    residual    a + b, before a layer norm or an RMS norm (rules/norm.py uses the pattern)
    GQA         expand and reshape of key and value heads (rules/attention.py uses the pattern)

A recogniser is called before the rule of one function of the sequence.  It returns a deferred jet
(or, at the end of the sequence, the result of the operator), or None to leave the call to the rule.
The ordinary rules compute the same; `python_tests/jet/test_fused.py` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ..engine.registry import recognise
from ..engine.tensor import JetTensor
from ..engine.types import Operand, Rule
from .norm import rms_norm_operator
from .patterns import (
    Activated,
    Cast,
    InverseRms,
    MeanSquare,
    RepeatedHeads,
    RmsNormed,
    ShiftedMeanSquare,
    Square,
    Sum,
    attention_fuses,
    defer,
    fusable,
)
from .streamwise import varargs

# ---- residual sums -----------------------------------------------------------------------------


@recognise("add", "__add__", "__radd__")
def residual_sum(rule: Rule, input: Operand, other: Operand, **kwargs: Operand) -> JetTensor | None:
    if kwargs or not isinstance(input, JetTensor) or not isinstance(other, JetTensor):
        return None
    if not fusable("rms_norm_jet", input, other):
        return None
    # Compute both now: if that happened only after the end of a checkpointed block, the block could
    # not free the tensors that they save.
    input.streams, other.streams  # noqa: B018
    return defer(Sum(input, other), rule, (input, other), {}, input)


# ---- gated activations -------------------------------------------------------------------------


@recognise("mul", "multiply", "__mul__", "__rmul__")
def gated_activation(rule: Rule, input: Operand, other: Operand) -> JetTensor | None:
    if not isinstance(input, JetTensor) or not isinstance(other, JetTensor):
        return None
    # The square of an activation needs its streams anyway.
    if input is other or not fusable("gated_activation_jet", input, other):
        return None
    for activated, factor in ((input, other), (other, input)):
        pattern = activated.pattern
        if isinstance(pattern, Activated):
            layout = input.jet_layout
            settings = (pattern.kind, layout.directions, layout.squares)
            return input.with_streams(
                ops.gated_activation_jet(pattern.source.streams, factor.streams, *settings)
            )
    return None


# ---- RMS norms ---------------------------------------------------------------------------------


def _uncast(jet: JetTensor) -> JetTensor:
    """Return the jet before a cast to a wider dtype, or the jet itself if it is no such cast.

    Both have the same mean square.
    """
    return jet.pattern.source if isinstance(jet.pattern, Cast) else jet


@recognise("pow", "__pow__")
def square_or_inverse_root(rule: Rule, input: Operand, exponent: Operand) -> JetTensor | None:
    if not isinstance(input, JetTensor) or isinstance(exponent, Tensor):
        return None
    if exponent == 2:
        return square(rule, input, exponent)
    return inverse_root(rule, input, exponent) if exponent == -0.5 else None


@recognise("square")
def square(rule: Rule, input: JetTensor, *exponent: Operand) -> JetTensor | None:
    if not fusable("rms_norm_jet", input):
        return None
    return defer(Square(input), rule, (input, *exponent), {}, input)


@recognise("mean")
def mean_square(rule: Rule, input: JetTensor, *args: object, **kwargs: object) -> JetTensor | None:
    if not isinstance(input.pattern, Square):
        return None
    options = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    dim = options.pop("dim", None)
    is_last = dim in (-1, input.ndim - 1, [-1], (-1,), [input.ndim - 1], (input.ndim - 1,))
    if not is_last or options != {"keepdim": True}:
        return None
    shape = torch.Size((*input.shape[:-1], 1))
    pattern = MeanSquare(input.pattern.source)
    return defer(pattern, rule, (input, *args), kwargs, input, shape=shape)


@recognise("add", "__add__", "__radd__")
def shifted_mean_square(
    rule: Rule, input: Operand, other: Operand, **kwargs: Operand
) -> JetTensor | None:
    if not isinstance(input, JetTensor):
        input, other = other, input
    if kwargs or not isinstance(input, JetTensor) or not isinstance(input.pattern, MeanSquare):
        return None
    if not isinstance(other, int | float):
        return None
    pattern = ShiftedMeanSquare(input.pattern.source, float(other))
    return defer(pattern, rule, (input, other), {}, input)


@recognise("rsqrt")
def inverse_root(rule: Rule, input: JetTensor, *exponent: Operand) -> JetTensor | None:
    if not isinstance(input.pattern, ShiftedMeanSquare):
        return None
    pattern = InverseRms(input.pattern.source, input.pattern.eps)
    return defer(pattern, rule, (input, *exponent), {}, input)


@recognise("mul", "multiply", "__mul__", "__rmul__")
def rms_normed(rule: Rule, input: Operand, other: Operand) -> JetTensor | None:
    for normed, factor in ((input, other), (other, input)):
        if not isinstance(normed, JetTensor) or not isinstance(factor, Tensor):
            continue
        pattern = normed.pattern
        # x · InverseRms(x) becomes RmsNormed(x), and RmsNormed(x) times a weight [d] becomes
        # RmsNormed(x, weight).  Both are deferred, so that the operator is called once.
        if isinstance(pattern, InverseRms) and _has_same_source(factor, pattern):
            dtype = torch.promote_types(normed.dtype, factor.dtype)
            return _defer_rms_norm(RmsNormed(_uncast(pattern.source), pattern.eps, None), dtype)
        if isinstance(pattern, RmsNormed) and _scales_channels(factor, pattern, normed):
            dtype = torch.promote_types(normed.dtype, factor.dtype)
            return _defer_rms_norm(RmsNormed(pattern.source, pattern.eps, factor), dtype)
    return None


def _has_same_source(factor: Tensor, pattern: InverseRms) -> bool:
    return isinstance(factor, JetTensor) and _uncast(factor) is _uncast(pattern.source)


def _scales_channels(factor: Tensor, pattern: RmsNormed, normed: JetTensor) -> bool:
    return (
        pattern.weight is None
        and not isinstance(factor, JetTensor)
        and factor.is_floating_point()
        and factor.shape == normed.shape[-1:]
        and factor.device == normed.device
    )


def _defer_rms_norm(pattern: RmsNormed, dtype: torch.dtype) -> JetTensor:
    source = pattern.source
    # The norm is computed in the wider dtype of source and result, so that neither is rounded
    # before it; the operator itself sums 16-bit numbers in float32.
    wide = torch.promote_types(source.dtype, dtype)

    def make(source: JetTensor, weight: Tensor | None) -> JetTensor:
        jet = source if source.dtype == wide else source.with_streams(source.streams.to(wide))
        out = rms_norm_operator(jet, weight, pattern.eps)
        return out if wide == dtype else out.with_streams(out.streams.to(dtype))

    return defer(pattern, make, (source, pattern.weight), {}, source, dtype=dtype)


# ---- heads shared by several queries -----------------------------------------------------------


@recognise("reshape", "view")
def repeated_heads(
    rule: Rule, self: JetTensor, *sizes: int | Sequence[int], **kwargs: object
) -> JetTensor | None:
    """Defer the reshape of a jet ``[B, H, n, T, d]``, expanded along n, to ``[B, H n, T, d]``,
    since the reshape copies."""
    if kwargs or self.ndim != 5 or self.pattern is not None:
        return None
    batch, heads, repeats, tokens, size = self.shape
    if self.streams.stride(3) or not attention_fuses(self):
        return None
    shape = torch.Size((batch, heads * repeats, tokens, size))
    if tuple(varargs(*sizes)) != shape:
        return None
    return defer(RepeatedHeads(self, repeats), rule, (self, *sizes), {}, self, shape=shape)


# ---- casts -------------------------------------------------------------------------------------


@recognise("to", "type_as")
def cast(rule: Rule, input: Tensor, *args: object, **kwargs: object) -> JetTensor | None:
    if len(args) + len(kwargs) != 1 or not set(kwargs) <= {"dtype", "other"}:
        return None
    target = (*args, *kwargs.values())[0]
    if isinstance(target, Tensor) and target.device != input.device:
        return None
    return _defer_cast(input, getattr(target, "dtype", target))


def register_cast(name: str, dtype: torch.dtype) -> None:
    """Register the recogniser of a method that casts to ``dtype``."""

    @recognise(name)
    def method(rule: Rule, input: JetTensor, **kwargs: object) -> JetTensor | None:
        return None if kwargs else _defer_cast(input, dtype)


for _name in ("float", "double", "half", "bfloat16"):
    register_cast(_name, getattr(torch, "float32" if _name == "float" else _name))


def _defer_cast(input: Tensor, dtype: object) -> JetTensor | None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    if not isinstance(input, JetTensor) or not fusable("rms_norm_jet", input):
        return None
    if dtype == input.dtype:
        return input  # as torch does
    if isinstance(input.pattern, RmsNormed):
        return _defer_rms_norm(input.pattern, dtype)
    if torch.promote_types(input.dtype, dtype) != dtype:
        return None  # the cast rounds, so that it changes the mean square

    def widen(jet: JetTensor) -> JetTensor:
        return jet.with_streams(jet.streams.to(dtype))

    return defer(Cast(_uncast(input)), widen, (input,), {}, input, dtype=dtype)
