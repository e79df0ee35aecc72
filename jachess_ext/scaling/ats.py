"""Accept-then-Stop (AtS): a line of ln L over ln D through the last points of a curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .predictive import Array, Index, Mask


@dataclass(frozen=True)
class Line:
    """Least-squares lines y = a + b x through the last `count` points of each curve.

    Attributes:
        intercept, slope: a and b, [n].
        count: number of points used, [n].
        visited: number of points that Algorithm 1 trains on, the points used and the first one
            rejected, [n].
        is_stopped: whether a point was rejected, [n].
        mean_x, square_x: mean of x and Σ (x − mean)² over the points used, [n].
        variance: Σ residual² / (count − 2), [n]; NaN for two points.
    """

    intercept: Array
    slope: Array
    count: Index
    visited: Index
    is_stopped: Mask
    mean_x: Array
    square_x: Array
    variance: Array


_ROUNDING = 1e-12  # rounding error of ln L: smaller deviations from a line never reject a point


def accept_then_stop(x: Array, y: Array, gamma: int = 3, tau: float = 5.0) -> Line:
    """Fit a line to the last points of each curve, accepted from the largest size down.

    Lin et al. 2024, "Accept then Stop", and LensLLM's Algorithm 1: after the first `gamma` points,
    the next point is accepted while it lies within `tau` standard deviations of the line through
    the points accepted so far.  Algorithm 1 as printed divides the deviation by √σ, which is not a
    standardised deviation and changes with the unit of ln L; here, as in AtS, it is divided by σ,
    the population standard deviation of the residuals of that line.

    As published, the smallest size is never used: if no point is rejected, the line goes through
    the points of all other sizes, unless there are only `gamma` points.

    Args:
        x: ln D, ascending, [m] or [n, m].
        y: ln L, [n, m].
        gamma: number of points accepted without a test, 3 or more (k in AtS).
        tau: largest accepted deviation from the line, in standard deviations (δ in AtS).

    Raises:
        ValueError: gamma below 3, tau not positive, or fewer than 2 sizes.
    """
    if gamma < 3:
        raise ValueError(f"gamma is {gamma}; expected 3 or more points for a line with residuals")
    if not tau > 0:
        raise ValueError(f"tau is {tau}; expected a positive number of standard deviations")
    num_curves, num_points = y.shape
    if num_points < 2:
        raise ValueError(f"a line needs 2 sizes or more, there are {num_points}")
    x = np.broadcast_to(x, y.shape)
    num_used = np.full(num_curves, num_points if num_points <= gamma else num_points - 1)
    is_stopped = np.zeros(num_curves, dtype=bool)
    for line_size in range(gamma, num_points):
        line, residual = line_through(x[:, -line_size:], y[:, -line_size:], 1.0, line_size)
        # Sizes descend, so that the pre-power phase, where the curve is flat, is reached after the
        # line through the power phase is known.  Algorithm 1 stops there.
        index = num_points - line_size - 1
        deviation = np.abs(y[:, index] - line[0] - line[1] * x[:, index])
        tolerance = np.maximum(tau * residual.std(-1), _ROUNDING)
        is_rejected = ~is_stopped & (deviation > tolerance)
        num_used = np.where(is_rejected, line_size, num_used)
        is_stopped |= is_rejected
    is_accepted = np.arange(num_points) >= num_points - num_used[:, None]
    (intercept, slope, mean_x, square_x), residual = line_through(x, y, is_accepted, num_used)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.where(num_used > 2, (residual**2).sum(-1) / (num_used - 2), np.nan)
    visited = np.where(is_stopped, num_used + 1, num_points)
    return Line(intercept, slope, num_used, visited, is_stopped, mean_x, square_x, variance)


def line_through(
    x: Array, y: Array, mask: Mask | float, count: Index | int
) -> tuple[tuple[Array, Array, Array, Array], Array]:
    """Fit a line to the masked points of each row by least squares.

    Args:
        x, y: [n, m].
        mask: which points are used, [n, m]; 1.0 for all.
        count: number of points used, [n] or one number.

    Returns:
        Intercept, slope, mean of x and Σ (x − mean)², [n] each; and the residuals, [n, m].
    """
    mean_x, mean_y = (x * mask).sum(-1) / count, (y * mask).sum(-1) / count
    centred = (x - mean_x[:, None]) * mask
    square_x = (centred**2).sum(-1)
    slope = (centred * y).sum(-1) / square_x
    intercept = mean_y - slope * mean_x
    residual = (y - intercept[:, None] - slope[:, None] * x) * mask
    return (intercept, slope, mean_x, square_x), residual
