"""The power law L = (B / D^β + E)^α (LensLLM, Eq. 2)."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from .base import Law, Parameter, Points, grid, lowest, weighted_mean

_SLOPES = (0.05, 0.1, 0.2, 0.4, 0.8)
_FLOORS = (0.0, 0.4, 0.8)
_ALPHAS = (0.12, 0.35, 1.0, 3.0)


class Power(Law):
    """L = (B / D^β + E)^α for D > 0.

    Coordinates: ln B, ln β, E, ln α.  With k = B / D^β and s = k / (k + E),

        ∂ln L/∂ln B = α s,  ∂ln L/∂ln β = −α s β ln D,  ∂ln L/∂E = α / (k + E),
        ∂ln L/∂ln α = ln L.
    """

    name = "power"
    parameters = (
        Parameter("B", 1e-8, 1e16),
        Parameter("beta", 0.01, 3.0),
        Parameter("E", 0.0, 1e6, log=False),
        Parameter("alpha", 0.1, 10.0),
    )

    def log_loss(self, u: Array, points: Points, gradient: bool = True) -> tuple[Array, Array]:
        logs = points.log_sizes
        beta, alpha = np.exp(u[:, 1:2]), np.exp(u[:, 3:4])
        part = np.exp(u[:, :1] - beta * logs)
        base = part + u[:, 2:3]
        value = alpha * np.log(base)
        if not gradient:
            return value, np.empty(0)
        share = alpha * part / base
        return value, np.stack((share, -share * beta * logs, alpha / base, value), -1)

    def candidates(self, points: Points, log_losses: Array, weights: Array) -> Array:
        # α β is the slope in ln L: grids of both, so that every α meets every slope.
        slope, share, alpha = grid(_SLOPES, _FLOORS, _ALPHAS).T
        beta = np.clip(slope / alpha, 0.01, 3.0)
        floor = share * lowest(log_losses, weights)[:, None] ** (1 / alpha)
        result = np.empty((*floor.shape, 4))
        result[..., 1], result[..., 2], result[..., 3] = np.log(beta), floor, np.log(alpha)
        base = np.exp(log_losses[:, None, :] / alpha[:, None]) - floor[..., None]
        lifted = np.log(base) + beta[:, None] * points.log_sizes[:, None, :]
        result[..., 0] = weighted_mean(lifted, weights[:, None, :])
        return result
