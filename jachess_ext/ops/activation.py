"""Jets of activation functions f(x), and of the products f(g) · u in gated MLPs.

    y_0 = f(x_0);   y_i = f'(x_0) x_i;   y_ij = f'(x_0) x_ij + f''(x_0) x_i x_j

(docs/how_it_works.md, pointwise); the product with u follows by Leibniz' rule (bilinear).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..torch_private import functional as F
from .library import (
    OPS,
    Streams,
    available,
    check_shape,
    in_passes,
    register_operator,
    streams_of,
    wide,
    widened,
)

# f, f', f''
Derivatives = tuple[Tensor, Tensor, Tensor]


def _gelu(x: Tensor) -> Derivatives:
    """f = x Φ(x), f' = Φ + x φ, f'' = (2 − x²) φ, with the normal density φ and distribution Φ."""
    b = x.clamp(-40, 40)  # beyond, φ is 0 in float64 and x² must not overflow
    pdf = torch.exp(-b * b / 2) / math.sqrt(2 * math.pi)
    cdf = torch.special.erfc(-b / math.sqrt(2)) / 2
    return x * cdf, cdf + b * pdf, (2 - b * b) * pdf


def _gated_by_sigmoid(x: Tensor, v: Tensor, v1: Tensor, v2: Tensor) -> Derivatives:
    """f = x σ(v(x)) for a function v with derivatives v1, v2 in x."""
    s, s1, s2 = _sigmoid(v)
    g1 = s1 * v1
    g2 = s2 * v1 * v1 + s1 * v2
    # Where σ' underflows to 0, an infinite x would make 0 · inf of terms whose limit is 0.
    b = torch.where(s1 == 0, torch.zeros_like(x), x)
    return x * s, s + b * g1, 2 * g1 + b * g2


def _gelu_tanh(x: Tensor) -> Derivatives:
    """f = x (1 + tanh u)/2 = x σ(2u), u = √(2/π) (x + 0.044715 x³)."""
    c, a = 2 * math.sqrt(2 / math.pi), 0.044715
    b = x.clamp(-22, 22)  # σ(2u) is 0 or 1 to the last bit beyond
    return _gated_by_sigmoid(x, c * (b + a * b**3), c * (1 + 3 * a * b * b), 6 * c * a * b)


def _relu(x: Tensor) -> Derivatives:
    """f = max(x, 0), f'(0) = 0 as in torch, and f'' = 0, also at the kink."""
    return torch.relu(x), (x > 0).to(x.dtype), torch.zeros_like(x)


def _silu(x: Tensor) -> Derivatives:
    """f = x σ(x)."""
    return _gated_by_sigmoid(x, x, torch.ones_like(x), torch.zeros_like(x))


def _quick_gelu(x: Tensor) -> Derivatives:
    """f = x σ(1.702 x)."""
    slope = torch.full_like(x, 1.702)
    return _gated_by_sigmoid(x, 1.702 * x, slope, torch.zeros_like(x))


def _tanh(x: Tensor) -> Derivatives:
    """f = tanh x, f' = 1 − f², f'' = −2 f f'."""
    f = torch.tanh(x)
    product = 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)  # 1 − f² without cancellation
    f1 = torch.where(f.abs() < 0.5, 1 - f * f, product)
    return f, f1, -2 * f * f1


def _sigmoid(x: Tensor) -> Derivatives:
    """f = σ(x), f' = σ(x) σ(−x), f'' = −f' tanh(x/2)."""
    f = torch.sigmoid(x)
    f1 = f * torch.sigmoid(-x)
    return f, f1, -f1 * torch.tanh(x / 2)


