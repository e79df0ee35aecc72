"""Operands of the NTK's operators of linear layers, and their kernel from every gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
}
Side = tuple[Tensor, list[Tensor]]


def make_side(
    outputs: int,
    samples: int,
    positions: int,
    inputs: int,
    widths: tuple[int, ...],
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Side:
    """Inputs [N, T, d] and cotangents [C, N, T, e] of every layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    deltas = [normal(outputs, samples, positions, e) for e in widths]
    return normal(samples, positions, inputs), deltas


def expected(left: Side, right: Side) -> Tensor:
    """From every gradient Σ_t δ aᵀ written out, in float64."""

    return torch.einsum("cnp,dmp->cndm", gradients(left), gradients(right))


def gradients(side: Side) -> Tensor:
    """[C, N, P] float64: Σ_t δ aᵀ of every layer, one after the other."""
    a = side[0].double()
    layers = [torch.einsum("cntr,ntk->cnrk", delta.double(), a) for delta in side[1]]
    return torch.cat([layer.flatten(2) for layer in layers], -1)


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value; infinite with a NaN anywhere."""
    assert got.shape == wanted.shape, "a difference would broadcast"
    difference = (got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf))


# samples and positions that make: less than one tile, ragged tiles of several samples, one sample
# in several tiles, samples of one position each; features below and above what is packed at a time
SIZES = {
    "one tile": (3, 4, 5, (6,)),
    "ragged": (23, 9, 37, (11, 18)),
    "many tiles": (70, 11, 20, (33,)),
    "long samples": (2, 300, 19, (7, 3)),
    "no positions to sum": (150, 1, 12, (270,)),
    "many features": (20, 3, 300, (8,)),
    "one feature": (5, 40, 1, (1, 1, 1)),
}
