"""Sums, products, quotients and powers of two tensors; complex numbers; Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...torch_private import release
from ..layout import replace_tensors
from ..registry import attribute, find_rule, general_rule, jet_rule, spellings
from ..strides import note_memory
from ..tensor import JetTensor, aligned, common_layout, constant, lift, primal_of
from .pointwise import Derivatives, in_float32, push_forward, wide
from .reduce import euclidean_norm
from .streamwise import (
    add_to_primal,
    behind_streams,
    behind_streams_all,
    bilinear,
    lifted_streams,
    varargs,
)


def promoted(a: Any, b: Any) -> tuple[Any, Any]:
    """Cast both to the dtype that torch would compute in, which depends on their dimensions.

    A plain scalar tensor keeps its dtype, as torch keeps its precision beside a half.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype == b.dtype:
        return a, b
    dtype = torch.result_type(primal_of(a), primal_of(b))
    return _cast(a, dtype), _cast(b, dtype)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, JetTensor) or value.ndim else value


@jet_rule("add", "__add__", "__radd__")
def add(input: Any, other: Any, *, alpha: float = 1) -> JetTensor:
    if alpha != 1:
        other = other * alpha
    a, b = promoted(input, other)
    layout = common_layout(a, b)
    if isinstance(a, JetTensor) and isinstance(b, JetTensor):
        ndim = max(a.ndim, b.ndim)
        return JetTensor(aligned(a, ndim) + aligned(b, ndim), layout)
    if not isinstance(a, JetTensor):
        a, b = b, a
    return JetTensor(add_to_primal(a.streams, b), layout)


@jet_rule("neg", "negative", "__neg__")
def neg(input: JetTensor) -> JetTensor:
    return input.with_streams(-input.streams)


@jet_rule("positive", "__pos__")
def positive(input: JetTensor) -> JetTensor:
    return input


@jet_rule("sub", "subtract", "__sub__")
def sub(input: Any, other: Any, *, alpha: float = 1) -> JetTensor:
    if torch.bool in (getattr(input, "dtype", None), getattr(other, "dtype", None)):
        torch.sub(primal_of(input), primal_of(other))  # raises torch's own explanation
    return add(input, other * -alpha)


@jet_rule("rsub", "__rsub__")
def rsub(input: Any, other: Any, *, alpha: float = 1) -> JetTensor:
    return sub(other, input, alpha=alpha)


@jet_rule("mul", "multiply", "__mul__", "__rmul__")
def mul(input: Any, other: Any) -> JetTensor:
    a, b = promoted(input, other)
    if not isinstance(a, JetTensor):
        a, b = b, a
    if not isinstance(b, Tensor) or (b.ndim == 0 and not isinstance(b, JetTensor)):
        return a.with_streams(a.streams * b)
    return bilinear(torch.mul, a, b, ndim=max(a.ndim, b.ndim))


@jet_rule("div", "divide", "true_divide", "__truediv__", "__div__")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> JetTensor:
    if rounding_mode is not None:
        rule = general_rule(torch.div, f"rounding_mode={rounding_mode!r} is not covered")
        return rule(input, other, rounding_mode=rounding_mode)
    a, b = promoted(input, other)
    if isinstance(b, JetTensor):
        return JetTensor(_quotient(a, b), common_layout(a, b))
    if not isinstance(b, Tensor) or b.ndim == 0:
        return a.with_streams(a.streams / b)
    return bilinear(torch.div, a, b, ndim=max(a.ndim, b.ndim))


def _quotient(a: Any, b: JetTensor) -> Tensor:
    """Compute y = a / b:  y_i = (a_i − y b_i) / b,
    y_ij = (a_ij − y_i b_j − y_j b_i − y b_ij) / b."""
    layout = b.jet_layout
    ndim = max(b.ndim, a.ndim) if isinstance(a, Tensor) else b.ndim
    numerator = aligned(a, ndim)[1:] if isinstance(a, JetTensor) else None
    below = aligned(b, ndim)
    primal = primal_of(a) / b.primal
    tangents = -primal * below[1:]
    tangents = tangents if numerator is None else tangents + numerator
    first = tangents[: layout.directions] / b.primal
    rest = tangents[layout.directions :]  # a_ij − y b_ij
    if layout.seconds:
        rest = (rest - layout.crossed(first, below[layout.first])) / b.primal
    return torch.cat([primal.unsqueeze(0), first, rest])


