"""How far a curve leaves its law beyond the sizes measured."""

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
    """An error of the forecast that grows with the way from the largest size.

    No law is exact: from the largest size on a curve's slope d ln L / d ln D is another than the
    law's, and ln L is wrong by the difference times the reach, ln(size / largest size).  Two things
    tell how large the difference may be: that of a backtest, which knows the curve but looks a
    short way ahead, and the slope of the curve's end, as a curve may stop falling or go on twice as
    steeply.  Their geometric mean counts, and more the longer the reach is beside the span of the
    sizes measured:

        deviation of ln L = 0.85 √(slope · backtest's difference · reach / span) · reach

    Attributes:
        last: logarithm of each curve's largest size, [n].
        span: that minus the logarithm of its smallest size above 0, [n].
        rate: deviation of the slope at a reach as long as the span, [n].
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
            it, [n, m − k].  The slope counts for the backtest's difference where there is none.
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
    """Return the mean over the last axis of what is not NaN; NaN where all is."""
    count = (~np.isnan(values)).sum(-1)
    return np.where(count > 0, np.nansum(values, -1) / np.maximum(count, 1), np.nan)
