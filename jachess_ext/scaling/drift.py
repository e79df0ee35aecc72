"""The error of a law beyond the largest measured size, which widens prediction intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .ats import line_through
from .laws import log_sizes
from .predictive import Array, Mask, Student

_DRIFT_FACTOR = 0.85
_DRIFT_DOF = 2.0
"""Factor of the deviation in `Drift`, and the degrees of freedom of the drift.  Chosen on LCDB's
data sets whose number is a multiple of 4, and FLAN's even rows."""
_RECENT = 3  # number of last sizes that the slope at a curve's end is fitted to


@dataclass(frozen=True)
class Drift:
    """A forecast error that grows with the distance from the largest size.

    No law is exact: beyond the largest size, the slope d ln L / d ln D of a curve differs from the
    law's, and ln L is wrong by that difference times the reach, ln(size / largest size).  The
    difference is estimated by the geometric mean of two numbers: the slope error in the backtest,
    which is measured on this curve but over a short reach, and the slope at the curve's end, as a
    curve may stop falling or fall twice as steeply.  It grows with the ratio of the reach to the
    span, the range of ln of the measured sizes:

        deviation of ln L = 0.85 √(slope · slope error of the backtest · reach / span) · reach

    Attributes:
        last: ln of each curve's largest size, [n].
        span: ln(largest / smallest positive size) of each curve, [n].
        rate: standard deviation of the slope's error at a reach equal to the span, [n].
    """

    last: Array
    span: Array
    rate: Array

    def widen(self, exact: Student, size: float) -> Student:
        """Add the drift at a size to `exact`, the distribution of ln L, [n], under an exact law.

        The degrees of freedom of the sum follow the Welch–Satterthwaite equation; the drift has
        two.
        """
        # `drift` and `noise` are variances.
        gap = np.maximum(np.log(size) - self.last, 0.0) if size > 0 else np.zeros(len(self.last))
        drift, noise = self.rate**2 * gap**3 / self.span, exact.scale**2
        dof = (noise + drift) ** 2 / (noise**2 / exact.dof + drift**2 / _DRIFT_DOF)
        return Student(exact.location, np.sqrt(noise + drift), dof)


def measure_drift(sizes: Array, losses: Array, counted: Mask, errors: Mapping[int, Array]) -> Drift:
    """Estimate the drift of every curve.

    Args:
        sizes: increasing, [m].
        losses: [n, m].
        counted: which losses are used: at least two of each curve, at sizes above 0, [n, m].
        errors: the backtest: k -> ln forecast − ln loss, [n, m − k], at the sizes after the first
            k, where the law is fitted to the first k sizes.  For a curve without a backtest, the
            slope at its end replaces the slope error.
    """
    x = np.broadcast_to(log_sizes(sizes), counted.shape)
    is_recent = counted & (counted[:, ::-1].cumsum(-1)[:, ::-1] <= _RECENT)
    (_, slope, _, _), _ = line_through(x, np.log(losses), is_recent, is_recent.sum(-1))
    counted_x = np.where(counted, x, np.nan)
    squared_slope_errors = np.full((len(x), len(errors)), np.nan)
    for column, (k, error) in enumerate(errors.items()):
        reach = counted_x[:, k:] - np.nanmax(counted_x[:, :k], -1, keepdims=True)
        squared_slope_errors[:, column] = _nan_mean((error / reach) ** 2)
    slope_error = np.sqrt(_nan_mean(squared_slope_errors))
    slope_error = np.where(np.isnan(slope_error), np.abs(slope), slope_error)
    last = np.nanmax(counted_x, -1)
    rate = _DRIFT_FACTOR * np.sqrt(np.abs(slope) * slope_error)
    return Drift(last, last - np.nanmin(counted_x, -1), rate)


def _nan_mean(values: Array) -> Array:
    """Return the mean of the values that are not NaN over the last axis; NaN if there are none."""
    count = (~np.isnan(values)).sum(-1)
    return np.where(count > 0, np.nansum(values, -1) / np.maximum(count, 1), np.nan)
