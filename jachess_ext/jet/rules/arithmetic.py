"""Sums, products, quotients and powers of two tensors; complex numbers; Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ...torch_private import release
from ..engine.layout import replace_tensors
from ..engine.registry import Functions, attribute, general_rule, jet_rule, require_rule, spellings
from ..engine.strides import record_storage
from ..engine.tensor import JetTensor, align_streams, common_layout, lift, primal_of, to_tensor
from ..engine.types import Dims, Operand
from .pointwise import Derivatives, evaluate_in_float32, push_forward, wide
from .reduce import euclidean_norm
from .streamwise import add_to_primal, bilinear, lift_streams, stack_dims, varargs


def promote(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Cast both operands to their common dtype by torch's rules of type promotion.

    A plain 0-dimensional tensor keeps its dtype: torch uses its full precision beside float16.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype == b.dtype:
        return a, b
    dtype = torch.result_type(primal_of(a), primal_of(b))
    return _cast(a, dtype), _cast(b, dtype)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, JetTensor) or value.ndim else value


@jet_rule("add", "__add__", "__radd__")
def add(input: Operand, other: Operand, *, alpha: float = 1) -> JetTensor:
    if alpha != 1:
        other = other * alpha
    a, b = promote(input, other)
    layout = common_layout(a, b)
    if isinstance(a, JetTensor) and isinstance(b, JetTensor):
        ndim = max(a.ndim, b.ndim)
        return JetTensor(align_streams(a, ndim) + align_streams(b, ndim), layout)
    jet, addend = (a, b) if isinstance(a, JetTensor) else (cast(JetTensor, b), a)
    return JetTensor(add_to_primal(jet.streams, addend), layout)


@jet_rule("neg", "negative", "__neg__")
def neg(input: JetTensor) -> JetTensor:
    return input.with_streams(-input.streams)


@jet_rule("positive", "__pos__")
def positive(input: JetTensor) -> JetTensor:
    return input


@jet_rule("sub", "subtract", "__sub__")
def sub(input: Operand, other: Operand, *, alpha: float = 1) -> JetTensor:
    if torch.bool in (getattr(input, "dtype", None), getattr(other, "dtype", None)):
        torch.sub(primal_of(input), primal_of(other))  # raises torch's own error
    return add(input, other * -alpha)


@jet_rule("rsub", "__rsub__")
def rsub(input: Operand, other: Operand, *, alpha: float = 1) -> JetTensor:
    return sub(other, input, alpha=alpha)


@jet_rule("mul", "multiply", "__mul__", "__rmul__")
def mul(input: Operand, other: Operand) -> JetTensor:
    a, b = promote(input, other)
    jet, factor = (a, b) if isinstance(a, JetTensor) else (cast(JetTensor, b), a)
    if not isinstance(factor, Tensor) or (factor.ndim == 0 and not isinstance(factor, JetTensor)):
        return jet.with_streams(jet.streams * factor)
    return bilinear(torch.mul, jet, factor, ndim=max(jet.ndim, factor.ndim))


@jet_rule("div", "divide", "true_divide", "__truediv__", "__div__")
def div(input: Operand, other: Operand, *, rounding_mode: str | None = None) -> JetTensor:
    if rounding_mode is not None:
        rule = general_rule(torch.div, f"rounding_mode={rounding_mode!r} is not covered")
        return rule(input, other, rounding_mode=rounding_mode)
    a, b = promote(input, other)
    if isinstance(b, JetTensor):
        return JetTensor(_quotient(a, b), common_layout(a, b))
    jet = cast(JetTensor, a)
    if not isinstance(b, Tensor) or b.ndim == 0:
        return jet.with_streams(jet.streams / b)
    return bilinear(torch.div, jet, b, ndim=max(jet.ndim, b.ndim))


def _quotient(a: Operand, b: JetTensor) -> Tensor:
    """Compute y = a / b:  y_i = (a_i − y b_i) / b,
    y_ij = (a_ij − y_i b_j − y_j b_i − y b_ij) / b."""
    # Leibniz' rule for a = y b, solved for y_i and y_ij.  The usual terms in 1 / b² and 1 / b³ need
    # powers of b, which may overflow although y and its derivatives do not.
    layout = b.jet_layout
    ndim = max(b.ndim, a.ndim) if isinstance(a, Tensor) else b.ndim
    denominator = align_streams(b, ndim)
    primal = primal_of(a) / b.primal
    residual = -primal * denominator[1:]  # will be a_i − y b_i, and a_ij − y b_ij
    if isinstance(a, JetTensor):
        residual = residual + align_streams(a, ndim)[1:]
    first = residual[: layout.directions] / b.primal
    second = residual[layout.directions :]
    if layout.num_second:
        second = (second - layout.crossed(first, denominator[layout.first])) / b.primal
    return torch.cat([primal.unsqueeze(0), first, second])


@jet_rule("__rdiv__", "__rtruediv__")
def rdiv(self: JetTensor, other: Operand) -> JetTensor:
    return div(other, self)


@jet_rule("reciprocal")
def reciprocal(input: JetTensor) -> JetTensor:
    return div(1, input)


@jet_rule("addcmul")
def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    dtype = torch.addcmul(*primal_of((input, tensor1, tensor2))).dtype
    return input.to(dtype) + value * tensor1.to(dtype) * tensor2.to(dtype)


@jet_rule("addcdiv")
def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    dtype = torch.addcdiv(*primal_of((input, tensor1, tensor2))).dtype
    return input.to(dtype) + value * tensor1.to(dtype) / tensor2.to(dtype)


@jet_rule("lerp")
def lerp(input: Tensor, end: Tensor, weight: Operand) -> Tensor:
    return input + weight * (end - input)


@jet_rule("outer")
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input.unsqueeze(-1) * vec2


# ---- powers ------------------------------------------------------------------------------------


@jet_rule("pow", "__pow__")
def power(input: Operand, exponent: Operand) -> JetTensor:
    a, n = promote(input, exponent)
    if not isinstance(n, JetTensor):
        return _power_of_jet(cast(JetTensor, a), n)
    if not isinstance(a, JetTensor):
        return _power_to_jet(to_tensor(a, dtype=n.dtype, device=n.device), n)
    return _power_of_jets(a, n)


def _power_of_jet(base: JetTensor, n: Operand) -> JetTensor:
    x = base.primal
    ndim = max(x.ndim, n.ndim) if isinstance(n, Tensor) else x.ndim
    return push_forward(base.with_streams(align_streams(base, ndim)), _power_derivatives(x, n))


def _power_derivatives(x: Tensor, n: Operand) -> Derivatives:
    """Return x^n, n x^(n−1) and n (n−1) x^(n−2), for plain tensors x and n.

    Where a factor is 0 and the power infinite, their product is 0.
    """
    value = torch.pow(x, n)
    x, n = wide(x), wide(n.to(value.dtype)) if isinstance(n, Tensor) else n
    first, second = n - 1, n - 2
    # If n or n (n − 1) is 0, an exponent of 1 replaces n − 1 or n − 2: for x = 0, 0 · ∞ would be
    # NaN.
    if isinstance(n, Tensor):
        first = torch.where(n == 0, 1, first)
        second = torch.where((n == 0) | (n == 1), 1, second)
    else:
        first, second = (1 if n == 0 else first), (1 if n in (0, 1) else second)
    curvature = n * (n - 1) * torch.pow(_detach_steep_zeros(x, second), second)
    return value, n * torch.pow(x, first), curvature


def _detach_steep_zeros(x: Tensor, n: Operand) -> Tensor:
    """Detach the entries of x where x^n is 0 and its slope infinite (x = 0 and 0 < n < 1), so that
    the backward does not multiply a cotangent of 0 by the slope."""
    if x.is_complex() or isinstance(n, complex) or not (isinstance(n, Tensor) or 0 < n < 1):
        return x
    return torch.where((x == 0) & (n > 0) & (n < 1), x.detach(), x)


def _power_to_jet(base: Tensor, exponent: JetTensor) -> JetTensor:
    """Compute b^y for a plain base b and a jet y; its derivatives are 0 where b is 0."""
    value = torch.pow(base, exponent.primal)
    exponent = exponent.with_streams(align_streams(exponent, value.ndim))
    return _exponential(base.to(value.dtype), exponent, value)[0]


def _has_tangent(jet: JetTensor) -> Tensor:
    """Return a boolean mask of the primal's shape: whether any of an entry's tangents is not 0."""
    return (jet.streams[1:] != 0).any(0)


def _exponential(base: Tensor, exponent: JetTensor, value: Tensor) -> tuple[JetTensor, Tensor]:
    """Return two results: the jet of b^y for a jet y, from the derivatives b^y ln b and
    b^y (ln b)²; and ln b.

    ln b is set to 0 where b is 0, as in torch, and where b is negative and all tangents of y are 0.

    Args:
        value: b^y.
    """
    is_needed = _has_tangent(exponent) | ((wide(base).real > 0) & value.isfinite())
    log = torch.where((base != 0) & is_needed, wide(base), 1).log()
    power = torch.where(is_needed, wide(value), 0)
    return push_forward(exponent, (value, power * log, power * log * log)), log


def _power_of_jets(base: JetTensor, exponent: JetTensor) -> JetTensor:
    """Compute x^n for two jets; the mixed derivative is x^(n−1) (1 + n ln x)."""
    # f_x x_ij + f_xx x_i x_j is `base_terms`, f_n n_ij + f_nn n_i n_j is `exponent_terms`, and
    # `_add_mixed_terms` adds f_xn (x_i n_j + x_j n_i).  A derivative that is infinite or undefined
    # must not be multiplied by a tangent of 0, since the product would be NaN.
    ndim = max(base.ndim, exponent.ndim)
    base, exponent = (jet.with_streams(align_streams(jet, ndim)) for jet in (base, exponent))
    x, n = base.primal, exponent.primal
    value = torch.pow(x, n)
    with torch.no_grad():
        is_finite = torch.stack([*map(wide, _power_derivatives(x, n))]).isfinite().all(0)
    is_needed = _has_tangent(base)
    # Where all tangents are 0, use the exponent 1, whose derivatives are finite.
    _, slope, curvature = _power_derivatives(x, torch.where(is_needed | is_finite, n, 1))
    base_terms = push_forward(base, (value, slope, curvature))
    exponent_terms, log = _exponential(x, exponent, value)
    out = torch.cat([value.unsqueeze(0), base_terms.streams[1:] + exponent_terms.streams[1:]])
    # The mixed derivative is set to 0 where it is infinite and all tangents are 0, and at x = 0.
    mixed = wide(torch.where(x == 0, 1, x)) ** (n - 1) * (1 + n * log)
    is_zero = (x == 0) | ~((is_needed & _has_tangent(exponent)) | mixed.isfinite())
    mixed = mixed.masked_fill(is_zero, 0)
    out = _add_mixed_terms(out, mixed, base, exponent)
    # But at x = 0 with n = 0 or 1 it is infinite: the result is NaN for each pair of directions
    # with x_i n_j + x_j n_i ≠ 0.
    is_infinite = (x == 0) & ((n == 0) | (n == 1))
    nans = torch.zeros_like(mixed.detach()).masked_fill(is_infinite, math.nan)
    with torch.no_grad():
        has_no_mixed_term = (
            _add_mixed_terms(torch.zeros_like(out), torch.ones_like(mixed), base, exponent) == 0
        )
    return base.with_streams(out + nans.masked_fill(has_no_mixed_term, 0).to(out.dtype))


def _add_mixed_terms(streams: Tensor, mixed: Tensor, a: JetTensor, b: JetTensor) -> Tensor:
    """Add the terms ``mixed`` · (a_i b_j + a_j b_i) to the second-order streams.

    Args:
        mixed: the mixed derivative, of the primal's shape.
    """
    layout = a.jet_layout
    if not layout.num_second:
        return streams
    products = mixed * layout.crossed(a.streams[layout.first], b.streams[layout.first])
    q = layout.directions
    return torch.cat([streams[: 1 + q], streams[1 + q :] + products.to(streams.dtype)])


jet_rule("__rpow__")(lambda self, other: power(other, self))


@jet_rule("float_power")
def float_power(input: Operand, exponent: Operand) -> JetTensor:
    """Compute ``pow`` in float64, whatever the inputs' dtype."""
    base, n = (v.double() if isinstance(v, Tensor) else v for v in (input, exponent))
    return power(base, n)


