"""The predictive distribution at the target, a mixture over shapes and kinds of noise, and what is
made of it: the forecast, and the choice, which draws the differences towards today's losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Array
from ..predictive import Student
from ..registry import REGISTRY
from . import hierarchy
from .curves import Kriging, Shapes
from .hierarchy import log_marginal, log_normal, log_sum

_TODAY = 0.15
"""How far the differences between candidates are drawn towards those of their last losses: of many
candidates the one with the lowest forecast was forecast too low more often than too high."""

_DOF, _SCALE = 3.0, 0.906
"""Of Student's t, the scale in standard deviations: real curves leave their law more often by far
than a Gaussian allows, and most stay nearer to it."""


@dataclass(frozen=True)
class Posterior:
    """Mean and variance of ln L at the target for every curve, [n]."""

    mean: Array
    variance: Array


def posterior(y: Array, sizes: Array, target: float) -> Posterior:
    """Predict ln L at the target from ln L at the sizes.

    y_i = c_i + g_shape + s_i r with a flat prior on c_i, r Gaussian (`Kriging`) and s_i around a
    scale that the candidates share.  Shapes and kinds of noise are a priori as the candidates share
    them (`hierarchy`), and summed over.

    Args:
        y: [n, m].
        sizes: positive, ascending, [m].
        target: above the last size.
    """
    shapes, kriging = Shapes.at(sizes, target), Kriging.at(sizes, target)
    squares = residual_squares(y, shapes, kriging)
    vague = log_normal(shapes.theta[None], hierarchy.MEAN[None], hierarchy.SPREAD)[0]
    known = (squares, kriging.log_weight, len(sizes))
    scale = hierarchy.table_scale(*known, vague)
    logs = log_marginal(*known, scale)
    kinds = hierarchy.kind_shares(log_sum(logs + vague, 2))
    logs += np.log(kinds)[:, None, None]
    features, x = hierarchy.features(shapes.theta, y), hierarchy.covariates(y)
    logs += hierarchy.shared_prior(log_sum(logs, 0), features, x)
    return mixture(y, shapes, kriging, squares, scale, logs)


def residual_squares(y: Array, shapes: Shapes, kriging: Kriging) -> Array:
    """Q = rᵀ P r for r = y_i − g_shape, [k, n, s].

    Both are taken relative to the last size, which P does not see, so that the differences of large
    numbers stay exact.
    """
    curve, shape = y - y[:, -1:], shapes.measured - shapes.measured[:, -1:]
    precision = kriging.precision
    of_curve = np.einsum("nm,kmp,np->kn", curve, precision, curve)
    of_shape = np.einsum("sm,kmp,sp->ks", shape, precision, shape)
    across = curve @ (precision @ shape.T)
    return np.maximum(of_curve[:, :, None] + of_shape[:, None, :] - 2 * across, 0.0)


def mixture(
    y: Array, shapes: Shapes, kriging: Kriging, squares: Array, scale: float, logs: Array
) -> Posterior:
    """First two moments of the mixture with log weights `logs` ([k, n, s], up to a constant).

    A component is Student's t around g(D) + the kriged residual; its variance is that of the
    pattern times the mean of the curve's squared scale given the shape, (b + Q/2) / (A − 1).
    """
    weights = np.exp(logs - log_sum(log_sum(logs, 2), 0)[None, :, None])
    last, base = y[:, -1], shapes.measured[:, -1:]
    k = kriging.weights
    data = k @ (y - last[:, None]).T
    shape = shapes.target - base[:, 0] - k @ (shapes.measured - base).T
    centre = data[:, :, None] + shape[:, None, :]
    mean = (weights * centre).sum((0, 2))
    b = hierarchy.SHAPE * scale**2
    square = (b + squares / 2) / (hierarchy.SHAPE + (y.shape[1] - 1) / 2 - 1)
    spread = square * kriging.variance[:, None, None] + (centre - mean[None, :, None]) ** 2
    return Posterior(mean + last, (weights * spread).sum((0, 2)))


def forecast(sizes: Array, losses: Array, target: float) -> Student:
    """Predict ln L at the target.

    Student's t around the posterior's mean (`_DOF`, `_SCALE`).

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
    return Student(found.mean, _SCALE * np.sqrt(found.variance), np.full(len(y), _DOF))


def cautious(predicted: Student, losses: Array) -> Student:
    """What to choose by: the forecast, more cautious about how the candidates will differ.

    The differences between the locations (not their mean) are drawn by 0.15 towards the differences
    of the last losses; widths stay.

    Args:
        predicted: by `forecast`, n candidates.
        losses: as given to it, [n, m].
    """
    fall = np.log(losses[:, -1]) - predicted.location
    return replace(predicted, location=predicted.location + _TODAY * (fall - fall.mean()))
