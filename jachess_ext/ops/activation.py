"""Jets through activation functions f(x) and through those of gated MLPs, f(g) · u.

    y_0 = f(x_0);   y_i = f'(x_0) x_i;   y_ij = f'(x_0) x_ij + f''(x_0) x_i x_j

(docs/how_it_works.md, pointwise); the product with u follows by Leibniz' rule (bilinear).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .library import available, check_shape, in_passes, pair_list, register_operator, split_streams

# f, f', f''
Derivatives = tuple[Tensor, Tensor, Tensor]


def _gelu(x: Tensor) -> Derivatives:
    """f = x Φ(x), f' = Φ + x φ, f'' = (2 − x²) φ, with φ, Φ the standard normal's."""
    b = x.clamp(-40, 40)  # beyond, φ is 0 in float64 and x² must not overflow
    pdf = torch.exp(-b * b / 2) / math.sqrt(2 * math.pi)
    cdf = torch.special.erfc(-b / math.sqrt(2)) / 2
    return x * cdf, cdf + b * pdf, (2 - b * b) * pdf


def _gated_by_sigmoid(x: Tensor, v: Tensor, v1: Tensor, v2: Tensor) -> Derivatives:
    """f = x σ(v(x)) for a function v with derivatives v1, v2 in x."""
    s, s1, s2 = _sigmoid(v)
    g1 = s1 * v1
    g2 = s2 * v1 * v1 + s1 * v2
    b = torch.where(s1 == 0, torch.zeros_like(x), x)
    return x * s, s + b * g1, 2 * g1 + b * g2


def _gelu_tanh(x: Tensor) -> Derivatives:
    """f = x (1 + tanh u)/2 = x σ(2u), u = √(2/π) (x + 0.044715 x³)."""
    c, a = 2 * math.sqrt(2 / math.pi), 0.044715
    b = x.clamp(-22, 22)  # σ(2u) is 0 or 1 to the last bit beyond
    return _gated_by_sigmoid(x, c * (b + a * b**3), c * (1 + 3 * a * b * b), 6 * c * a * b)


def _relu(x: Tensor) -> Derivatives:
    """f = max(x, 0), f'(0) = 0 as in torch, f'' = 0 but for the kink."""
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


DERIVATIVES: dict[str, Callable[[Tensor], Derivatives]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "quick_gelu": _quick_gelu,
}
"""x -> (f, f', f'') of each function that has a compiled operator, differentiable further."""
ACTIVATION_KINDS: tuple[str, ...] = tuple(DERIVATIVES)


def pointwise_jet(derivatives: Derivatives, x: list[Tensor], q: int) -> list[Tensor]:
    """Return the streams of f(x), given f, f', f'' at x_0."""
    f, f1, f2 = derivatives
    second = [
        f1 * x_ij + f2 * x[1 + i] * x[1 + j]
        for (i, j), x_ij in zip(pair_list(q), x[1 + q :], strict=False)
    ]
    return [f, *(f1 * x_i for x_i in x[1 : 1 + q]), *second]


def product_jet(
    a: list[Tensor],
    b: list[Tensor],
    q: int,
    times: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> list[Tensor]:
    """Return the streams of a b: y_ij = a_ij b_0 + a_i b_j + a_j b_i + a_0 b_ij.

    Args:
        times: the product, which need not commute.
    """
    y = [times(a[0], b[0])]
    y += [times(a[1 + i], b[0]) + times(a[0], b[1 + i]) for i in range(q)]
    for (i, j), a_ij, b_ij in zip(pair_list(q), a[1 + q :], b[1 + q :], strict=False):
        cross = times(a[1 + i], b[1 + j]) + times(a[1 + j], b[1 + i])
        y.append(times(a_ij, b[0]) + cross + times(a[0], b_ij))
    return y


def _activated(x: Tensor, kind: str, q: int) -> list[Tensor]:
    if kind not in DERIVATIVES:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(ACTIVATION_KINDS)}.")
    streams = split_streams(x, q)
    return pointwise_jet(DERIVATIVES[kind](streams[0]), streams, q)


def activation_jet_reference(x: Tensor, kind: str, q: int) -> Tensor:
    """Push a jet as `activation_jet`, in pure torch, on any device."""
    return torch.stack(_activated(x, kind, q)).to(x.dtype)


def activation_jet(x: Tensor, kind: str, q: int) -> Tensor:
    """Push a 2-jet through an activation function.

    Args:
        x: a stacked jet [S, ...].
        kind: one of ACTIVATION_KINDS; "gelu" is the erf form.
        q: number of directions, 1 to 4.

    Returns:
        [S, ...] of x's dtype.

    Example:
        >>> activation_jet(torch.tensor([2.0, 1.0]), "relu", 1)  # x_0 and x_1
        tensor([2., 1.])
    """
    if not available("activation_jet", x.device):
        return activation_jet_reference(x, kind, q)
    return in_passes(lambda x, q: torch.ops.jachess.activation_jet(x, kind, q), [x], q)


def gated_activation_jet_reference(g: Tensor, u: Tensor, kind: str, q: int) -> Tensor:
    """Push jets as `gated_activation_jet`, in pure torch, on any device."""
    check_shape("u", u, g.shape)
    return torch.stack(product_jet(_activated(g, kind, q), split_streams(u, q), q)).to(g.dtype)


def gated_activation_jet(g: Tensor, u: Tensor, kind: str, q: int) -> Tensor:
    """Push 2-jets through f(g) · u.

    Args:
        g: a stacked jet [S, ...], the gate. The halves of one [S, ..., 2F] tensor
            (`.chunk(2, -1)`) are read in place.
        u: a stacked jet of g's shape, dtype and device.
        kind: one of ACTIVATION_KINDS, the activation of the gate.
        q: number of directions, 1 to 4.

    Returns:
        [S, ...] of g's dtype, contiguous.

    Example:
        >>> g, u = torch.tensor([2.0, 1.0]), torch.tensor([3.0, 0.0])
        >>> gated_activation_jet(g, u, "relu", 1)
        tensor([6., 3.])
    """
    if not available("gated_activation_jet", g.device):
        return gated_activation_jet_reference(g, u, kind, q)
    return in_passes(
        lambda g, u, q: torch.ops.jachess.gated_activation_jet(g, u, kind, q), [g, u], q
    )


register_operator("activation_jet", activation_jet_reference, tensors=1)
register_operator(
    "gated_activation_jet", gated_activation_jet_reference, tensors=2, differentiable=2
)
