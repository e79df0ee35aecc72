"""Shapes of loss curves: the rectified law up to its scale, on a fixed grid of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array

PARAMETERS = ("ln D_c / D_n", "ln beta", "epsilon")
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
