"""The rectified scaling law L = B / (D_l + D^β) + E (Lin et al. 2024, Eq. 4)."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from .base import Law, Parameter, Points, grid, lowest, weighted_mean

SCALE = Parameter("B", 1e-8, 1e16)
EXPONENT = Parameter("beta", 0.01, 3.0)
FLOOR = Parameter("E", 0.0, 1e6, log=False)

_BETAS = (0.1, 0.2, 0.35, 0.6, 1.0)
_TRANSITIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FLOORS = (0.0, 0.4, 0.8)
_MARGIN = np.log(8.0)


class Rectified(Law):
    """L = B / (D_l + D^β) + E: flat up to about D* = D_l^(1/β), then a power law, then E.

    Coordinates: ln B, ln D_l, ln β, E.  With k = B / (D_l + D^β) and s = k / L,

        ∂ln L/∂ln B = s,   ∂ln L/∂ln D_l = −s D_l / (D_l + D^β),
        ∂ln L/∂ln β = −s D^β β ln D / (D_l + D^β),   ∂ln L/∂E = 1 / L.

    The transition is where the two terms of the denominator balance: D* = D_l^(1/β).
    """

    name = "rectified"
    reads_zero = True

    def __init__(self, shift: Parameter | None = None) -> None:
        """`shift` stands in for D_l: its name and bounds."""
        self.parameters = (SCALE, shift or Parameter("D_l", 1e-13, 1e16), EXPONENT, FLOOR)

    def log_loss(self, u: Array, points: Points, gradient: bool = True) -> tuple[Array, Array]:
        power, slope = points.powers(np.exp(u[:, 2]))
        shift, shift_slope = self._shift(u, points)
        below = shift + power
        part = np.exp(u[:, 0])[:, None] / below
        loss = part + u[:, 3:]
        if not gradient:
            return np.log(loss), np.empty(0)
        share = part / loss
        columns = (share, -share * shift_slope / below, -share * slope / below, 1 / loss)
        return np.log(loss), np.stack(columns, -1)

    def _shift(self, u: Array, points: Points) -> tuple[Array, Array]:
        """D_l and its derivative in its coordinate, [n, 1] or [n, m]."""
        shift = np.exp(u[:, 1])[:, None]
        return shift, shift

    def candidates(self, points: Points, log_losses: Array, weights: Array) -> Array:
        beta, place, share = grid(_BETAS, _TRANSITIONS, _FLOORS).T
        counted = np.where((weights > 0) & (points.sizes > 0), points.log_sizes, np.nan)
        first, last = np.nanmin(counted, -1) - _MARGIN, np.nanmax(counted, -1) + _MARGIN
        transition = first[:, None] + place * (last - first)[:, None]
        floor = share * lowest(log_losses, weights)[:, None]
        result = np.empty((*transition.shape, 4))
        bounds = self.parameters[1]
        result[..., 1] = np.clip(beta * transition, np.log(bounds.low), np.log(bounds.high))
        result[..., 2] = np.log(beta)
        result[..., 3] = floor
        result[..., 0] = scale_for(result, points, log_losses, weights)
        return result

    def log_transition(self, u: Array) -> tuple[Array, Array]:
        inverse = np.exp(-u[:, 2])
        value = u[:, 1] * inverse
        gradient = np.zeros_like(u)
        gradient[:, 1] = inverse
        gradient[:, 2] = -value
        return value, gradient


def scale_for(u: Array, points: Points, log_losses: Array, weights: Array) -> Array:
    """ln B as the mean of ln(L − E) + ln(D_l + D^β): exact where the other three are; [n, k]."""
    size = points.sizes[:, None, :]
    power = np.where(size > 0, np.exp(np.exp(u[..., 2:3]) * points.log_sizes[:, None, :]), 0.0)
    excess = np.log(np.exp(log_losses)[:, None, :] - u[..., 3:4])
    return weighted_mean(excess + np.log(np.exp(u[..., 1:2]) + power), weights[:, None, :])
