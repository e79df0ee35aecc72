"""How far a curve leaves its law beyond the sizes measured, told by how far it did within them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .baselines import line_through
from .predictive import Array, Student

_SHARE = 0.85
_DOF = 2.0
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

    def added_to(self, own: Student, size: float) -> Student:
        """Return a law's own distribution of ln L with the drift at a size.

        Degrees of freedom are those of Welch and Satterthwaite for the sum; the drift has two.
        """
        reach = np.maximum(np.log(size) - self.last, 0.0) if size > 0 else np.zeros(len(self.last))
        square, own_square = self.rate**2 * reach**3 / self.span, np.maximum(own.scale, 1e-12) ** 2
        total = own_square + square
        dof = total**2 / (own_square**2 / own.dof + square**2 / _DOF)
        return Student(own.location, np.sqrt(total), dof)


def measure_drift(
    sizes: Array, losses: Array, weights: Array, errors: Mapping[int, Array]
) -> Drift:
    """Return the drift of every curve.

    Args:
        sizes: increasing, [m]; two above 0 count in every curve.
        losses: [n, m].
        weights: 0 leaves a loss out, [n, m].
        errors: by k: ln forecast − ln loss from the k-th size on, of the law fitted to those before
            it, [n, m − k].  The slope counts for the backtest's difference where there is none.
    """
    counted = (weights > 0) & (sizes > 0)
    x = np.broadcast_to(np.log(np.where(sizes > 0, sizes, 1.0)), counted.shape)
    recent = counted & (counted[:, ::-1].cumsum(-1)[:, ::-1] <= _RECENT)
    (_, slope, _, _), _ = line_through(x, np.log(losses), recent, recent.sum(-1))
    known = np.where(counted, x, np.nan)
    squares = np.full((len(x), len(errors)), np.nan)
    for place, (k, error) in enumerate(errors.items()):
        reach = known[:, k:] - np.nanmax(known[:, :k], -1, keepdims=True)
        squares[:, place] = _mean((error / reach) ** 2)
    backtest = np.sqrt(_mean(squares))
    backtest = np.where(np.isnan(backtest), np.abs(slope), backtest)
    last = np.nanmax(known, -1)
    rate = _SHARE * np.sqrt(np.abs(slope) * backtest)
    return Drift(last, last - np.nanmin(known, -1), rate)


def _mean(values: Array) -> Array:
    """Return the mean over the last axis of what is not NaN; NaN where all is."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, values, 0.0).sum(-1) / np.maximum(count, 1), np.nan)
