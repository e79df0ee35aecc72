"""Jets through activation functions: wrapper, pure-torch reference, fake kernels and autograd of
`jachess::activation_jet`.

Signature: [S, ...], kind, q -> [S, ...], with S = 1 + q (first order) or 1 + q + q(q-1)/2 streams
(docs/how_it_works.md, pointwise):

    y_0 = f(x_0);   y_i = f'(x_0) x_i;   y_ij = f'(x_0) x_ij + f''(x_0) x_i x_j
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .checks import check_jet, widened
from .jet_formulas import pointwise_jet
from .library import available
from .registration import register_operator

# f, f', f'' at a point
Derivatives = tuple[Tensor, Tensor, Tensor]


def _gelu(x: Tensor) -> Derivatives:
    """f = x Φ(x), f' = Φ + x φ, f'' = (2 − x²) φ, with φ, Φ the standard normal's."""
    b = x.clamp(-40, 40)  # beyond, φ is 0 in float64 and x² must not overflow
    pdf = torch.exp(-b * b / 2) / math.sqrt(2 * math.pi)
    cdf = torch.special.erfc(-b / math.sqrt(2)) / 2
    return x * cdf, cdf + b * pdf, (2 - b * b) * pdf


def _gated_by_sigmoid(x: Tensor, v: Tensor, v1: Tensor, v2: Tensor) -> Derivatives:
    """f = x σ(v(x)) for an inner function v with derivatives v1, v2 in x."""
    s = torch.sigmoid(v)
    s1 = s * torch.sigmoid(-v)
    s2 = s1 * -torch.tanh(v / 2)
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
    """f = max(x, 0), f'(0) = 0 as torch has it, f'' = 0 (kink apart)."""
    return torch.relu(x), (x > 0).to(x.dtype), torch.zeros_like(x)


def _silu(x: Tensor) -> Derivatives:
    """f = x σ(x)."""
    return _gated_by_sigmoid(x, x, torch.ones_like(x), torch.zeros_like(x))


def _quick_gelu(x: Tensor) -> Derivatives:
    """f = x σ(1.702 x)."""
    one = torch.ones_like(x)
    return _gated_by_sigmoid(x, 1.702 * x, 1.702 * one, torch.zeros_like(x))


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


ACTIVATION_DERIVATIVES: dict[str, Callable[[Tensor], Derivatives]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "quick_gelu": _quick_gelu,
}
ACTIVATION_KINDS: tuple[str, ...] = tuple(ACTIVATION_DERIVATIVES)


def check_kind(op: str, kind: str) -> None:
    """Refuse what is not one of ACTIVATION_KINDS.

    Raises:
        ValueError: kind is none of them.
    """
    if kind not in ACTIVATION_DERIVATIVES:
        raise ValueError(f"{op}: kind is {kind!r}; expected one of {', '.join(ACTIVATION_KINDS)}.")


def _check(x: Tensor, kind: str, q: int) -> None:
    check_jet("activation_jet", x, q)
    check_kind("activation_jet", kind)


def activation_streams(x: list[Tensor], kind: str, q: int) -> list[Tensor]:
    """The streams of an activation function of a known kind, by pure-torch formulas."""
    return pointwise_jet(*ACTIVATION_DERIVATIVES[kind](x[0]), x, q)


def activation_jet_reference(x: Tensor, kind: str, q: int) -> Tensor:
    """Pure-torch reference of `activation_jet`: any device, any number of backward passes.

    Args, returns and raises: as `activation_jet`. 16-bit types are computed in fp32.
    """
    _check(x, kind, q)
    streams = widened(x)
    return torch.stack(activation_streams(list(streams.unbind(0)), kind, q)).to(x.dtype)


def activation_jet(x: Tensor, kind: str, q: int) -> Tensor:
    """Push a 2-jet through an activation function (docs/how_it_works.md, pointwise).

    Args:
        x: [S, ...] stacked streams, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32, bf16 or fp16 (the
            16-bit types are computed in fp32); any strides, any size including zero.
        kind: one of ACTIVATION_KINDS; "gelu" is the erf form.
        q: number of directions, 1 to 4.

    Returns:
        [S, ...] of x's dtype; differentiable any number of times. Where no compiled kernel serves
        x's device, the pure-torch reference is used.

    Raises:
        ValueError: unknown kind, q outside 1..4, or S that does not match q.
        TypeError: a dtype other than the four.
    """
    _check(x, kind, q)
    if not available("activation_jet", x.device):
        return activation_jet_reference(x, kind, q)
    return torch.ops.jachess.activation_jet(x, kind, q)


register_operator("activation_jet", activation_jet_reference, tensors=1)
