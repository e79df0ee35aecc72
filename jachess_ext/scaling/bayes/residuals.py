"""Covariances of what a shape leaves over: noise, drifting level, drifting slope, one jump."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from ..arrays import Array

_WHITE = (0.003, 0.008, 0.02)
_LEVEL = (0.0, 0.006, 0.02)
# Never 0: that a curve follows the rectified law exactly over all further doublings is not
# believed.  With 0 among them, curves that happen to fit well gave intervals far too narrow.
_SLOPE = (0.005, 0.01, 0.02)
_JUMP = 0.1
_JUMP_PROBABILITY = 0.01  # of every location


@dataclass(frozen=True)
class Kriging:
    """Gaussian prediction under k covariances, with a free constant (generalised least squares).

    Attributes:
        precision: P = K⁻¹ − K⁻¹ 1 1ᵀ K⁻¹ / (1ᵀ K⁻¹ 1), [k, m, m].
        log_weight: ln prior probability − ½ ln det K − ½ ln 1ᵀ K⁻¹ 1, [k].
        weights: best linear unbiased weights of the measured values for the target, [k, m].
        variance: of the prediction at the target, a jump on the way there included, [k].
    """

    precision: Array
    log_weight: Array
    weights: Array
    variance: Array

    @classmethod
    def at(cls, sizes: Array, target: float) -> Kriging:
        """Covariances over doublings of the data, j = log₂(D / D_first).

        K_jj' = σ² 1[j = j'] + τ² a + κ² a² (3b − a) / 6 + J² 1[j, j' ≥ ℓ], a = min(j, j'),
        b = max(j, j'), for every (σ, τ, κ) of a grid, equally probable, and every location ℓ of a
        jump: none, or a measured size from the second on.  The target is one more index without
        white noise; each doubling on the way to it may hold a jump as well.
        """
        j = np.log2(np.append(sizes, target) / sizes[0])
        drift = np.minimum.outer(j, j)
        bend = drift**2 * (3 * np.maximum.outer(j, j) - drift) / 6
        white = np.diag(np.append(np.ones(len(sizes)), 0.0))
        smooth = np.stack(
            [
                s**2 * white + t**2 * drift + k**2 * bend
                for s, t, k in product(_WHITE, _LEVEL, _SLOPE)
            ]
        )
        places = np.append(np.inf, j[1:-1])
        after = j >= places[:, None]
        jumps = _JUMP**2 * (after[:, :, None] & after[:, None, :])
        probability = np.full(len(places), _JUMP_PROBABILITY)
        probability[0] = 1 - probability[1:].sum()
        covariance = (smooth[:, None] + jumps).reshape(-1, len(j), len(j))
        log_prior = np.tile(np.log(probability), len(smooth))
        ahead = _JUMP_PROBABILITY * np.ceil(j[-1] - j[-2]) * _JUMP**2
        return _solve(covariance, log_prior, ahead)


def _solve(covariance: Array, log_prior: Array, ahead: float) -> Kriging:
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
    return Kriging(precision, log_prior - log_norm, weights, np.maximum(variance, 0.0) + ahead)
