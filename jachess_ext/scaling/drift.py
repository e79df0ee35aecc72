"""The error of a law beyond the sizes measured, which widens intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .ats import line_through
from .laws import log_sizes
from .predictive import Array, Mask, Student

_DRIFT_FACTOR = 0.85
_DRIFT_DOF = 2.0
"""Chosen on LCDB's data sets whose number 4 divides, and FLAN's even rows."""
_RECENT = 3  # sizes that the slope of a curve's end is taken from


@dataclass(frozen=True)
class Drift:
    """A forecast error that grows with the distance from the largest size.

    No law is exact: from the largest size on, the slope d ln L / d ln D of a curve differs from the
    law's, and ln L is wrong by the difference times the reach, ln(size / largest size).  The size
    of the difference is the geometric mean of two estimates: the slope error in the backtest, which
    is of this curve but looks a short way ahead, and the slope at the curve's end, as a curve may
    stop falling or go on twice as steeply.  It grows with the reach relative to the span of the
    sizes measured:

        deviation of ln L = 0.85 √(slope · slope error of the backtest · reach / span) · reach

    Attributes:
        last: ln of each curve's largest size, [n].
        span: that minus ln of its smallest size above 0, [n].
        rate: standard deviation of the slope at a reach equal to the span, [n].
    """

    last: Array
    span: Array
    rate: Array

    def added_to(self, exact: Student, size: float) -> Student:
        """Return an exact law's distribution of ln L with the drift at a size.

        Degrees of freedom are those of Welch and Satterthwaite for the sum; the drift has two.
        """
        reach = np.maximum(np.log(size) - self.last, 0.0) if size > 0 else np.zeros(len(self.last))
        drift, noise = self.rate**2 * reach**3 / self.span, exact.scale**2
        dof = (noise + drift) ** 2 / (noise**2 / exact.dof + drift**2 / _DRIFT_DOF)
        return Student(exact.location, np.sqrt(noise + drift), dof)


def measure_drift(sizes: Array, losses: Array, counted: Mask, errors: Mapping[int, Array]) -> Drift:
    """Return the drift of every curve.

    Args:
        sizes: increasing, [m].
        losses: [n, m].
        counted: losses that count, at sizes above 0, two or more in every curve, [n, m].
        errors: by k: ln forecast − ln loss from the k-th size on, of the law fitted to those before
            it, [n, m − k].  Without any, the slope stands for the slope error of the backtest.
    """
    x = np.broadcast_to(log_sizes(sizes), counted.shape)
    recent = counted & (counted[:, ::-1].cumsum(-1)[:, ::-1] <= _RECENT)
    (_, slope, _, _), _ = line_through(x, np.log(losses), recent, recent.sum(-1))
    logs = np.where(counted, x, np.nan)
    squares = np.full((len(x), len(errors)), np.nan)
    for column, (k, error) in enumerate(errors.items()):
        reach = logs[:, k:] - np.nanmax(logs[:, :k], -1, keepdims=True)
        squares[:, column] = _nan_mean((error / reach) ** 2)
    backtest = np.sqrt(_nan_mean(squares))
    backtest = np.where(np.isnan(backtest), np.abs(slope), backtest)
    last = np.nanmax(logs, -1)
    rate = _DRIFT_FACTOR * np.sqrt(np.abs(slope) * backtest)
    return Drift(last, last - np.nanmin(logs, -1), rate)


def _nan_mean(values: Array) -> Array:
    """Return the mean over the last axis without NaN; NaN of nothing but NaN."""
    count = (~np.isnan(values)).sum(-1)
    return np.where(count > 0, np.nansum(values, -1) / np.maximum(count, 1), np.nan)
