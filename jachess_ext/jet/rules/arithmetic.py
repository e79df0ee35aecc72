"""Sums, products, quotients and powers of two tensors, either or both of them jets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..layout import JetLayout
from ..registry import general_rule, jet_rule
from ..tensor import JetTensor, aligned, common_layout, lift, primal_of
from .pointwise import Derivatives, in_float32, push_forward
from .streamwise import add_to_primal, bilinear


def promoted(a: Any, b: Any) -> tuple[Any, Any]:
    """Both in the dtype torch would compute in, which depends on the primals' dimensions.

    A plain scalar tensor is left as it is: torch, too, keeps its precision beside a half.
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
    """y = a / b:  y_i = (a_i − y b_i) / b,  y_ij = (a_ij − y_i b_j − y_j b_i − y b_ij) / b."""
    layout = b.jet_layout
    ndim = max(b.ndim, a.ndim) if isinstance(a, Tensor) else b.ndim
    numerator = aligned(a, ndim)[1:] if isinstance(a, JetTensor) else None
    below = aligned(b, ndim)
    primal = primal_of(a) / b.primal
    tangents = -primal * below[1:]
    tangents = tangents if numerator is None else tangents + numerator
    first = tangents[: layout.directions] / b.primal
    second = _quotient_second(tangents[layout.directions :], first, below, layout)
    return torch.cat([primal.unsqueeze(0), first, *[s / b.primal for s in second]])


def _quotient_second(rest: Tensor, first: Tensor, below: Tensor, layout: JetLayout) -> list[Tensor]:
    """The numerators of y_ij, ``[1, ...]`` each; ``rest`` holds a_ij − y b_ij."""
    return [
        rest[p : p + 1] - first[i - 1 : i] * below[j : j + 1] - first[j - 1 : j] * below[i : i + 1]
        for p, (i, j, _) in enumerate(layout.pair_streams())
    ]


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
        return _power_to_jet(torch.as_tensor(a, dtype=n.dtype, device=n.device), n)
    return _power_of_jets(a, n)


def _power_of_jet(base: JetTensor, exponent: Any) -> JetTensor:
    x, n = base.primal, exponent
    ndim = max(x.ndim, n.ndim) if isinstance(n, Tensor) else x.ndim
    return push_forward(base.with_streams(aligned(base, ndim)), _power_derivatives(x, n))


def _power_derivatives(x: Tensor, n: Any) -> Derivatives:
    """x^n: n x^(n−1), n (n−1) x^(n−2); a factor of zero wins over a negative power of zero."""
    value = torch.pow(x, n)
    n = n.to(value.dtype) if isinstance(n, Tensor) else n
    first, second = n - 1, n - 2
    if isinstance(n, Tensor):
        first = torch.where((n == 0) & (x == 0), 1, first)
        second = torch.where(((n == 0) | (n == 1)) & (x == 0), 1, second)
    else:
        first, second = (1 if n == 0 else first), (1 if n in (0, 1) else second)
    return value, n * torch.pow(x, first), n * (n - 1) * torch.pow(x, second)


def _power_to_jet(base: Tensor, exponent: JetTensor) -> JetTensor:
    """b^y: b^y ln b, b^y (ln b)²; constant where b is 0."""
    value = torch.pow(base, exponent.primal)
    widened = exponent.with_streams(aligned(exponent, value.ndim))
    log = _log_of_base(base.to(value.dtype), widened)
    return push_forward(widened, (value, value * log, value * log * log))


def _log_of_base(base: Tensor, exponent: JetTensor) -> Tensor:
    """ln b for the derivatives in the exponent of b^y: 0 where b is 0, as in torch, and where no
    tangent of y asks for it, such as of a negative b."""
    asked = (exponent.streams[1:] != 0).any(0)
    return torch.where((base != 0) & (asked | (base > 0)), base, 1).log()


def _power_of_jets(base: JetTensor, exponent: JetTensor) -> JetTensor:
    """x^n as a function of both: the derivatives in x, in n (with l = ln x) and in both,
    x^(n−1) (1 + n l)."""
    ndim = max(base.ndim, exponent.ndim)
    base, exponent = (jet.with_streams(aligned(jet, ndim)) for jet in (base, exponent))
    x, n = base.primal, exponent.primal
    value, slope, curvature = _power_derivatives(x, n)
    log = _log_of_base(x, exponent)
    in_x = push_forward(base, (value, slope, curvature)).streams
    in_n = push_forward(exponent, (value, value * log, value * log * log)).streams
    tangents = list((in_x + in_n)[1:])
    # Where x^(n−1) is infinite, a tangent of zero keeps it out.
    mixed = torch.where((x == 0) & (n < 1), 0, torch.where((x == 0) & (n < 1), 1, x) ** (n - 1))
    mixed = mixed * (1 + n * log)
    for i, j, ij in base.jet_layout.pair_streams():
        a, b = base.streams, exponent.streams
        tangents[ij - 1] = tangents[ij - 1] + mixed * (a[i] * b[j] + a[j] * b[i])
    return base.with_streams(torch.stack([value, *tangents]))


jet_rule("__rpow__")(lambda self, other: power(other, self))


@jet_rule("float_power")
def float_power(input: Any, exponent: Any) -> JetTensor:
    """``pow`` in float64, whatever the inputs' dtype."""
    base, n = (v.double() if isinstance(v, Tensor) else v for v in (input, exponent))
    return power(base, n)


# ---- extreme values ----------------------------------------------------------------------------


@jet_rule("maximum")
def maximum(input: Any, other: Any) -> JetTensor:
    """Ties follow ``other``; NaN on either side stays."""
    return torch.where((input > other) | torch.isnan(input), input, other)  # type: ignore[return-value]


@jet_rule("minimum")
def minimum(input: Any, other: Any) -> JetTensor:
    return torch.where((input < other) | torch.isnan(input), input, other)  # type: ignore[return-value]


# ---- logarithms of sums ------------------------------------------------------------------------


def _log_of_sum(name: str, base: float) -> None:
    """log_b(b^x + b^y): the derivatives in d = x − y are σ(d ln b) and ln b σ(d ln b) σ(−d ln b).

    Neither is asked for the difference of two infinities, or for x where y is −∞.
    """
    scale = math.log(base)

    @jet_rule(name)
    def rule(input: Any, other: Any) -> JetTensor:
        a, b = promoted(input, other)
        value = getattr(torch, name)(primal_of(a), primal_of(b))
        a, b = (lift(v, common_layout(a, b)) for v in (a, b))
        a, b = (v.with_streams(aligned(v, value.ndim)) for v in (a, b))
        equal = a.primal == b.primal
        gap = torch.where(equal, 0, a.primal - b.primal)
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


@jet_rule("xlogy")
def xlogy(input: Any, other: Any) -> Any:
    """x ln y, linear in x; 0 where x is 0 and y no positive number, as in torch."""
    if isinstance(other, JetTensor):
        return general_rule(torch.xlogy, "the logarithm's argument carries derivatives")(
            input, other
        )
    value = torch.xlogy(input.primal, other)
    input = input.with_streams(aligned(input, value.ndim))
    at = torch.as_tensor(other, device=value.device)
    nothing = (input.primal == 0) & (at <= 0)
    tangents = torch.xlogy(input.streams[1:], other).masked_fill(nothing, 0)
    return input.with_streams(torch.cat([value.unsqueeze(0), tangents]))
