"""The predictive distribution at the target: a mixture over shapes, noise and jumps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from .hierarchy import covariates, features, shared_prior
from .residuals import Kriging
from .shapes import Shapes

_CELLS = 400_000  # numbers in one block of (covariance, curve, shape)


@dataclass(frozen=True)
class Posterior:
    """Mean and variance of ln L at the target for every curve, [n]."""

    mean: Array
    variance: Array


def posterior(y: Array, sizes: Array, target: float) -> Posterior:
    """Predict ln L at the target from ln L at the sizes.

    y_i = c_i + g_shape + r with a flat prior on c_i, r Gaussian (`Kriging`), shapes a priori as
    the candidates share them (`shared_prior`).  All shapes and covariances are summed over.

    Args:
        y: [n, m].
        sizes: positive, ascending, [m].
        target: above the last size.
    """
    shapes, kriging = Shapes.at(sizes, target), Kriging.at(sizes, target)
    model = _Model(y, shapes, kriging)
    prior = shared_prior(model.evidence(), features(shapes.theta, y), covariates(y))
    return model.predict(prior)


class _Model:
    """Gaussian evidence and predictions, in blocks of covariances."""

    def __init__(self, y: Array, shapes: Shapes, kriging: Kriging) -> None:
        # The constant is free: differences to the last size keep the quadratic forms exact.
        self.last = y[:, -1]
        self.y = y - y[:, -1:]
        self.g = shapes.measured - shapes.measured[:, -1:]
        self.target = shapes.target - shapes.measured[:, -1]
        self.kriging = kriging

    def _blocks(self) -> Iterator[tuple[slice, Array]]:
        """ln p(y_i, covariance | shape) up to a constant, [k, n, s] a block.

        −½ rᵀ P r for r = y − g, with P 1 = 0.
        """
        step = max(1, _CELLS // (len(self.y) * len(self.g)))
        for first in range(0, len(self.kriging.variance), step):
            block = slice(first, first + step)
            precision = self.kriging.precision[block]
            across = precision @ self.g.T
            of_curve = self.kriging.log_weight[block][:, None] - 0.5 * np.einsum(
                "nm,kmp,np->kn", self.y, precision, self.y
            )
            of_shape = -0.5 * (self.g.T * across).sum(1)
            logs = self.y @ across
            logs += of_curve[:, :, None]
            logs += of_shape[:, None, :]
            yield block, logs

    def evidence(self) -> Array:
        """ln Σ over covariances, [n, s]."""
        total = np.full((len(self.y), len(self.g)), -np.inf)
        for _, logs in self._blocks():
            top = np.maximum(logs.max(0), total)
            logs -= top
            total = top + np.log(np.exp(total - top) + np.exp(logs, out=logs).sum(0))
        self._norm = total
        return total

    def predict(self, log_prior: Array) -> Posterior:
        """First two moments of the mixture whose components have mean data_kn + shape_ks."""
        joint = self._norm + log_prior
        top = joint.max(-1, keepdims=True)
        shift = log_prior - top - np.log(np.exp(joint - top).sum(-1, keepdims=True))
        mean, square = np.zeros(len(self.y)), np.zeros(len(self.y))
        for block, logs in self._blocks():
            logs += shift
            weights = np.exp(logs, out=logs)
            k = self.kriging.weights[block]
            data, shape = k @ self.y.T, self.target - k @ self.g.T
            powers = np.stack([np.ones_like(shape), shape, shape**2], -1)
            total, first, second = np.moveaxis(weights @ powers, -1, 0)
            mean += (total * data + first).sum(0)
            spread = self.kriging.variance[block][:, None]
            square += (total * (data**2 + spread) + 2 * data * first + second).sum(0)
        return Posterior(mean + self.last, square - mean**2)
