"""The jet rules (docs/how_it_works.md) of the operators' references, on lists of streams."""

from collections.abc import Callable

import torch
from torch import Tensor

from .checks import pair_list


def pointwise_jet(f: Tensor, f1: Tensor, f2: Tensor, x: list[Tensor], q: int) -> list[Tensor]:
    """y = f(x) with f, f', f'' at x_0: y_i = f' x_i; y_ij = f' x_ij + f'' x_i x_j."""
    y = [f, *(f1 * x[1 + i] for i in range(q))]
    if len(x) > 1 + q:
        for p, (i, j) in enumerate(pair_list(q)):
            y.append(f1 * x[1 + q + p] + f2 * x[1 + i] * x[1 + j])
    return y


def mean_square_jet(c: list[Tensor], q: int) -> list[Tensor]:
    """The jet of v = mean(c²): v_i = 2 mean(c_0 c_i), v_ij = 2 mean(c_0 c_ij + c_i c_j)."""

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    v = [mean(c[0] * c[0]), *(2 * mean(c[0] * c[1 + i]) for i in range(q))]
    if len(c) > 1 + q:
        for p, (i, j) in enumerate(pair_list(q)):
            v.append(2 * mean(c[0] * c[1 + q + p] + c[1 + i] * c[1 + j]))
    return v


def rsqrt_jet(v: list[Tensor], eps: float, q: int) -> list[Tensor]:
    """The jet of r = (v + eps)^(−1/2)."""
    shifted = v[0] + eps
    r = torch.rsqrt(shifted)
    out = [r, *(-0.5 * r * v[1 + i] / shifted for i in range(q))]
    if len(v) > 1 + q:
        for p, (i, j) in enumerate(pair_list(q)):
            a_i, a_j = v[1 + i] / shifted, v[1 + j] / shifted
            out.append(-0.5 * r * v[1 + q + p] / shifted + 0.75 * r * a_i * a_j)
    return out


def product_jet(
    a: list[Tensor],
    b: list[Tensor],
    q: int,
    times: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> list[Tensor]:
    """Leibniz: y_i = a_i b_0 + a_0 b_i; y_ij = a_ij b_0 + a_i b_j + a_j b_i + a_0 b_ij.

    Args:
        times: the product, which need not commute.
    """
    y = [times(a[0], b[0])]
    y += [times(a[1 + i], b[0]) + times(a[0], b[1 + i]) for i in range(q)]
    if len(a) > 1 + q:
        for p, (i, j) in enumerate(pair_list(q)):
            ij = 1 + q + p
            cross = times(a[1 + i], b[1 + j]) + times(a[1 + j], b[1 + i])
            y.append(times(a[ij], b[0]) + cross + times(a[0], b[ij]))
    return y
