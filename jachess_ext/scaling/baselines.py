"""Baselines of `blend`: AtS, NLPmetrics, and scores of frozen features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .._io import require
from .predictive import Array, Index, Mask

if TYPE_CHECKING:
    from torch import Tensor


# AtS --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Least-squares lines y = a + b x through the last `count` points of each curve.

    Attributes:
        intercept, slope: a and b, [n].
        count: points used, [n].
        visited: points a run of Algorithm 1 trains on: those used and the first refused, [n].
        stopped: whether a point was refused, [n]; if not, the walk ended at the smallest size.
        mean_x, square_x: mean of x and Σ (x − mean)² over the points used, [n].
        variance: Σ residual² / (count − 2), [n]; NaN for two points.
    """

    intercept: Array
    slope: Array
    count: Index
    visited: Index
    stopped: Mask
    mean_x: Array
    square_x: Array
    variance: Array

    def predict(self, x: Array) -> Array:
        """Return y at x: [n] or [k] -> [n, k]."""
        return self.intercept[:, None] + self.slope[:, None] * np.atleast_1d(x)

    def standard_error(self, x: Array) -> Array:
        """Return the standard deviation of a new point at x, [n, k]: the line's and the noise."""
        away = (np.atleast_1d(x) - self.mean_x[:, None]) ** 2 / self.square_x[:, None]
        return np.sqrt(self.variance[:, None] * (1 + 1 / self.count[:, None] + away))


_ROUNDING = 1e-12
"""In ln L: points of an exact line deviate by as much, and none is refused for it."""


def accept_then_stop(x: Array, y: Array, gamma: int = 3, tau: float = 5.0) -> Line:
    """Walk from the largest size down, and fit the points accepted.

    Lin et al. 2024, "Accept then Stop", and LensLLM's Algorithm 1: points are accepted while the
    next lies within `tau` standard deviations of the line through those accepted so far, `gamma` at
    least.  Algorithm 1 as printed divides the deviation by √σ, which is no standardised deviation
    and changes with the unit of ln L; here, as in AtS, it is divided by σ, the population standard
    deviation of the residuals of the line before.

    As published, the walk always ends a point short: with no point refused the line goes through
    all points but the smallest, unless there are only `gamma` of them.

    Args:
        x: ln D, ascending, [m] or [n, m].
        y: ln L, [n, m].
        gamma: points accepted unseen; 3 or more (a line through two has no residual).
        tau: deviations that stop the walk (AtS: k = gamma, δ = tau).

    Raises:
        ValueError: gamma below 3, tau not positive, or fewer than 2 points.
    """
    if gamma < 3:
        raise ValueError(f"gamma is {gamma}; expected 3 or more points for a line with residuals")
    if not tau > 0:
        raise ValueError(f"tau is {tau}; expected a positive number of standard deviations")
    curves, points = y.shape
    if points < 2:
        raise ValueError(f"a line needs 2 sizes or more, there are {points}")
    x = np.broadcast_to(x, y.shape)
    count = np.full(curves, points if points <= gamma else points - 1)
    stopped = np.zeros(curves, dtype=bool)
    for size in range(gamma, points):
        line, residual = line_through(x[:, -size:], y[:, -size:], 1.0, size)
        place = points - size - 1
        deviation = np.abs(y[:, place] - line[0] - line[1] * x[:, place])
        allowed = np.maximum(tau * residual.std(-1), _ROUNDING)
        refused = ~stopped & (deviation > allowed)
        count = np.where(refused, size, count)
        stopped |= refused
    kept = np.arange(points) >= points - count[:, None]
    (intercept, slope, mean_x, square), residual = line_through(x, y, kept, count)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.where(count > 2, (residual**2).sum(-1) / (count - 2), np.nan)
    visited = np.where(stopped, count + 1, points)
    return Line(intercept, slope, count, visited, stopped, mean_x, square, variance)


def line_through(
    x: Array, y: Array, kept: Mask | float, count: Index | int
) -> tuple[tuple[Array, Array, Array, Array], Array]:
    """Fit a line of least squares to the `count` points of each row that are `kept`.

    Returns:
        Intercept, slope, mean of x and Σ (x − mean)², [n] each; and the residuals, [n, m].
    """
    mean_x, mean_y = (x * kept).sum(-1) / count, (y * kept).sum(-1) / count
    away = (x - mean_x[:, None]) * kept
    square = (away**2).sum(-1)
    slope = (away * y).sum(-1) / square
    intercept = mean_y - slope * mean_x
    residual = (y - intercept[:, None] - slope[:, None] * x) * kept
    return (intercept, slope, mean_x, square), residual


# NLPmetrics -------------------------------------------------------------------------------------

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


def spectrum(weight: Tensor) -> Array:
    """Return the positive eigenvalues of WᵀW, ascending.

    Raises:
        ValueError: NaN or infinite weights.
    """
    matrix = weight.detach().to("cpu").double()
    if not matrix.isfinite().all():
        raise ValueError("a weight matrix holds NaN or infinity; expected finite weights")
    values = require("torch").linalg.svdvals(matrix).square().numpy()[::-1]
    return values[values > 1e-12 * max(values[-1], 1e-300)]


def tail_exponent(eigenvalues: Array) -> float:
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


def _distance(excess: Array, rate: float) -> float:
    """Return the Kolmogorov–Smirnov distance of ln(λ/λ_min) to an exponential of this rate."""
    expected = 1 - np.exp(-rate * excess)
    steps = np.arange(len(excess) + 1) / len(excess)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))


FEATURE_SCORES = ("logme", "hscore", "knn")
"""Scores of frozen features that `select` ranks by where it is given them."""
