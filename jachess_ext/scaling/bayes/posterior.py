"""The predictive distribution at the target: a mixture over shapes and kinds of noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from . import hierarchy
from .hierarchy import log_marginal, log_normal, log_sum
from .residuals import Kriging
from .shapes import Shapes


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