def softplus_derivatives(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Derivatives:
    """f = ln(1 + exp βx) / β, which equals x from βx = 50 on, before exp overflows; f' = σ(βx)."""
    s, s1, _ = _sigmoid(beta * x)
    is_linear = beta * x > threshold
    slope, curvature = s.masked_fill(is_linear, 1), (beta * s1).masked_fill(is_linear, 0)
    return F.softplus(x, beta, min(threshold, 50.0)), slope, curvature


def elu_derivatives(x: Tensor, alpha: float = 1.0) -> Derivatives:
    """f = x above 0, α (exp x − 1) below."""
    slope = alpha * torch.exp(x.clamp(max=0))
    return F.elu(x, alpha), slope.masked_fill(x > 0, 1), slope.masked_fill(x > 0, 0)


def _mish(x: Tensor) -> Derivatives:
    """f = x tanh(softplus(x))."""
    t, t1, t2 = _tanh(F.softplus(x))
    s, s1, _ = _sigmoid(x)
    slope, curvature = t1 * s, t2 * s * s + t1 * s1
    # Where the slope underflows to 0, an infinite x would make 0 · inf.
    b = torch.where(t1 * s == 0, torch.zeros_like(x), x)
    return x * t, t + b * slope, 2 * slope + b * curvature


def _sin(x: Tensor) -> Derivatives:
    s = torch.sin(x)
    return s, torch.cos(x), -s


def _cos(x: Tensor) -> Derivatives:
    c = torch.cos(x)
    return c, -torch.sin(x), -c


def _exp(x: Tensor) -> Derivatives:
    e = torch.exp(x)
    return e, e, e


DERIVATIVES: dict[str, Callable[[Tensor], Derivatives]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "quick_gelu": _quick_gelu,
    "softplus": softplus_derivatives,
    "elu": elu_derivatives,
    "mish": _mish,
    "sin": _sin,
    "cos": _cos,
    "exp": _exp,
}
"""Name of each function f that has a compiled operator -> function x ↦ (f, f', f''), which autograd
can differentiate further."""
ACTIVATION_KINDS: tuple[str, ...] = tuple(DERIVATIVES)


def pointwise_jet(derivatives: Derivatives, x: Tensor, streams: Streams) -> Tensor:
    """Return the stacked jet of f(x), in the dtype of f, from f, f', f'' at x_0.

    For 16-bit x the derivatives may be float32, so that they do not overflow before the streams do.
    """
    value, slope, curvature = derivatives
    q, tangents = streams.directions, slope * x[1:]
    parts = [value.unsqueeze(0), tangents[:q]]
    if streams.num_second:
        first = x[1 : 1 + q]
        parts.append(tangents[q:] + curvature * streams.quadratic(wide(first), first))
    return torch.cat([part.to(value.dtype) for part in parts])


def product_jet(
    a: Tensor,
    b: Tensor,
    streams: Streams,
    times: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Tensor:
    """Return the stacked jet of a b: y_ij = a_ij b_0 + a_i b_j + a_j b_i + a_0 b_ij.

    Args:
        times: the product, which multiplies stacks [N, ...] or [1, ...] stream by stream; it need
            not commute.
    """
    a_times_primal = times(a, b[:1])
    tangents = a_times_primal[1:] + times(a[:1], b[1:])
    if not streams.num_second:
        return torch.cat([a_times_primal[:1], tangents])
    q = streams.directions
    second = tangents[q:] + streams.crossed(a[1 : 1 + q], b[1 : 1 + q], times)
    return torch.cat([a_times_primal[:1], tangents[:q], second])


def _activated(x: Tensor, kind: str, q: int, summed: int) -> Tensor:
    if kind not in DERIVATIVES:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(ACTIVATION_KINDS)}.")
    x = widened(x)
    return pointwise_jet(DERIVATIVES[kind](x[0]), x, streams_of(x, q, summed))


def activation_jet_reference(x: Tensor, kind: str, q: int, summed: int = 0) -> Tensor:
    """Compute `activation_jet` in pure torch, on any device."""
    return _activated(x, kind, q, summed).to(x.dtype)


def activation_jet(x: Tensor, kind: str, q: int, summed: int = 0) -> Tensor:
    """Return the 2-jet of an activation function.

    Args:
        x: a stacked jet [S, ...].
        kind: one of ACTIVATION_KINDS; "gelu" is the erf form.
        q: number of directions; 1 to 4 if there are streams for pairs.
        summed: number of directions, from the first, over which the last stream is the sum of
            D²f[u_i, u_i]; 0: there is no such stream.

    Returns:
        [S, ...] of x's dtype.

    Examples:
        >>> activation_jet(torch.tensor([2.0, 1.0]), "relu", 1)  # x_0 and x_1
        tensor([2., 1.])
    """
    if not available("activation_jet", x.device, sums=summed > 0):
        return activation_jet_reference(x, kind, q, summed)
    return in_passes(lambda x, q: OPS.activation_jet(x, kind, q, summed), [x], q, any_number=True)


def gated_activation_jet_reference(
    g: Tensor, u: Tensor, kind: str, q: int, summed: int = 0
) -> Tensor:
    """Compute `gated_activation_jet` in pure torch, on any device."""
    check_shape("u", u, g.shape)
    streams = streams_of(g, q, summed)
    return product_jet(_activated(g, kind, q, summed), widened(u), streams).to(g.dtype)


def gated_activation_jet(g: Tensor, u: Tensor, kind: str, q: int, summed: int = 0) -> Tensor:
    """Return the 2-jet of f(g) · u.

    Args:
        g: the gate, a stacked jet [S, ...]. g and u may be views of one [S, ..., 2F] tensor
            (`.chunk(2, -1)`), which are not copied.
        u: a stacked jet of g's shape, dtype and device.
        kind: one of ACTIVATION_KINDS, the activation of the gate.
        q, summed: as for `activation_jet`.

    Returns:
        [S, ...] of g's dtype, contiguous.

    Examples:
        >>> g, u = torch.tensor([2.0, 1.0]), torch.tensor([3.0, 0.0])
        >>> gated_activation_jet(g, u, "relu", 1)
        tensor([6., 3.])
    """
    if not available("gated_activation_jet", g.device, sums=summed > 0):
        return gated_activation_jet_reference(g, u, kind, q, summed)
    operator = OPS.gated_activation_jet
    return in_passes(lambda g, u, q: operator(g, u, kind, q, summed), [g, u], q, any_number=True)


register_operator("activation_jet", activation_jet_reference, tensors=1)
register_operator(
    "gated_activation_jet", gated_activation_jet_reference, tensors=2, differentiable=2
)
