"""Covariances of what a shape leaves over: noise, a drifting level, a drifting slope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array

PATTERNS = (
    (1.0, 0.0, 0.3),
    (1.0, 0.3, 0.5),
    (1.0, 1.0, 0.5),
    (1.0, 0.0, 1.0),
    (0.3, 1.0, 0.5),
    (0.3, 0.0, 1.0),
    (0.3, 1.0, 1.0),
    (0.3, 0.3, 2.0),
    (1.0, 1.0, 2.0),
)
"""White noise σ, level drift τ and slope drift κ in units of a curve's own scale.  The slope always
drifts: that a curve follows the rectified law over all further doublings is not believed."""


@dataclass(frozen=True)
class Kriging:
    """Gaussian prediction under k patterns at scale 1, with a free constant.

    Attributes:
        precision: P = K⁻¹ − K⁻¹ 1 1ᵀ K⁻¹ / (1ᵀ K⁻¹ 1), [k, m, m].
        log_weight: − ½ ln det K − ½ ln 1ᵀ K⁻¹ 1, [k].
        weights: best linear unbiased weights of the measured values for the target, [k, m].
        variance: of the prediction at the target, [k].
    """

    precision: Array
    log_weight: Array
    weights: Array
    variance: Array

    @classmethod
    def at(cls, sizes: Array, target: float) -> Kriging:
        """Covariances over doublings from the largest size, u = log₂(D / D_n).

        Level and slope walk away from D_n in both directions, so that a smaller subset more changes
        nothing for the others.  With a = min(|u|, |u'|), b = max(|u|, |u'|), for u and u' on one
        side of 0:  K = σ² 1[u = u'] + τ² a + κ² (a² (3b − a) / 6 + u u');  on two sides κ² u u'.
        The last term is the slope's deviation at D_n, worth one doubling's drift.  The target has
        no white noise.
        """
        u = np.log2(np.append(sizes, target) / sizes[-1])
        one_side = np.multiply.outer(u, u) > 0
        away = np.abs(u)
        a, b = np.minimum.outer(away, away), np.maximum.outer(away, away)
        level = np.where(one_side, a, 0.0)
        slope = np.where(one_side, a**2 * (3 * b - a) / 6, 0.0) + np.multiply.outer(u, u)
        white = np.diag(np.append(np.ones(len(sizes)), 0.0))
        return _solve(
            np.stack([s**2 * white + t**2 * level + k**2 * slope for s, t, k in PATTERNS])
        )


def _solve(covariance: Array) -> Kriging:
    measured, cross = covariance[:, :-1, :-1], covariance[:, :-1, -1]
    inverse = np.linalg.inv(measured)
    ones = inverse.sum(-1)
    total = ones.sum(-1)
    precision = inverse - ones[:, :, None] * ones[:, None, :] / total[:, None, None]
    log_norm = 0.5 * (np.linalg.slogdet(measured)[1] + np.log(total))
    simple = (inverse @ cross[..., None])[..., 0]
    missing = 1 - simple.sum(-1)
    weights = simple + missing[:, None] * ones / total[:, None]
    variance = covariance[:, -1, -1] - (cross * simple).sum(-1) + missing**2 / total
    return Kriging(precision, -log_norm, weights, variance)
