"""NLPmetrics: heavy tails of the spectra of a model's weights, an opponent of forecasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 16
"""A matrix with fewer singular values has no tail to speak of and is left out."""
_TAIL = 8  # the fewest eigenvalues a tail is fitted to


def mean_exponent(weights: Mapping[str, Tensor] | Iterable[Tensor]) -> float:
    """Return the mean of α over a model's weight matrices; lower is heavier-tailed: better.

    A data-free sign of a model's quality (Martin & Mahoney 2021; Yang et al. 2023).

    Args:
        weights: a state dict, or tensors; those with two dimensions of 16 or more count.

    Raises:
        ValueError: none counts, or a weight is NaN or infinite.
    """
    tensors: Iterable[Any] = weights.values() if isinstance(weights, Mapping) else weights
    exponents = [
        tail_exponent(spectrum(tensor))
        for tensor in tensors
        if getattr(tensor, "ndim", 0) == 2 and min(tensor.shape) >= _SMALLEST
    ]
    if not exponents:
        raise ValueError(
            f"no weight matrix of {_SMALLEST} × {_SMALLEST} or more was given; expected a model's "
            "state dict"
        )
    return float(np.mean(exponents))


def spectrum(weight: Tensor) -> np.ndarray:
    """Return the positive eigenvalues of WᵀW, ascending.

    Raises:
        ValueError: NaN or infinite weights.
    """
    matrix = weight.detach().to("cpu").double()
    if not matrix.isfinite().all():
        raise ValueError("a weight matrix holds NaN or infinity; expected finite weights")
    values = torch.linalg.svdvals(matrix).square().numpy()[::-1]
    return values[values > 1e-12 * max(values[-1], 1e-300)]


def tail_exponent(eigenvalues: np.ndarray) -> float:
    """Return α of the power law p(λ) ∝ λ^{−α}, λ ≥ λ_min, that fits the tail best.

    α is the maximum-likelihood estimate 1 + k / Σ ln(λ_i / λ_min) over the k eigenvalues from λ_min
    up, λ_min the eigenvalue that minimises the Kolmogorov–Smirnov distance (Clauset, Shalizi &
    Newman 2009).

    Args:
        eigenvalues: positive, ascending, 8 or more.

    Raises:
        ValueError: fewer, or all equal.
    """
    if len(eigenvalues) < _TAIL or eigenvalues[0] == eigenvalues[-1]:
        raise ValueError(
            f"a tail needs {_TAIL} or more positive eigenvalues that differ; there are "
            f"{len(eigenvalues)}"
        )
    logs = np.log(eigenvalues)
    count = np.arange(len(logs), 0, -1)[: len(logs) - _TAIL + 1]  # in the tail from each λ_min up
    sums = np.cumsum(logs[::-1])[::-1][: len(count)] - count * logs[: len(count)]
    usable = sums > 0
    distances = [
        _distance(logs[start:] - logs[start], count[start] / sums[start]) if usable[start] else 2.0
        for start in range(len(count))
    ]
    best = int(np.argmin(distances))
    return float(1 + count[best] / sums[best])


def _distance(excess: np.ndarray, rate: float) -> float:
    """Return the Kolmogorov–Smirnov distance of ln(λ/λ_min) to an exponential of this rate."""
    expected = 1 - np.exp(-rate * excess)
    steps = np.arange(len(excess) + 1) / len(excess)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))
