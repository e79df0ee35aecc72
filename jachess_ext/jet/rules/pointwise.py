"""Functions applied element by element: y_i = f' x_i, y_ij = f' x_ij + f'' x_i x_j.

To add one, write a function of x that returns ``(f, f', f'')`` and decorate it with `pointwise`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ... import ops
from ...ops.activation import (
    DERIVATIVES,
    Derivatives,
    elu_derivatives,
    pointwise_jet,
    softplus_derivatives,
)
from ...ops.library import wide as wide
from ...torch_private import functional as F
from ..engine.errors import missing_rule
from ..engine.registry import jet_rule, require_rule, spellings
from ..engine.tensor import JetTensor, align_streams
from .patterns import Activated, defer, fusable
from .streamwise import write_in_place


def push_forward(jet: JetTensor, derivatives: Derivatives) -> JetTensor:
    """Return the jet of f(x).

    Args:
        jet: x.
        derivatives: ``(f, f', f'')`` at the primal, of its shape; float32 for 16-bit jets if their
            range needs it.
    """
    ndim = derivatives[0].ndim
    if ndim > jet.ndim:  # broadcast with another argument, such as the bound of a clamp
        jet = jet.with_streams(align_streams(jet, ndim))
    return jet.with_streams(pointwise_jet(derivatives, jet.streams, jet.jet_layout))


def is_half(x: Tensor) -> bool:
    """Return whether a tensor has a 16-bit floating-point dtype."""
    return x.dtype in (torch.float16, torch.bfloat16)


def evaluate_in_float32(x: Tensor, derivatives: Callable[[Tensor], Derivatives]) -> Derivatives:
    """Return ``derivatives(x)``, computed in float32 for 16-bit dtypes, in which terms such as
    1 − t² would cancel."""
    if not is_half(x):
        return derivatives(x)
    value, slope, curvature = derivatives(x.float())
    return value.to(x.dtype), slope, curvature


def pointwise(*names: str) -> Callable[[Callable[..., Derivatives]], Callable[..., Derivatives]]:
    """Decorate a function ``x -> (f, f', f'')`` to register it as the rule of the torch functions
    ``names``.

    The function also has the torch function's other arguments; the rule handles ``inplace``.

    Examples:
        >>> @pointwise("cosh")
        ... def cosh(x):
        ...     return torch.cosh(x), torch.sinh(x), torch.cosh(x)
    """

    def register(derivatives: Callable[..., Derivatives]) -> Callable[..., Derivatives]:
        function = spellings(names[0])[0]
        _, *parameters = inspect.signature(derivatives).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in parameters}

        @jet_rule(*names)
        def rule(input: JetTensor, *args: object, **kwargs: object) -> JetTensor:
            options = dict(zip(defaults, args, strict=False)) | kwargs
            if not isinstance(input, JetTensor) or any(
                isinstance(option, JetTensor) for option in (*args, *kwargs.values())
            ):
                raise missing_rule(function, "only its first argument may be a jet")
            inplace = options.pop("inplace", False)
            # A write in place gets a clone: autograd saves the argument of the formula, and the
            # result is written into the storage of the input.
            jet = input.with_streams(input.streams.clone()) if inplace else input
            if names[0] in ops.ACTIVATION_KINDS and all(
                value == defaults.get(name) for name, value in options.items()
            ):
                out = apply_activation(names[0], jet, derivatives)
            else:
                triple = evaluate_in_float32(jet.primal, lambda x: derivatives(x, *args, **kwargs))
                out = push_forward(jet, triple)
            return write_in_place(input, out) if inplace else out

        return derivatives

    return register


def apply_activation(
    kind: str, jet: JetTensor, formula: Callable[[Tensor], Derivatives]
) -> JetTensor:
    """Compute an activation by the compiled operator, or by its formula if there is no operator.

    The operator is deferred, so that a product with another jet can become a gated activation.

    Args:
        kind: the name of the activation in `ops.ACTIVATION_KINDS`.
        formula: the formula, ``x -> (f, f', f'')``.
    """
    if fusable("activation_jet", jet):

        def operator(jet: JetTensor) -> JetTensor:
            layout = jet.jet_layout
            return jet.with_streams(
                ops.activation_jet(jet.streams, kind, layout.directions, layout.squares)
            )

        return defer(Activated(jet, kind), operator, (jet,), {}, jet)
    return push_forward(jet, evaluate_in_float32(jet.primal, formula))


# ---- activations -------------------------------------------------------------------------------


def register_activation(name: str) -> Callable[..., Derivatives]:
    """Register the rule of an activation function that has a compiled operator."""

    @pointwise(name)
    def derivatives(x: Tensor, inplace: bool = False) -> Derivatives:
        return DERIVATIVES[name](x)

    return derivatives


sigmoid, silu, tanh, relu = map(register_activation, ("sigmoid", "silu", "tanh", "relu"))
mish, sin, cos, exp = map(register_activation, ("mish", "sin", "cos", "exp"))
softplus = pointwise("softplus")(softplus_derivatives)


@jet_rule("gelu")
def gelu(input: JetTensor, approximate: str = "none") -> JetTensor:
    kind = "gelu" if approximate == "none" else "gelu_tanh"
    return apply_activation(kind, input, DERIVATIVES[kind])


@pointwise("leaky_relu")
def leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Derivatives:
    ones = torch.ones_like(x)  # `where` of two Python numbers would be float32
    slope = torch.where(x > 0, ones, negative_slope)
    return F.leaky_relu(x, negative_slope), slope, torch.zeros_like(x)


@pointwise("elu")
def elu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Derivatives:
    return elu_derivatives(x, alpha)


@pointwise("selu")
def selu(x: Tensor, inplace: bool = False) -> Derivatives:
    """Compute λ elu(x, α), with the constants of Klambauer et al. 2017."""
    scale = 1.0507009873554804934193349852946
    _, slope, curvature = elu(x, 1.6732632423543772848170429916717)
    return F.selu(x), scale * slope, scale * curvature


@pointwise("celu")
def celu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Derivatives:
    slope = torch.exp(x.clamp(max=0) / alpha)  # for x < 0; else the slope is 1
    return F.celu(x, alpha), slope.masked_fill(x > 0, 1), (slope / alpha).masked_fill(x > 0, 0)


@pointwise("softsign")
def softsign(x: Tensor) -> Derivatives:
    """Compute x / (1 + |x|)."""
    inverse = 1 / (1 + x.abs())
    return F.softsign(x), inverse * inverse, -2 * x.sign() * inverse**3


@pointwise("hardtanh")
def hardtanh(
    x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Derivatives:
    is_inside = (x > min_val) & (x < max_val)
    return F.hardtanh(x, min_val, max_val), is_inside.to(x.dtype), torch.zeros_like(x)


@pointwise("relu6")
def relu6(x: Tensor, inplace: bool = False) -> Derivatives:
    return hardtanh(x, 0.0, 6.0)


@pointwise("hardsigmoid")
def hardsigmoid(x: Tensor, inplace: bool = False) -> Derivatives:
    is_inside = ((x > -3) & (x < 3)).to(x.dtype)
    return F.hardsigmoid(x), is_inside / 6, torch.zeros_like(x)


@pointwise("hardswish")
def hardswish(x: Tensor, inplace: bool = False) -> Derivatives:
    """Compute x hardsigmoid(x)."""
    _, slope, _ = hardsigmoid(x)
    gate = ((x + 3) / 6).clamp(0, 1)  # in float64 the slope of F.hardsigmoid is not exactly 1/6
    return F.hardswish(x), gate + x.clamp(-3, 3) * slope, 2 * slope  # 0 · inf is NaN


@pointwise("logsigmoid")
def logsigmoid(x: Tensor) -> Derivatives:
    s, s1, _ = sigmoid(x)
    return F.logsigmoid(x), torch.where(x > 0, torch.sigmoid(-x), 1 - s), -s1


@jet_rule("glu")
def glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


@pointwise("logit")
def logit(x: Tensor, eps: float | None = None) -> Derivatives:
    """Compute ln(x / (1 − x)); its derivatives are 0 where ``eps`` clamps x."""
    value, is_outside = torch.logit(x, eps), None
    if eps is not None:
        is_outside = (x < eps) | (x > 1 - eps)
        x = x.masked_fill(is_outside, 0.5)  # infinite slopes would make the backward NaN
    slope = 1 / (x * (1 - x))
    curvature = (2 * x - 1) * slope * slope
    if is_outside is not None:
        slope, curvature = slope.masked_fill(is_outside, 0), curvature.masked_fill(is_outside, 0)
    return value, slope, curvature


# ---- elementary functions ----------------------------------------------------------------------


@pointwise("expm1")
def expm1(x: Tensor) -> Derivatives:
    e = torch.exp(x)
    return torch.expm1(x), e, e


def register_log(name: str, base: float) -> None:
    """Register the logarithm ``name`` to a base."""

    @pointwise(name)
    def log(x: Tensor) -> Derivatives:
        slope = 1 / (x * math.log(base))
        return getattr(torch, name)(x), slope, -slope / x


for _name, _base in (("log", math.e), ("log2", 2), ("log10", 10)):
    register_log(_name, _base)


@pointwise("log1p")
def log1p(x: Tensor) -> Derivatives:
    inverse = 1 / (1 + x)
    return torch.log1p(x), inverse, -inverse * inverse


@pointwise("exp2")
def exp2(x: Tensor) -> Derivatives:
    value = torch.exp2(x)
    return value, value * math.log(2), value * math.log(2) ** 2


@pointwise("sqrt")
def sqrt(x: Tensor) -> Derivatives:
    root = torch.sqrt(x)
    return root, 0.5 / root, -0.25 / root / x


@pointwise("rsqrt")
def rsqrt(x: Tensor) -> Derivatives:
    r = torch.rsqrt(x)
    return r, -0.5 * r / x, 0.75 * r / x / x


@pointwise("sinc")
def sinc(x: Tensor) -> Derivatives:
    """Compute s = sin(y) / y at y = πx: s' = (cos y − s) / y, s'' = −s − 2 s' / y.

    Where |y| < 1 these differences cancel, and power series in y² replace them.
    """
    y = math.pi * x
    is_near = y.abs() < 1
    y_squared = torch.where(is_near, y, 0.0).square()
    far_x = torch.where(is_near, 0.5, x)
    far_y, half_turns = math.pi * far_x, far_x.round()
    # The angle minus whole half turns: sin(π x) would round π x first.
    sign, angle = 1 - 2 * half_turns.remainder(2), math.pi * (far_x - half_turns)
    s = sign * torch.sin(angle) / far_y
    s1 = (sign * torch.cos(angle) - s) / far_y
    s2 = -s - 2 * s1 / far_y
    near_s1, near_s2 = torch.zeros_like(y), torch.zeros_like(y)
    for n in range(10, 0, -1):  # s = Σ (−1)^n y^2n / (2n + 1)!
        factor = (-1) ** n / math.factorial(2 * n + 1)
        near_s1 = near_s1 * y_squared + 2 * n * factor
        near_s2 = near_s2 * y_squared + 2 * n * (2 * n - 1) * factor
    slope = torch.where(is_near, y * near_s1, s1)
    return torch.sinc(x), math.pi * slope, math.pi**2 * torch.where(is_near, near_s2, s2)


@pointwise("square")
def square(x: Tensor) -> Derivatives:
    return x * x, 2 * x, torch.full_like(x, 2)


@pointwise("erf")
def erf(x: Tensor) -> Derivatives:
    slope = 2 / math.sqrt(math.pi) * torch.exp(-x * x)
    return torch.erf(x), slope, -2 * x * slope


@pointwise("erfc")
def erfc(x: Tensor) -> Derivatives:
    _, slope, curvature = erf(x)
    return torch.erfc(x), -slope, -curvature


@pointwise("abs", "absolute", "__abs__")
def abs_(x: Tensor) -> Derivatives:
    return x.abs(), x.sign(), torch.zeros_like(x)


Bound: TypeAlias = "Tensor | float | None"


def register_clamp(name: str, first_bound: str) -> None:
    """Extend the rule of a clamp to bounds that are jets, by `maximum` and `minimum`.

    Args:
        first_bound: the name, "min" or "max", of the clamp's first positional argument after input.
    """
    constant_rule = require_rule(getattr(torch, name))

    @jet_rule(name)
    def rule(input: Tensor, *args: Bound, **kwargs: Bound) -> Tensor:
        bounds = dict(zip((first_bound, "max"), args, strict=False)) | kwargs
        if not any(isinstance(bound, JetTensor) for bound in bounds.values()):
            return constant_rule(input, *args, **kwargs)
        for bound, clamp_input in (("min", torch.maximum), ("max", torch.minimum)):
            if bounds.get(bound) is not None:
                input = clamp_input(input, torch.as_tensor(bounds[bound], dtype=input.dtype))
        return input


@pointwise("clamp", "clip")
def clamp(x: Tensor, min: Bound = None, max: Bound = None) -> Derivatives:
    # As in torch, the slope is also 1 at a bound, and 0 for NaN.
    value = torch.clamp(x, min, max)  # type: ignore[arg-type]  # one number, one tensor
    return value, (value == x).to(x.dtype), torch.zeros_like(x)


@pointwise("clamp_min")
def clamp_min(x: Tensor, min: Bound) -> Derivatives:
    return clamp(x, min=min)


@pointwise("clamp_max")
def clamp_max(x: Tensor, max: Bound) -> Derivatives:
    return clamp(x, max=max)


for _name in ("clamp", "clip", "clamp_min", "clamp_max"):
    register_clamp(_name, "max" if _name == "clamp_max" else "min")


@jet_rule("nan_to_num")
def nan_to_num(input: JetTensor, *args: float | None, **kwargs: Any) -> JetTensor:
    """Replace NaN and infinities; the replaced entries have zero derivatives."""
    x = input.primal
    value = torch.nan_to_num(x, *args, **kwargs)
    tangents = input.streams[1:].masked_fill(~torch.isfinite(x), 0)
    return input.with_streams(torch.cat([value.unsqueeze(0), tangents]))
