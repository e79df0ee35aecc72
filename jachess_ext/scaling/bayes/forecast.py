"""The forecast of "blend" is the posterior; its choice draws the differences towards today's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..predictive import Student
from ..registry import REGISTRY
from .posterior import posterior

_TODAY = 0.15
"""How far the differences between candidates are drawn towards those of their last losses: of many
candidates the one with the lowest forecast was forecast too low more often than too high."""

_DOF = 4.0


def forecast(sizes: Array, losses: Array, target: float) -> Student:
    """Predict ln L at the target.

    Student's t with 4 degrees of freedom around the posterior's mean, its standard deviation as
    the scale: real curves leave their law more often by far than a Gaussian allows.

    Args:
        sizes: positive, ascending, [m].
        losses: [n, m].
        target: above the last size.

    Raises:
        ValueError: fewer than three sizes, or a target that is not above them.
    """
    needed = REGISTRY["blend"].fewest_sizes(zero=False)
    if len(sizes) < needed:
        raise ValueError(
            f"blend needs {needed} sizes above 0 or more to see a curve bend; there are "
            f"{len(sizes)}"
        )
    if not target > sizes[-1]:
        raise ValueError(f"the target {target:g} is not above the largest size, {sizes[-1]:g}")
    y = np.log(losses)
    found = posterior(y, sizes, target)
    return Student(found.mean, np.sqrt(found.variance), np.full(len(y), _DOF))


def drawn(predicted: Student, losses: Array) -> Student:
    """What to choose by: the forecast, more cautious about how the candidates will differ.

    The differences between the locations (not their mean) are drawn by 0.15 towards the differences
    of the last losses; widths stay.

    Args:
        predicted: by `forecast`, n candidates.
        losses: as given to it, [n, m].
    """
    fall = np.log(losses[:, -1]) - predicted.location
    return replace(predicted, location=predicted.location + _TODAY * (fall - fall.mean()))
