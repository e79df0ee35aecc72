"""The last points on a straight line in ln L over ln D, and where that line stops holding (AtS).

Lin et al. 2024, "Accept then Stop", and LensLLM's Algorithm 1: from the largest size downwards,
points are accepted while the next one lies within `tau` standard deviations of the line through
the points accepted so far, `gamma` of them at least.

Algorithm 1 as printed divides the deviation by √σ, which is no standardised deviation and changes
with the unit of ln L; here, as in AtS, it is divided by σ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array, Index, Mask


@dataclass(frozen=True)
class Line:
    """Least-squares lines y = a + b x through the last `count` points of each curve.

    Attributes:
        intercept, slope: a and b, [n].
        count: points used, [n].
        visited: points a run of Algorithm 1 trains on: those used and the one that stopped it, [n].
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
        """y at x: [n] or [k] -> [n, k]."""
        return self.intercept[:, None] + self.slope[:, None] * np.atleast_1d(x)

    def standard_error(self, x: Array) -> Array:
        """Standard deviation of a new point at x, [n, k]: the line's own error and the noise."""
        away = (np.atleast_1d(x) - self.mean_x[:, None]) ** 2 / self.square_x[:, None]
        return np.sqrt(self.variance[:, None] * (1 + 1 / self.count[:, None] + away))


def accept_then_stop(x: Array, y: Array, gamma: int = 3, tau: float = 5.0) -> Line:
    """Walk from the largest size down, and fit the points accepted.

    As published, the walk always ends one point short: with no point refused the line goes through
    all points but the smallest, unless there are only `gamma` of them.  The deviation is measured
    in population standard deviations of the residuals of the line before.

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
        line, residual = _least_squares(x[:, -size:], y[:, -size:], 1.0, size)
        place = points - size - 1
        deviation = np.abs(y[:, place] - line[0] - line[1] * x[:, place])
        refused = ~stopped & (deviation > tau * residual.std(-1))
        count = np.where(refused, size, count)
        stopped |= refused
    kept = np.arange(points) >= points - count[:, None]
    (intercept, slope, mean_x, square), residual = _least_squares(x, y, kept, count)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.where(count > 2, (residual**2).sum(-1) / (count - 2), np.nan)
    visited = np.where(stopped, count + 1, points)
    return Line(intercept, slope, count, visited, stopped, mean_x, square, variance)


def _least_squares(
    x: Array, y: Array, kept: Mask | float, count: Index | int
) -> tuple[tuple[Array, Array, Array, Array], Array]:
    """Intercept, slope, mean of x and Σ (x − mean)², [n] each; and the residuals, [n, m]."""
    mean_x, mean_y = (x * kept).sum(-1) / count, (y * kept).sum(-1) / count
    away = (x - mean_x[:, None]) * kept
    square = (away**2).sum(-1)
    slope = (away * y).sum(-1) / square
    intercept = mean_y - slope * mean_x
    residual = (y - intercept[:, None] - slope[:, None] * x) * kept
    return (intercept, slope, mean_x, square), residual
