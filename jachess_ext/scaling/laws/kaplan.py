"""Kaplan's joint law L(N, D) = ((N_c / N)^(α_N/α_D) + D_c / D)^α_D (Kaplan et al. 2020, Eq. 1.5).

LensLLM's Eq. 1 writes it with one more exponent β, which is left out here: the published law.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from .base import Law, Parameter, Points, grid, weighted_mean


class Kaplan(Law):
    """One law for models of different size N: all their losses are one curve.

    Coordinates: ln N_c, ln D_c, ln α_N, ln α_D.  With a = (N_c/N)^(α_N/α_D), c = D_c/D and
    ρ = α_N/α_D,

        ∂ln L/∂ln N_c = α_N a/(a+c),                    ∂ln L/∂ln D_c = α_D c/(a+c),
        ∂ln L/∂ln α_N = α_N (ln N_c − ln N) a/(a+c),    ∂ln L/∂ln α_D = ln L − ∂ln L/∂ln α_N.
    """

    name = "kaplan"
    parameters = (
        Parameter("N_c", 1e-12, 1e40),
        Parameter("D_c", 1e-12, 1e40),
        Parameter("alpha_N", 1e-3, 3.0),
        Parameter("alpha_D", 1e-3, 3.0),
    )

    def log_loss(self, u: Array, points: Points, gradient: bool = True) -> tuple[Array, Array]:
        models, sizes = _log_models(points), points.log_sizes
        alpha_n, alpha_d = np.exp(u[:, 2:3]), np.exp(u[:, 3:4])
        model_term = alpha_n / alpha_d * (u[:, :1] - models)
        data_term = u[:, 1:2] - sizes
        total = np.logaddexp(model_term, data_term)
        value = alpha_d * total
        if not gradient:
            return value, np.empty(0)
        share = np.exp(model_term - total)
        by_alpha_n = alpha_d * model_term * share
        columns = (alpha_n * share, alpha_d * (1 - share), by_alpha_n, value - by_alpha_n)
        return value, np.stack(columns, -1)

    def candidates(self, points: Points, log_losses: Array, weights: Array) -> Array:
        alphas = (0.03, 0.08, 0.2, 0.5)
        alpha_n, alpha_d, share = grid(alphas, alphas, (0.2, 0.5, 0.8)).T
        centre = weighted_mean(log_losses, weights)[:, None] / alpha_d
        result = np.empty((*centre.shape, 4))
        models = weighted_mean(_log_models(points), weights)[:, None]
        sizes = weighted_mean(points.log_sizes, weights)[:, None]
        result[..., 0] = models + alpha_d / alpha_n * (centre + np.log(share))
        result[..., 1] = sizes + centre + np.log(1 - share)
        result[..., 2], result[..., 3] = np.log(alpha_n), np.log(alpha_d)
        return result


def _log_models(points: Points) -> Array:
    if points.parameters is None:
        raise ValueError(
            "Kaplan's law needs the models' sizes; pass parameters=, one number of parameters N "
            "for each row of losses"
        )
    return np.log(points.parameters)
