"""Functions applied element by element: y_i = f' x_i, y_ij = f' x_ij + f'' x_i x_j (spec 03).

To add one, write a function of x that returns ``(f, f', f'')`` and decorate it with `pointwise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ..registry import jet_rule, missing_rule
from ..settings import operators_enabled
from ..tensor import JetTensor, aligned
from .streamwise import add_to_primal, bilinear

Derivatives = tuple[Tensor, Tensor, Tensor]


def push_forward(jet: JetTensor, derivatives: Derivatives) -> JetTensor:
    """The jet of f(x), from ``(f, f', f'')`` at the primal; each of the primal's shape."""
    value, slope, curvature = derivatives
    layout, streams = jet.jet_layout, jet.streams
    tangents = slope * streams[1:]
    if not layout.pairs:
        return jet.with_streams(torch.cat([value.unsqueeze(0), tangents]))
    products = torch.stack([streams[i] * streams[j] for i, j, _ in layout.pair_streams()])
    q = layout.directions
    second = tangents[q:] + curvature * products
    return jet.with_streams(torch.cat([value.unsqueeze(0), tangents[:q], second]))


def pointwise(*names: str) -> Callable[[Callable[..., Derivatives]], Callable[..., Derivatives]]:
    """Register a function ``x -> (f, f', f'')`` as the rule of the torch functions ``names``."""

    def register(derivatives: Callable[..., Derivatives]) -> Callable[..., Derivatives]:
        @jet_rule(*names)
        def rule(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
            return push_forward(input, derivatives(input.primal, *args, **named))

        return derivatives

    return register


def with_operator(
    kind: str, jet: JetTensor, composed: Callable[[Tensor], Derivatives]
) -> JetTensor:
    """The compiled activation operator where there is one, the composed rule otherwise."""
    if operators_enabled() and ops.available("activation_jet", jet.device):
        q = jet.jet_layout.directions
        return jet.with_streams(ops.activation_jet(jet.streams, kind, q))
    return push_forward(jet, composed(jet.primal))


# ---- activations -------------------------------------------------------------------------------


def _gelu_erf(x: Tensor) -> Derivatives:
    """x Φ(x); f' = Φ + x φ; f'' = (2 − x²) φ."""
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * cdf, cdf + x * pdf, (2 - x * x) * pdf


def _gelu_tanh(x: Tensor) -> Derivatives:
    """½ x (1 + tanh g), g = √(2/π) (x + 0.044715 x³)."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (x + cubic * x**3))
    g1 = scale * (1 + 3 * cubic * x * x)
    g2 = scale * 6 * cubic * x
    t1 = (1 - t * t) * g1
    t2 = (1 - t * t) * (g2 - 2 * t * g1 * g1)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * t1, t1 + 0.5 * x * t2


@jet_rule("gelu")
def gelu(input: JetTensor, approximate: str = "none") -> JetTensor:
    if approximate == "none":
        return with_operator("gelu", input, _gelu_erf)
    return with_operator("gelu_tanh", input, _gelu_tanh)


@pointwise("sigmoid")
def sigmoid(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    s1 = s * (1 - s)
    return s, s1, s1 * (1 - 2 * s)


@pointwise("silu")
def silu(x: Tensor, inplace: bool = False) -> Derivatives:
    s, s1, s2 = sigmoid(x)
    return x * s, s + x * s1, 2 * s1 + x * s2


@pointwise("tanh")
def tanh(x: Tensor) -> Derivatives:
    t = torch.tanh(x)
    t1 = 1 - t * t
    return t, t1, -2 * t * t1


@pointwise("relu")
def relu(x: Tensor, inplace: bool = False) -> Derivatives:
    return torch.relu(x), (x > 0).to(x.dtype), torch.zeros_like(x)


@pointwise("leaky_relu")
def leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Derivatives:
    slope = torch.where(x > 0, 1.0, negative_slope).to(x.dtype)
    return x * slope, slope, torch.zeros_like(x)


@pointwise("elu")
def elu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Derivatives:
    exponential = alpha * torch.exp(x.clamp(max=0))
    curvature = torch.where(x > 0, torch.zeros_like(x), exponential)
    return F.elu(x, alpha), torch.where(x > 0, torch.ones_like(x), exponential), curvature


@pointwise("softplus")
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Derivatives:
    s, s1, _ = sigmoid(beta * x)
    linear = beta * x > threshold
    slope = torch.where(linear, torch.ones_like(s), s)
    return (
        F.softplus(x, beta, threshold),
        slope,
        torch.where(linear, torch.zeros_like(s), beta * s1),
    )


@pointwise("mish")
def mish(x: Tensor, inplace: bool = False) -> Derivatives:
    """x tanh(softplus(x))."""
    t, t1, t2 = tanh(F.softplus(x))
    s, s1, _ = sigmoid(x)
    slope, curvature = t1 * s, t2 * s * s + t1 * s1
    return x * t, t + x * slope, 2 * slope + x * curvature


@pointwise("logsigmoid")
def logsigmoid(x: Tensor) -> Derivatives:
    s, s1, _ = sigmoid(x)
    return F.logsigmoid(x), 1 - s, -s1


# ---- elementary functions ----------------------------------------------------------------------


@pointwise("exp")
def exp(x: Tensor) -> Derivatives:
    e = torch.exp(x)
    return e, e, e


@pointwise("expm1")
def expm1(x: Tensor) -> Derivatives:
    e = torch.exp(x)
    return torch.expm1(x), e, e


@pointwise("log")
def log(x: Tensor) -> Derivatives:
    inverse = 1 / x
    return torch.log(x), inverse, -inverse * inverse


@pointwise("log1p")
def log1p(x: Tensor) -> Derivatives:
    inverse = 1 / (1 + x)
    return torch.log1p(x), inverse, -inverse * inverse


@pointwise("sqrt")
def sqrt(x: Tensor) -> Derivatives:
    root = torch.sqrt(x)
    return root, 0.5 / root, -0.25 / (root * x)


@pointwise("rsqrt")
def rsqrt(x: Tensor) -> Derivatives:
    r = torch.rsqrt(x)
    return r, -0.5 * r / x, 0.75 * r / (x * x)


@pointwise("reciprocal")
def reciprocal(x: Tensor) -> Derivatives:
    r = 1 / x
    return r, -r * r, 2 * r * r * r


@pointwise("square")
def square(x: Tensor) -> Derivatives:
    return x * x, 2 * x, torch.full_like(x, 2)


@pointwise("sin")
def sin(x: Tensor) -> Derivatives:
    s = torch.sin(x)
    return s, torch.cos(x), -s


@pointwise("cos")
def cos(x: Tensor) -> Derivatives:
    c = torch.cos(x)
    return c, -torch.sin(x), -c


@pointwise("erf")
def erf(x: Tensor) -> Derivatives:
    slope = 2 / math.sqrt(math.pi) * torch.exp(-x * x)
    return torch.erf(x), slope, -2 * x * slope


@pointwise("abs", "absolute", "__abs__")
def abs_(x: Tensor) -> Derivatives:
    return x.abs(), x.sign(), torch.zeros_like(x)


@pointwise("clamp", "clip")
def clamp(x: Tensor, min: Any = None, max: Any = None) -> Derivatives:
    value = torch.clamp(x, min, max)
    return value, (value == x).to(x.dtype), torch.zeros_like(x)


@pointwise("clamp_min")
def clamp_min(x: Tensor, min: Any) -> Derivatives:
    return clamp(x, min=min)


@pointwise("clamp_max")
def clamp_max(x: Tensor, max: Any) -> Derivatives:
    return clamp(x, max=max)


@pointwise("nan_to_num")
def nan_to_num(x: Tensor, *args: Any, **named: Any) -> Derivatives:
    return torch.nan_to_num(x, *args, **named), torch.isfinite(x).to(x.dtype), torch.zeros_like(x)


def _power(x: Tensor, exponent: float) -> Derivatives:
    """x^n; the factors n and n (n − 1) vanish before x is raised to a negative power at 0."""
    n = exponent
    slope = torch.zeros_like(x) if n == 0 else n * x ** (n - 1)
    curvature = torch.zeros_like(x) if n in (0, 1) else n * (n - 1) * x ** (n - 2)
    return x**n, slope, curvature


@jet_rule("pow", "__pow__", "float_power")
def power(input: Any, exponent: Any) -> JetTensor:
    if not isinstance(exponent, torch.Tensor):
        return push_forward(input, _power(input.primal, exponent))
    if isinstance(input, JetTensor):  # a tensor exponent, perhaps a jet: x^y = exp(y log x)
        return torch.exp(exponent * torch.log(input))  # type: ignore[return-value]
    return torch.exp(
        exponent * math.log(input) if not isinstance(input, Tensor) else exponent * input.log()
    )  # type: ignore[return-value]


jet_rule("__rpow__")(lambda self, other: power(other, self))


# ---- sums and products of two tensors ----------------------------------------------------------


@jet_rule("add", "__add__", "__radd__")
def add(input: Any, other: Any, *, alpha: float = 1) -> JetTensor:
    if alpha != 1:
        other = other * alpha
    if isinstance(input, JetTensor) and isinstance(other, JetTensor):
        ndim = max(input.ndim, other.ndim)
        return input.with_streams(aligned(input, ndim) + aligned(other, ndim))
    if not isinstance(input, JetTensor):
        input, other = other, input
    return input.with_streams(add_to_primal(input.streams, other))


@jet_rule("neg", "negative", "__neg__")
def neg(input: JetTensor) -> JetTensor:
    return input.with_streams(-input.streams)


@jet_rule("positive", "__pos__")
def positive(input: JetTensor) -> JetTensor:
    return input


@jet_rule("sub", "subtract", "__sub__")
def sub(input: Any, other: Any, *, alpha: float = 1) -> JetTensor:
    return add(input, other * -alpha)


@jet_rule("rsub", "__rsub__")
def rsub(input: Any, other: Any, *, alpha: float = 1) -> JetTensor:
    return sub(other, input, alpha=alpha)


@jet_rule("mul", "multiply", "__mul__", "__rmul__")
def mul(input: Any, other: Any) -> JetTensor:
    if not isinstance(input, JetTensor):
        input, other = other, input
    if not isinstance(other, Tensor):
        return input.with_streams(input.streams * other)
    return bilinear(torch.mul, input, other, ndim=max(input.ndim, other.ndim))


@jet_rule("div", "divide", "true_divide", "__truediv__", "__div__")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> JetTensor:
    if rounding_mode is not None:
        raise missing_rule(torch.div, f"rounding_mode={rounding_mode!r} has no derivative")
    if isinstance(other, JetTensor):
        return mul(input, torch.reciprocal(other))
    if not isinstance(other, Tensor):
        return input.with_streams(input.streams / other)
    return bilinear(torch.div, input, other, ndim=max(input.ndim, other.ndim))


@jet_rule("__rdiv__", "__rtruediv__")
def rdiv(self: JetTensor, other: Any) -> JetTensor:
    return div(other, self)


@jet_rule("addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> JetTensor:
    return input + value * tensor1 * tensor2


@jet_rule("maximum")
def maximum(input: Any, other: Any) -> JetTensor:
    return torch.where(input > other, input, other)  # type: ignore[return-value]


@jet_rule("minimum")
def minimum(input: Any, other: Any) -> JetTensor:
    return torch.where(input < other, input, other)  # type: ignore[return-value]
