"""Rows that are huge, tiny, infinite or no numbers: values, streams and gradients against torch.

An entry is torch's, or NaN where torch's own is made of a variance that has overflowed: never a
finite number where torch has none, or another finite one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet import composed_rules

N = 8
BIG = {torch.float64: 1e200, torch.float32: 1e25}
WAYS = ("operator", "composed", "transformed")


def _rows(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor | float]]:
    """A finite row, which is differentiated, and what is added to it: no input may be infinite."""
    row = torch.randn(1, N, dtype=dtype, generator=torch.Generator().manual_seed(0))
    big, limits = BIG[dtype], torch.finfo(dtype)
    one = torch.zeros(1, N, dtype=dtype)
    one[0, 3] = 1
    rows: dict[str, tuple[Tensor, Tensor | float]] = {
        "plain": (row, 0),
        "big": (row * big, 0),
        "huge": (row * (limits.max / 64), 0),
        "one big": (row + one * big, 0),
        "small": (row / big, 0),
        "subnormal": (row * (limits.smallest_normal / 8), 0),
        "zeros": (row * 0, 0),
        "constant": (row * 0 + 2, 0),
    }
    for value in (math.inf, -math.inf, math.nan):
        rows[f"one {value}"] = (row, torch.where(one > 0, value, 0))
        rows[f"all {value}"] = (row, value)
    return rows


ROWS = tuple(_rows(torch.float64))
WEIGHT = (torch.arange(N) + 1.0, torch.arange(N) - 3.0)
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda x: F.layer_norm(x, (N,)),
    "layer, affine": lambda x: F.layer_norm(x, (N,), *(w.to(x.dtype) for w in WEIGHT)),
    "layer of two dimensions": lambda x: F.layer_norm(x.unflatten(1, (2, -1)), (2, N // 2)),
    "layer of a sum": lambda x: F.layer_norm(x / 2 + x / 2, (N,)),
    "group": lambda x: F.group_norm(x, 2),
    "group, affine": lambda x: F.group_norm(x, 2, *(w.to(x.dtype) for w in WEIGHT)),
    "instance": lambda x: F.instance_norm(x.unsqueeze(0))[0],
    "batch": lambda x: F.batch_norm(x.T, None, None, training=True).T,
    "RMS": lambda x: F.rms_norm(x, (N,)),
    "RMS, weight": lambda x: F.rms_norm(x, (N,), WEIGHT[0].to(x.dtype)),
    "RMS written out": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmin": lambda x: F.softmin(x, -1),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in (
            *("relu", "silu", "gelu", "mish", "elu", "selu", "celu", "softplus", "logsigmoid"),
            *("hardswish", "relu6", "leaky_relu", "tanhshrink", "softsign", "hardtanh", "glu"),
        )
    },
    **{name: getattr(torch, name) for name in ("tanh", "sigmoid", "exp", "erf", "square")},
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "x * x": lambda x: x * x,
}


def _of_torch(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> list[Tensor]:
    """f, Df[v], and the gradients of sums of both."""
    value, tangent = torch.func.jvp(f, (x,), (v,))
    w, _ = torch.randn(2, *value.shape, generator=torch.Generator().manual_seed(2)).to(x)
    (slope,) = torch.func.vjp(f, x)[1](w)
    return [value, tangent, slope]


def _of_jets(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, way: str) -> list[list[Tensor]]:
    """The same of each kind of jet."""
    x = x.clone().requires_grad_()

    def run(streams: str, x: Tensor) -> tuple[Tensor, Tensor]:
        if streams == "tangent":
            return jx.jvp(f, (x,), (v,))
        jet = jx.jet(f, x, torch.stack([v, v]), second=streams)
        return jet.primal, jet.first[0]

    results = []
    for streams in ("tangent",) if way == "transformed" else ("tangent", "pairs", "squares"):
        if way == "transformed":
            value, tangent = torch.func.vmap(lambda x, s=streams: run(s, x))(x.unsqueeze(0))
            value, tangent = value[0], tangent[0]
        else:
            value, tangent = run(streams, x)
        w, _ = torch.randn(2, *value.shape, generator=torch.Generator().manual_seed(2)).to(x)
        (slope,) = torch.autograd.grad(value, x, w)
        results.append([value.detach(), tangent.detach(), slope])
    return results


def _close(ours: Tensor, right: Tensor) -> Tensor:
    """Entry by entry; NaN is NaN."""
    eps = 4e3 * torch.finfo(right.dtype).eps
    size = right[right.isfinite()].abs().amax() if right.isfinite().any() else right.new_tensor(1)
    return torch.isclose(ours, right, rtol=eps, atol=float(eps * size), equal_nan=True)


OVERFLOWS = ("big", "huge", "one big")
"""Rows of which a variance overflows: NaN, also where torch makes 0 of it."""


def _check(
    f: Callable[[Tensor], Tensor],
    names: Sequence[str],
    dtype: torch.dtype,
    ways: Sequence[str] = WAYS,
) -> None:
    """Compare all rows at once, each of which depends on itself alone."""
    rows = _rows(dtype)
    x = torch.cat([rows[name][0] for name in names])
    added = torch.cat([torch.zeros(1, N, dtype=dtype) + rows[name][1] for name in names])
    v = torch.randn(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    shifted = lambda t: f(t + added)  # noqa: E731
    right = _of_torch(shifted, x, v)
    for way in ways if dtype == torch.float64 else ways[:1]:
        with composed_rules() if way == "composed" else nullcontext():
            jets = _of_jets(shifted, x, v, way)
        for parts in jets:
            for n, name in enumerate(names):
                _check_row((way, name), *([part[n] for part in of] for of in (parts, right)))


def _check_row(said: tuple[str, str], ours: list[Tensor], right: list[Tensor]) -> None:
    for part, found, expected in zip(("value", "tangent", "slope"), ours, right, strict=True):
        same = _close(found, expected)
        if part != "value":  # where torch's formula is 0 · inf, ours need not be
            same |= ~expected.isfinite()
        if said[1] in OVERFLOWS or not right[0].isfinite().all():
            same |= found.isnan()
        assert same.all(), (*said, part, found, expected)
    if right[0].isnan().all():  # a diverged model does not look finite
        assert all(found.isnan().all() for found in ours), said


@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, dtype: torch.dtype) -> None:
    _check(NORMS[name], ROWS, dtype)


@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    """Of finite rows; of others torch's own kernels disagree on 0 · inf.  A transform takes the
    composed rules."""
    rows = [row for row in ROWS if "inf" not in row and "nan" not in row]
    _check(ACTIVATIONS[name], rows, dtype, WAYS[:2])


OF_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp of all": lambda x: x.unflatten(1, (2, -1)).logsumexp((1, 2)),
    "logaddexp": lambda x: torch.logaddexp(x[:, : N // 2], x[:, N // 2 :]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([2])),
    "attention": lambda x: F.scaled_dot_product_attention(
        x.view(1, 1, 4, 2) * 0 + 1, x.view(1, 1, 4, 2), x.view(1, 1, 4, 2).sin() * 0 + 1
    ),
}


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 2.0**20), (torch.float64, 2.0**49)])
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", OF_SCORES)
def test_what_scores_share_changes_no_derivative(
    name: str, composed: bool, dtype: torch.dtype, shift: float
) -> None:
    """Whole numbers, which keep their digits beside a large one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (1, N), generator=generator).to(dtype)
    u = torch.randn(2, 1, N, dtype=dtype, generator=generator)
    with composed_rules() if composed else nullcontext():
        far, near = (jx.jet(OF_SCORES[name], x + by, u) for by in (shift, 0.0))
    torch.testing.assert_close(far.first, near.first)
    torch.testing.assert_close(far.second, near.second)