@jet_rule("__rdiv__", "__rtruediv__")
def rdiv(self: JetTensor, other: Any) -> JetTensor:
    return div(other, self)


@jet_rule("reciprocal")
def reciprocal(input: JetTensor) -> JetTensor:
    return div(1, input)


@jet_rule("addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> JetTensor:
    dtype = torch.addcmul(*primal_of((input, tensor1, tensor2))).dtype
    return input.to(dtype) + value * tensor1.to(dtype) * tensor2.to(dtype)


@jet_rule("addcdiv")
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> JetTensor:
    dtype = torch.addcdiv(*primal_of((input, tensor1, tensor2))).dtype
    return input.to(dtype) + value * tensor1.to(dtype) / tensor2.to(dtype)


@jet_rule("lerp")
def lerp(input: Any, end: Any, weight: Any) -> JetTensor:
    return input + weight * (end - input)


@jet_rule("outer")
def outer(input: Any, vec2: Any) -> JetTensor:
    return input.unsqueeze(-1) * vec2


# ---- powers ------------------------------------------------------------------------------------


@jet_rule("pow", "__pow__")
def power(input: Any, exponent: Any) -> JetTensor:
    a, n = promoted(input, exponent)
    if not isinstance(n, JetTensor):
        return _power_of_jet(a, n)
    if not isinstance(a, JetTensor):
        return _power_to_jet(constant(a, dtype=n.dtype, device=n.device), n)
    return _power_of_jets(a, n)


def _power_of_jet(base: JetTensor, exponent: Any) -> JetTensor:
    x, n = base.primal, exponent
    ndim = max(x.ndim, n.ndim) if isinstance(n, Tensor) else x.ndim
    return push_forward(base.with_streams(aligned(base, ndim)), _power_derivatives(x, n))


def _power_derivatives(x: Tensor, n: Any) -> Derivatives:
    """Return x^n, n x^(n−1), n (n−1) x^(n−2); 0 where a factor is 0 and a power is infinite."""
    value = torch.pow(x, n)
    x, n = wide(x), wide(n.to(value.dtype)) if isinstance(n, Tensor) else n
    first, second = n - 1, n - 2
    if isinstance(n, Tensor):
        first = torch.where(n == 0, 1, first)
        second = torch.where((n == 0) | (n == 1), 1, second)
    else:
        first, second = (1 if n == 0 else first), (1 if n in (0, 1) else second)
    curvature = n * (n - 1) * torch.pow(*_without_slope_at_zero(x, second))
    return value, n * torch.pow(x, first), curvature


def _without_slope_at_zero(x: Tensor, n: Any) -> tuple[Tensor, Any]:
    """Detach x where x^n is 0 and its slope infinite (0 < n < 1), so that a loss that does not
    depend on it gets no 0 · ∞."""
    if x.is_complex() or not (isinstance(n, Tensor) or 0 < n < 1):
        return x, n
    steep = (x == 0) & (n > 0) & (n < 1)
    return torch.where(steep, x.detach(), x), n


def _power_to_jet(base: Tensor, exponent: JetTensor) -> JetTensor:
    """Compute b^y as a function of y; constant where b is 0."""
    value = torch.pow(base, exponent.primal)
    widened = exponent.with_streams(aligned(exponent, value.ndim))
    return _moved_exponent(base.to(value.dtype), widened, value)[0]


def _moves(jet: JetTensor) -> Tensor:
    """Return where a tangent is not 0; elsewhere a formula may leave its domain without harm."""
    return (jet.streams[1:] != 0).any(0)


def _moved_exponent(base: Tensor, exponent: JetTensor, value: Tensor) -> tuple[JetTensor, Tensor]:
    """Compute b^y as a function of y, with derivatives b^y ln b and b^y (ln b)²; and ln b.

    ln b is 0 where b is 0, as in torch, and where b is negative and no tangent of y needs it.
    """
    needed = _moves(exponent) | ((wide(base).real > 0) & value.isfinite())
    log = torch.where((base != 0) & needed, wide(base), 1).log()
    power = torch.where(needed, wide(value), 0)
    return push_forward(exponent, (value, power * log, power * log * log)), log


def _power_of_jets(base: JetTensor, exponent: JetTensor) -> JetTensor:
    """Compute x^n as a function of both; its mixed derivative is x^(n−1) (1 + n ln x)."""
    ndim = max(base.ndim, exponent.ndim)
    base, exponent = (jet.with_streams(aligned(jet, ndim)) for jet in (base, exponent))
    x, n = base.primal, exponent.primal
    value = torch.pow(x, n)
    with torch.no_grad():
        finite = torch.stack([wide(part) for part in _power_derivatives(x, n)]).isfinite().all(0)
    needed = _moves(base)
    _, slope, curvature = _power_derivatives(x, torch.where(needed | finite, n, 1))
    in_x = push_forward(base, (value, slope, curvature))
    in_n, log = _moved_exponent(x, exponent, value)
    out = torch.cat([value.unsqueeze(0), in_x.streams[1:] + in_n.streams[1:]])
    # Where it is infinite, only tangents ≠ 0 get it; at 0 it is 0, unless n is 0 or 1.
    mixed = wide(torch.where(x == 0, 1, x)) ** (n - 1) * (1 + n * log)
    nothing = (x == 0) | ~((needed & _moves(exponent)) | mixed.isfinite())
    mixed = mixed.masked_fill(nothing, 0)
    out = _with_mixed(out, mixed, base, exponent)
    infinite = (x == 0) & ((n == 0) | (n == 1))
    undefined = torch.zeros_like(mixed.detach()).masked_fill(infinite, math.nan)
    with torch.no_grad():
        nowhere = _with_mixed(torch.zeros_like(out), torch.ones_like(mixed), base, exponent) == 0
    return base.with_streams(out + undefined.masked_fill(nowhere, 0).to(out.dtype))


def _with_mixed(streams: Tensor, mixed: Tensor, a: JetTensor, b: JetTensor) -> Tensor:
    """Add the second order of a function's derivative ``mixed`` by both of two jets."""
    layout = a.jet_layout
    if not layout.seconds:
        return streams
    both = mixed * layout.crossed(a.streams[layout.first], b.streams[layout.first])
    q = layout.directions
    return torch.cat([streams[: 1 + q], streams[1 + q :] + both.to(streams.dtype)])


jet_rule("__rpow__")(lambda self, other: power(other, self))


@jet_rule("float_power")
def float_power(input: Any, exponent: Any) -> JetTensor:
    """Compute ``pow`` in float64, whatever the inputs' dtype."""
    base, n = (v.double() if isinstance(v, Tensor) else v for v in (input, exponent))
    return power(base, n)


# ---- extreme values ----------------------------------------------------------------------------


@jet_rule("maximum")
def maximum(input: Any, other: Any) -> Any:
    """Share the derivative equally between ties, as torch's autograd does, and keep NaN."""
    return _both_of_a_tie(input, other, (input > other) | torch.isnan(input))


@jet_rule("minimum")
def minimum(input: Any, other: Any) -> Any:
    return _both_of_a_tie(input, other, (input < other) | torch.isnan(input))


def _both_of_a_tie(input: Any, other: Any, first: Tensor) -> Any:
    """Return ``input`` where ``first`` is true, else ``other``; half of each where they tie."""
    chosen: Any = torch.where(first, input, other)
    rest: Any = torch.where(first, other, input)
    return torch.where(input == other, 0.5 * chosen + 0.5 * rest, chosen)


_FMAX_SHARES_TIES = release(torch.__version__) >= (2, 14)


@jet_rule("fmax")
def fmax(input: Any, other: Any) -> Any:
    """Prefer numbers to NaN.  Ties share the derivative; before torch 2.14 ``input`` has it all."""
    if not _FMAX_SHARES_TIES:
        return torch.where((input >= other) | torch.isnan(other), input, other)
    return _both_of_a_tie(input, other, (input > other) | torch.isnan(other))


@jet_rule("fmin")
def fmin(input: Any, other: Any) -> Any:
    if not _FMAX_SHARES_TIES:
        return torch.where((input <= other) | torch.isnan(other), input, other)
    return _both_of_a_tie(input, other, (input < other) | torch.isnan(other))


@jet_rule("atan2", "arctan2")
def atan2(input: Any, other: Any) -> JetTensor:
    """Use the derivatives of atan(y / x), or of −atan(x / y) where |y| > |x|; 0 at the origin, as
    in torch's autograd."""
    value = torch.atan2(primal_of(input), primal_of(other))
    steep = input.abs() > other.abs()
    origin = (input == 0) & (other == 0)
    above = torch.where(steep, -other, input).masked_fill(origin, 0)
    below = torch.where(steep, input, other).masked_fill(origin, 1)
    angle: Any = torch.atan(above / below)
    streams = [value.unsqueeze(0), angle.streams[1:].to(value.dtype)]
    return angle.with_streams(torch.cat(streams))


# ---- logarithms of sums ------------------------------------------------------------------------


def _log_of_sum(name: str, base: float) -> None:
    """Register log_b(b^x + b^y), whose derivatives in d = x − y are σ(d ln b) and
    ln b σ(d ln b) σ(−d ln b); d is 0 for two equal infinities."""
    scale = math.log(base)

    @jet_rule(name)
    def rule(input: Any, other: Any) -> JetTensor:
        a, b = promoted(input, other)
        value = getattr(torch, name)(primal_of(a), primal_of(b))
        a, b = (lift(v, common_layout(a, b)) for v in (a, b))
        a, b = (v.with_streams(aligned(v, value.ndim)) for v in (a, b))
        infinite = (a.primal == b.primal) & a.primal.isinf()
        gap = torch.where(infinite, 0, a.primal - b.primal)
        tangents = a.streams[1:] - b.streams[1:]
        difference = a.with_streams(torch.cat([gap.unsqueeze(0), tangents]))

        def derivatives(gap: Tensor) -> Derivatives:
            share, rest = torch.sigmoid(scale * gap), torch.sigmoid(-scale * gap)
            return value, share, scale * share * rest

        moved = push_forward(difference, in_float32(gap, derivatives)).streams
        rest = b.streams[1:].expand(moved[1:].shape)
        return a.with_streams(torch.cat([value.unsqueeze(0), moved[1:] + rest]))


_log_of_sum("logaddexp", math.e)
_log_of_sum("logaddexp2", 2.0)


def _times_log(name: str, shift: float) -> None:
    """Register x ln z with z = y + ``shift``: its derivatives are ln z in x, x / z and −x / z² in
    y, and 1 / z in both.

    As in torch they are 0 where x is 0 and z ≤ 0; and where z ≤ 0 and no tangent of y needs them.
    """
    function = getattr(torch.special, name)

    @jet_rule(name)
    def rule(input: Any, other: Any) -> JetTensor:
        value = function(primal_of(input), primal_of(other))
        layout = common_layout(input, other)
        cast: list[Any] = [lift(v, layout, value).to(value.dtype) for v in (input, other)]
        x, y = (v.with_streams(aligned(v, value.ndim)) for v in cast)
        z = wide(y.primal) + shift
        nothing = (x.primal == 0) & (z <= 0)
        tangents = function(x.streams[1:], y.primal).masked_fill(nothing, 0)
        needed = _moves(y) | (z > 0)
        inverse = (1 / torch.where(needed, z, 1)).masked_fill(~needed, 0)
        slope = wide(x.primal) * inverse
        in_y = push_forward(y, (value, slope, -slope * inverse)).streams
        out = torch.cat([value.unsqueeze(0), tangents + in_y[1:]])
        return JetTensor(_with_mixed(out, inverse, x, y), layout)


_times_log("xlogy", 0.0)
_times_log("xlog1py", 1.0)


# ---- complex numbers -------------------------------------------------------------------------
#
# All but the modulus and the angle are linear over the real numbers, so the same on every stream.
# `registry.COVERED` lists the other functions that take complex jets.


def _part(function: Callable, *others: Any) -> None:
    @jet_rule(function, *others)
    def rule(input: JetTensor) -> JetTensor:
        return input.with_streams(function(input.streams))


for _name in ("real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg"):
    _part(getattr(torch, _name), getattr(Tensor, _name, getattr(torch, _name)))
for _name in ("real", "imag"):
    _part(getattr(torch, _name), attribute(_name))
_part(torch.adjoint, "adjoint", attribute("mH"), attribute("H"))
_part(torch.view_as_real, "view_as_real")


@jet_rule("view_as_complex")
def view_as_complex(input: JetTensor) -> JetTensor:
    streams = input.streams
    *others, last = streams.stride()
    if last != 1 or any(stride % 2 for stride in (*others, streams.storage_offset())):
        # The streams lie an odd number of entries apart; writes into a copy would be lost.
        found = input.with_streams(torch.view_as_complex(streams.clone()))
        if input.jet_layout.run is not None:
            for jet in (input, found):
                note_memory(jet, input.jet_layout.run.expanded)
        return found
    return input.with_streams(torch.view_as_complex(streams))


@jet_rule("complex")
def complex_(real: Any, imag: Any) -> JetTensor:
    parts = torch.broadcast_tensors(real, imag)
    torch.complex(*(part[:0].detach() if part.ndim else part.detach() for part in parts))
    stacks, jet = lifted_streams(parts)
    return jet.with_streams(torch.complex(*stacks))


@jet_rule("polar")
def polar(abs: Any, angle: Any) -> Any:
    return torch.complex(abs * torch.cos(angle), abs * torch.sin(angle))


def _modulus(name: str) -> None:
    of_real = find_rule(getattr(Tensor, name))
    assert of_real is not None

    @jet_rule(name)
    def rule(input: JetTensor) -> Any:
        """Compute the modulus of complex numbers as a norm (`euclidean_norm`)."""
        if not input.dtype.is_complex:
            return of_real(input)
        return euclidean_norm(torch.view_as_real(input), -1)


for _name in ("abs", "absolute", "__abs__"):
    _modulus(_name)


def _angle(function: Callable) -> None:
    @jet_rule(function)
    def rule(input: JetTensor) -> Any:
        if not input.dtype.is_complex:
            return general_rule(function, "")(input)
        return torch.atan2(input.imag, input.real)


for _function in (torch.angle, Tensor.angle):
    _angle(_function)


def _steps(function: Callable) -> None:
    @jet_rule(function)
    def rule(*args: Any, **named: Any) -> Tensor:
        """Compute a constant between steps; torch has no backward of it."""
        plain = primal_of((args, named))
        args, named = replace_tensors(plain, Tensor.detach)
        return function(*args, **named)


for _function in spellings("floor_divide", "__floordiv__", "__rfloordiv__"):
    _steps(_function)


# ---- Fourier transforms ------------------------------------------------------------------------


def _transform(name: str, default: Any) -> None:
    function: Callable = getattr(torch.fft, name)
    size = "n" if isinstance(default, int) else "s"

    @jet_rule(function)
    def rule(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
        given = dict(zip((size, "dim", "norm"), args, strict=False)) | named
        sizes, dim = given.get(size), given.get("dim", default)
        if dim is None:
            dim = range(-(input.ndim if sizes is None else len(sizes)), 0)
        place: Any
        if isinstance(dim, int):
            place = behind_streams(dim, input.ndim)
        else:
            place = behind_streams_all(list(dim), input.ndim)
        return input.with_streams(function(input.streams, sizes, place, given.get("norm")))


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _transform(_name, -1)
    _transform(f"{_name}2", (-2, -1))
    _transform(f"{_name}n", None)


def _shift(function: Callable) -> None:
    @jet_rule(function)
    def rule(input: JetTensor, dim: Any = None) -> JetTensor:
        dims = range(-input.ndim, 0) if dim is None else varargs(dim)
        return input.with_streams(function(input.streams, behind_streams_all(dims, input.ndim)))


_shift(torch.fft.fftshift)
_shift(torch.fft.ifftshift)