# ---- extreme values ----------------------------------------------------------------------------


_FMAX_SPLITS_TIES = release(torch.__version__) >= (2, 14)


def register_extremum(name: str, is_better: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register ``maximum`` or ``minimum``, which return NaN if either argument is NaN, or ``fmax``
    or ``fmin``, which then return the other argument.

    Ties share the derivative equally, as in torch's autograd; before torch 2.14, for a tie ``fmax``
    and ``fmin`` take the derivative of ``input``.

    Args:
        is_better: `torch.gt` for a maximum, `torch.lt` for a minimum.
    """
    skips_nan = name.startswith("f")

    @jet_rule(name)
    def rule(input: Tensor, other: Tensor) -> Tensor:
        is_tie = input == other
        is_first = is_better(input, other) | torch.isnan(other if skips_nan else input)
        if skips_nan and not _FMAX_SPLITS_TIES:
            return torch.where(is_first | is_tie, input, other)
        better, worse = torch.where(is_first, input, other), torch.where(is_first, other, input)
        return torch.where(is_tie, 0.5 * better + 0.5 * worse, better)


for _name, _is_better in (("max", torch.gt), ("min", torch.lt)):
    register_extremum(f"{_name}imum", _is_better)
    register_extremum(f"f{_name}", _is_better)


@jet_rule("atan2", "arctan2")
def atan2(input: Tensor, other: Tensor) -> JetTensor:
    """Compute atan2(y, x) with the derivatives of atan(y / x), or of −atan(x / y) where |y| > |x|;
    at the origin they are 0, as in torch's autograd."""
    value = torch.atan2(primal_of(input), primal_of(other))
    is_steep = input.abs() > other.abs()
    is_origin = (input == 0) & (other == 0)
    numerator = torch.where(is_steep, -other, input).masked_fill(is_origin, 0)
    denominator = torch.where(is_steep, input, other).masked_fill(is_origin, 1)
    # This angle differs from atan2 by a constant, so that the tangents are the same.
    angle = cast(JetTensor, torch.atan(numerator / denominator))
    streams = [value.unsqueeze(0), angle.streams[1:].to(value.dtype)]
    return angle.with_streams(torch.cat(streams))


# ---- logarithms of sums ------------------------------------------------------------------------


def register_logaddexp(name: str, base: float) -> None:
    """Register log_b(b^x + b^y).

    Its first and second derivatives by d = x − y are σ(d ln b) and ln b σ(d ln b) σ(−d ln b); d
    counts as 0 if x and y are the same infinity.
    """
    scale = math.log(base)

    @jet_rule(name)
    def rule(input: Tensor, other: Tensor) -> JetTensor:
        x, y = promote(input, other)
        value = getattr(torch, name)(primal_of(x), primal_of(y))
        layout = common_layout(x, y)
        a, b = (JetTensor(align_streams(lift(v, layout), value.ndim), layout) for v in (x, y))
        gap = torch.where((a.primal == b.primal) & a.primal.isinf(), 0, a.primal - b.primal)
        tangents = a.streams[1:] - b.streams[1:]
        difference = a.with_streams(torch.cat([gap.unsqueeze(0), tangents]))

        def derivatives(gap: Tensor) -> Derivatives:
            slope, complement = torch.sigmoid(scale * gap), torch.sigmoid(-scale * gap)
            return value, slope, scale * slope * complement

        # log(b^x + b^y) = y + log(1 + b^d): its tangents are those of y and of a function of d.
        shift = push_forward(difference, evaluate_in_float32(gap, derivatives)).streams[1:]
        tangents = shift + b.streams[1:].expand(shift.shape)
        return a.with_streams(torch.cat([value.unsqueeze(0), tangents]))


register_logaddexp("logaddexp", math.e)
register_logaddexp("logaddexp2", 2.0)


def register_xlogy(name: str, shift: float) -> None:
    """Register x ln z with z = y + ``shift``.

    Its derivative by x is ln z, its first and second derivatives by y are x / z and −x / z², and
    its mixed derivative is 1 / z.  As in torch, all are 0 where x = 0 and z ≤ 0.  The derivatives
    by y and the mixed derivative are also 0 where z ≤ 0 and all tangents of y are 0: they are only
    multiplied by these tangents.
    """
    function = getattr(torch.special, name)

    @jet_rule(name)
    def rule(input: Operand, other: Operand) -> JetTensor:
        value = function(primal_of(input), primal_of(other))
        layout = common_layout(input, other)
        stacks = (align_streams(lift(v, layout, value), value.ndim) for v in (input, other))
        x, y = (JetTensor(stack.to(value.dtype), layout) for stack in stacks)
        z = wide(y.primal) + shift
        is_zero = (x.primal == 0) & (z <= 0)
        tangents = function(x.streams[1:], y.primal).masked_fill(is_zero, 0)
        is_needed = _has_tangent(y) | (z > 0)
        inverse = (1 / torch.where(is_needed, z, 1)).masked_fill(~is_needed, 0)
        slope = wide(x.primal) * inverse
        other_terms = push_forward(y, (value, slope, -slope * inverse)).streams
        out = torch.cat([value.unsqueeze(0), tangents + other_terms[1:]])
        return JetTensor(_add_mixed_terms(out, inverse, x, y), layout)


register_xlogy("xlogy", 0.0)
register_xlogy("xlog1py", 1.0)


# ---- complex numbers -------------------------------------------------------------------------
#
# All but the modulus and the angle are linear over the real numbers, and applied to every stream.
# `complex_rules.COVERED` lists the other functions that take complex jets.


def register_real_linear(function: Callable[[Tensor], Tensor], *other_names: Functions) -> None:
    """Register a function that is linear over the real numbers; its rule applies it to every
    stream."""

    @jet_rule(function, *other_names)
    def rule(input: JetTensor) -> JetTensor:
        return input.with_streams(function(input.streams))


for _name in ("real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg"):
    register_real_linear(getattr(torch, _name), getattr(Tensor, _name, getattr(torch, _name)))
for _name in ("real", "imag"):
    register_real_linear(getattr(torch, _name), attribute(_name))
register_real_linear(torch.adjoint, "adjoint", attribute("mH"), attribute("H"))
register_real_linear(torch.view_as_real, "view_as_real")


@jet_rule("view_as_complex")
def view_as_complex(input: JetTensor) -> JetTensor:
    streams = input.streams
    *outer, last = streams.stride()
    if last != 1 or any(stride % 2 for stride in (*outer, streams.storage_offset())):
        # No complex view has an odd stride, which the stack has here, so it is copied.  Torch's
        # result is a view: writes into the original or the copy are refused, as the other would
        # miss them.
        copy = input.with_streams(torch.view_as_complex(streams.clone()))
        if input.jet_layout.jet_pass is not None:
            for jet in (input, copy):
                record_storage(jet, input.jet_layout.jet_pass.overlapping)
        return copy
    return input.with_streams(torch.view_as_complex(streams))


@jet_rule("complex")
def complex_(real: Tensor, imag: Tensor) -> JetTensor:
    pair = torch.broadcast_tensors(real, imag)
    # Call torch's function on empty tensors, for its errors about dtypes.
    torch.complex(*(x[:0].detach() if x.ndim else x.detach() for x in pair))
    stacks, jet = lift_streams(pair)
    return jet.with_streams(torch.complex(*stacks))


@jet_rule("polar")
def polar(abs: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(abs * torch.cos(angle), abs * torch.sin(angle))


_real_abs = require_rule(torch.abs)


@jet_rule("abs", "absolute", "__abs__")
def modulus(input: JetTensor) -> Tensor:
    """Compute the modulus; for complex numbers by `euclidean_norm`."""
    if not input.dtype.is_complex:
        return _real_abs(input)
    return euclidean_norm(torch.view_as_real(input), -1)


@jet_rule("angle")
def angle(input: JetTensor) -> Tensor:
    if not input.dtype.is_complex:
        return general_rule(torch.angle, "")(input)
    return torch.atan2(input.imag, input.real)


def register_step_function(function: Callable[..., Tensor]) -> None:
    """Register a piecewise constant function; its rule calls it on detached primals."""

    @jet_rule(function)
    def rule(*args: object, **kwargs: object) -> Tensor:
        args, kwargs = replace_tensors(primal_of((args, kwargs)), Tensor.detach)
        return function(*args, **kwargs)


for _function in spellings("floor_divide", "__floordiv__", "__rfloordiv__"):
    register_step_function(_function)


# ---- Fourier transforms ------------------------------------------------------------------------


def register_fourier_transform(name: str, default: Dims) -> None:
    """Register a Fourier transform.

    Args:
        default: the default of its argument ``dim``; None means all dimensions.
    """
    function: Callable[..., Tensor] = getattr(torch.fft, name)

    @jet_rule(function)
    def rule(
        input: JetTensor,
        n: Dims = None,
        dim: Dims = default,
        norm: str | None = None,
        s: Dims = None,
    ) -> JetTensor:
        # The argument of the size is ``n`` for one dimension, ``s`` for several.
        size = n if s is None else s
        if dim is None:
            dim = range(-(len(size) if isinstance(size, Sequence) else input.ndim), 0)
        dims = stack_dims([dim] if isinstance(dim, int) else dim, input.ndim)
        stack_axes = dims[0] if isinstance(dim, int) else dims
        return input.with_streams(function(input.streams, size, stack_axes, norm))


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    register_fourier_transform(_name, -1)
    register_fourier_transform(f"{_name}2", (-2, -1))
    register_fourier_transform(f"{_name}n", None)


def register_fourier_shift(function: Callable[[Tensor, Sequence[int]], Tensor]) -> None:
    """Register ``fftshift`` or ``ifftshift``."""

    @jet_rule(function)
    def rule(input: JetTensor, dim: Dims = None) -> JetTensor:
        dims = range(-input.ndim, 0) if dim is None else varargs(dim)
        return input.with_streams(function(input.streams, stack_dims(dims, input.ndim)))


register_fourier_shift(torch.fft.fftshift)
register_fourier_shift(torch.fft.ifftshift)
