"""The forecast of "bayes": posterior and last-points line, half and half, with honest intervals."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..loglinear import accept_then_stop
from ..predictive import Student
from .posterior import posterior

SMALLEST = 3
"""Sizes needed: a level, a slope and a bend."""

_LINE_TAU = 1.0  # AtS with δ = 1, close to a line through the last three points


def forecast(sizes: Array, losses: Array, target: float) -> Student:
    """Predict ln L at the target.

    The location is the mean of the posterior's mean and the continued line of the last points: the
    two err differently, and equal weights need no tuning.  The spread is the posterior's around
    that location, √(variance + (mean − location)²), so that disagreement widens it; the shape is
    Gaussian.

    Args:
        sizes: positive, ascending, [m].
        losses: [n, m].
        target: above the last size.

    Raises:
        ValueError: fewer than three sizes, or a target that is not above them.
    """
    if len(sizes) < SMALLEST:
        raise ValueError(
            f"bayes needs {SMALLEST} sizes above 0 or more to see a curve bend; there are "
            f"{len(sizes)}"
        )
    if not target > sizes[-1]:
        raise ValueError(f"the target {target:g} is not above the largest size, {sizes[-1]:g}")
    y = np.log(losses)
    found = posterior(y, sizes, target)
    line = accept_then_stop(np.log(sizes), y, tau=_LINE_TAU).predict(np.log([target]))[:, 0]
    location = (found.mean + line) / 2
    scale = np.sqrt(found.variance + (found.mean - location) ** 2)
    return Student(location, scale, np.full(len(y), np.inf))
