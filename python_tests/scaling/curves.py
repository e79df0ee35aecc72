"""Synthetic loss curves of every law, written out apart from the package's own formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jachess_ext.ntk import ntk_loss

Array = npt.NDArray[np.float64]

SIZES = 200.0 * 2.0 ** np.arange(14)
WITH_ZERO = np.append(0.0, SIZES)


def rectified(sizes: Array, scale: float, shift: float, beta: float, floor: float) -> Array:
    return scale / (shift + np.power(sizes, beta)) + floor


def power(sizes: Array, scale: float, beta: float, floor: float, alpha: float) -> Array:
    return (scale * np.power(sizes, -beta) + floor) ** alpha


def of_formula(formula: str, sizes: Array, params: Mapping[str, Any]) -> Array:
    """The losses that a law's formula, as it is written for the reader, has at sizes."""
    written = formula.partition("=")[2].replace("^", "**")
    return eval(written, {"D": sizes, "ln": np.log, "exp": np.exp, **params})


def random_rectified(generator: np.random.Generator, count: int) -> list[tuple[float, ...]]:
    """Parameters whose transition and floor the sizes can tell."""
    result = []
    for _ in range(count):
        beta = generator.uniform(0.3, 0.8)
        transition = np.exp(generator.uniform(np.log(1e3), np.log(3e4)))
        floor = generator.uniform(0.2, 1.0)
        start = generator.uniform(2.0, 5.0)  # loss at D = 0 above the floor
        shift = transition**beta
        result.append((start * shift, shift, beta, floor))
    return result


def noisy(losses: Array, generator: np.random.Generator, noise: float) -> Array:
    return losses * np.exp(noise * generator.standard_normal(losses.shape))


def with_kernel() -> tuple[dict[str, Any], Array]:
    """Return Θ, residual, times and rate, and losses at SIZES of Eq. 10 with times 2.5 as long."""
    generator = torch.Generator().manual_seed(2)
    half = torch.randn(12, 12, dtype=torch.float64, generator=generator) / 4
    theta, residual = half @ half.T, 4 * torch.randn(12, dtype=torch.float64, generator=generator)
    times = SIZES / 400
    f = ntk_loss(theta, residual, torch.tensor(2.5 * times), 0.02).numpy()
    kernel = {"theta": theta, "residual": residual, "t": times, "lr": 0.02}
    return kernel, 40.0 / (f + SIZES**0.4) + 0.7
