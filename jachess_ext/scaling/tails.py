"""NLPmetrics, a baseline of LensLLM: heavy tails of the spectra of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from .predictive import Array

_FEWEST_ROWS = 16  # a smaller matrix has too few singular values for a tail
_FEWEST_TAIL = 8  # eigenvalues that a tail is fitted to


def mean_tail_exponent(weights: Mapping[str, Tensor]) -> float:
    """Return the mean tail exponent α of a model's weight matrices: lower is better.

    It ranks models without data (Martin, Peng & Mahoney 2021; Yang et al. 2023).

    Args:
        weights: the state dict; matrices with at least 16 rows and columns count.

    Raises:
        ValueError: no matrix counts, or a matrix is not finite or has no tail.

    Examples:
        >>> round(jx.scaling.mean_tail_exponent({"weight": torch.diag(torch.arange(1.0, 41))}), 1)
        3.4
    """
    exponents = []
    for name, weight in weights.items():
        if weight.ndim != 2 or min(weight.shape) < _FEWEST_ROWS:
            continue
        matrix = weight.detach().double()
        if not matrix.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity; expected finite weights")
        values = np.linalg.svd(matrix.cpu().numpy(), compute_uv=False)[::-1] ** 2
        exponents.append(tail_exponent(values[values > 1e-12 * values[-1]]))
    if not exponents:
        raise ValueError(f"no weight matrix has {_FEWEST_ROWS} rows and columns; expected one")
    return float(np.mean(exponents))


def tail_exponent(eigenvalues: Array) -> float:
    """Return α of the power law p(λ) ∝ λ^{−α}, λ ≥ λ_min, that fits the tail best.

    α = 1 + k / Σ ln(λ_i / λ_min) over the k eigenvalues from λ_min up is the maximum-likelihood
    estimate, and λ_min the eigenvalue with the least Kolmogorov–Smirnov distance (Clauset, Shalizi
    & Newman 2009).

    Args:
        eigenvalues: positive, ascending, [n].

    Raises:
        ValueError: there are fewer than 8 eigenvalues, or all are equal.
    """
    logs, best = np.log(eigenvalues), (np.inf, np.nan)
    for start in range(len(logs) - _FEWEST_TAIL + 1):
        excess = logs[start:] - logs[start]
        if excess[-1] <= 0:
            continue
        rate, steps = 1 / excess.mean(), np.arange(len(excess) + 1) / len(excess)
        gaps = (1 - np.exp(-rate * excess))[:, None] - np.stack([steps[1:], steps[:-1]], -1)
        best = min(best, (float(np.abs(gaps).max()), float(1 + rate)))
    if np.isnan(best[1]):
        raise ValueError(
            f"a tail needs {_FEWEST_TAIL} eigenvalues or more that differ; there are {len(logs)}"
        )
    return best[1]
