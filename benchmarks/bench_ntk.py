"""`jachess::ntk_gram` (form A of the NTK) against the same contraction by batched matrix products.

Programs of a group, one layer each:

    operator    the fused operator
    batched     the T × T' Gram matrices of all pairs of samples and outputs at once (torch.einsum)
    flat        one [N T, M T'] product per pair of outputs, then multiplied and summed by sample
    floor       one large matrix product; ``operations`` in the JSON gives both rates

Sides are unequal, so that every form does all the work, and once symmetric, where the operator
computes each pair once and the others, which have no way to, all of it.  How much memory they take
is in `benchmarks.memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conftest import Timed
from jachess_ext import ops


@dataclass(frozen=True)
class Layer:
    """N samples a side of T positions; d inputs, cotangents of size e of C outputs."""

    samples: int
    positions: int
    inputs: int
    cotangents: int
    outputs: int
    symmetric: bool = False

    def __str__(self) -> str:
        n, t, d, e, c, symmetric = astuple(self)
        return f"N{n}-T{t}-d{d}-e{e}-C{c}" + ("-symmetric" if symmetric else "")

    @property
    def operations(self) -> float:
        """Of all pairs of samples; half where symmetric."""
        features = self.inputs + self.outputs**2 * self.cotangents
        every = 2.0 * (self.samples * self.positions) ** 2 * features
        return every * (self.samples + 1) / (2 * self.samples) if self.symmetric else every


# where form A is chosen: a classifier's last block and head (one position), short sentences through
# an encoder's layers, and wide layers
SIZES = [
    Layer(256, 1, 384, 384, 2),
    Layer(64, 8, 384, 1152, 2),
    Layer(64, 16, 384, 384, 2),
    Layer(64, 16, 384, 384, 2, symmetric=True),
    Layer(64, 16, 384, 1536, 2),
    Layer(64, 16, 384, 1536, 2, symmetric=True),
    Layer(32, 16, 768, 3072, 2),
]
QUICK = [Layer(4, 3, 8, 8, 2), Layer(4, 3, 8, 8, 2, symmetric=True)]

Side = tuple[Tensor, Tensor]


def operator(left: Side, right: Side) -> Tensor:
    """The fused operator."""
    if right is left:
        return ops.ntk_gram(left[0], [left[1]])
    return ops.ntk_gram(left[0], [left[1]], right[0], [right[1]])


def batched(left: Side, right: Side) -> Tensor:
    """All Gram matrices at once; torch.matmul's broadcasting would copy the operands besides."""
    gram = torch.einsum("ntk,msk->nmts", left[0], right[0])
    products = torch.einsum("cnte,dmse->cndmts", left[1], right[1])
    return (products * gram[:, None]).sum((-1, -2))


def flat(left: Side, right: Side) -> Tensor:
    """One product per pair of outputs over all positions."""
    (a, deltas), (b, others) = left, right
    count, positions = a.shape[:2]
    gram = a.flatten(0, 1) @ b.flatten(0, 1).T
    kernel = a.new_empty(len(deltas), count, len(others), len(b))
    for c, delta in enumerate(deltas):
        for d, other in enumerate(others):
            product = (delta.flatten(0, 1) @ other.flatten(0, 1).T).mul_(gram)
            kernel[c, :, d] = product.view(count, positions, len(b), -1).sum((1, 3))
    return kernel


CONTRACTIONS: dict[str, Callable[[Side, Side], Tensor]] = {
    "operator": operator,
    "batched": batched,
    "flat": flat,
}


def sides(layer: Layer, place: dict[str, Any]) -> tuple[Side, Side]:
    """Random operands, the right ones the left ones themselves where symmetric."""

    def one() -> Side:
        inputs = torch.randn(layer.samples, layer.positions, layer.inputs, **place)
        shape = (layer.outputs, layer.samples, layer.positions, layer.cotangents)
        return inputs, torch.randn(*shape, **place)

    left = one()
    return left, left if layer.symmetric else one()


@pytest.mark.parametrize("program", CONTRACTIONS)
def test_gram(timed: Timed, place: dict[str, Any], size: Layer, program: str) -> None:
    left, right = sides(size, place)
    form = CONTRACTIONS[program]
    wanted = operator(left, right)
    found = timed(lambda: form(left, right), f"ntk_gram, {size}", operations=size.operations)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error <= torch.finfo(place["dtype"]).eps * 16  # else they compute different kernels


def test_large_product(timed: Timed, place: dict[str, Any], quick: bool) -> None:
    """The rate that is to be reached."""
    size = 64 if quick else 2048
    a, b = torch.randn(2, size, size, **place)
    out = torch.empty_like(a)
    timed(lambda: torch.mm(a, b, out=out), "ntk_gram, floor", operations=2.0 * size**3)
