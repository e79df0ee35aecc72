"""Sums, products, quotients and powers of two tensors, either or both of them jets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import JetLayout
from ..registry import general_rule, jet_rule
from ..tensor import JetTensor, aligned, common_layout, primal_of, replace_primal
from .pointwise import push_forward
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
    primal = torch.pow(a.primal, n.primal)
    general: Any = torch.exp(n * torch.log(a))
    return general.with_streams(replace_primal(general.streams, primal))


def _power_of_jet(base: JetTensor, exponent: Any) -> JetTensor:
    """x^n: n x^(n−1), n (n−1) x^(n−2); a factor of zero wins over a negative power of zero."""
    x, n = base.primal, exponent
    value = torch.pow(x, n)
    n = n.to(value.dtype) if isinstance(n, Tensor) else n
    first, second = n - 1, n - 2
    if isinstance(n, Tensor):
        first = torch.where((n == 0) & (x == 0), 1, first)
        second = torch.where(((n == 0) | (n == 1)) & (x == 0), 1, second)
    else:
        first, second = (1 if n == 0 else first), (1 if n in (0, 1) else second)
    derivatives = (value, n * torch.pow(x, first), n * (n - 1) * torch.pow(x, second))
    ndim = max(x.ndim, n.ndim) if isinstance(n, Tensor) else x.ndim
    return push_forward(base.with_streams(aligned(base, ndim)), derivatives)


def _power_to_jet(base: Tensor, exponent: JetTensor) -> JetTensor:
    """b^y: b^y ln b, b^y (ln b)²; constant where b is 0."""
    value = torch.pow(base, exponent.primal)
    log = torch.where(base == 0, 1, base).to(value.dtype).log()
    ndim = max(base.ndim, exponent.ndim)
    widened = exponent.with_streams(aligned(exponent, ndim))
    return push_forward(widened, (value, value * log, value * log * log))


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
