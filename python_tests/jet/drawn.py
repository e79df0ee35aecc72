"""Random numbers of a seed, and a weight that has to be dequantised, for several files of tests."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Packed(Tensor):
    """Numbers that a linear layer has to dequantise."""

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor)
