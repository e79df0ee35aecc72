"""What a loss curve is made of: a rectified shape from a fixed grid of parameters, and what that
leaves over, noise with a drifting level and slope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array

_LOG_TRANSITIONS = np.linspace(-9.0, 9.0, 13)
_LOG_EXPONENTS = np.linspace(np.log(0.06), np.log(1.6), 8)
_FLOORS = np.arange(6) * 0.18


@dataclass(frozen=True)
class Shapes:
    """ln L of every shape of the grid, up to a constant.

    With D_n the largest size measured, h(D) = 1 / (1 + (D/D_c)^β), ε = E / L(D_n) and
    q = ε / (1 − ε):  g(D) = ln(h(D) + q h(D_n)), which is ln L of the rectified law less its scale.

    Attributes:
        theta: (ln D_c/D_n, ln β, ε), [s, 3].  Relative to the largest size, neither the unit of
            sizes nor a smaller subset more or less moves the grid or its prior.
        measured: g at the sizes, [s, m].
        target: g at the target, [s].
    """

    theta: Array
    measured: Array
    target: Array

    @classmethod
    def at(cls, sizes: Array, target: float) -> Shapes:
        """The grid at sizes [m] (positive, the largest last) and at the target."""
        axes = np.meshgrid(_LOG_TRANSITIONS, _LOG_EXPONENTS, _FLOORS, indexing="ij")
        theta = np.stack([axis.ravel() for axis in axes], -1)
        logs = np.log(np.append(sizes, target) / sizes[-1])
        h = 1 / (1 + np.exp(np.exp(theta[:, 1:2]) * (logs - theta[:, :1])))
        q = theta[:, 2] / (1 - theta[:, 2])
        g = np.log(h + (q * h[:, -2])[:, None])
        return cls(theta, g[:, :-1], g[:, -1])


# ---- what a shape leaves over --------------------------------------------------------------

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
