"""The prior over shapes that the candidates share, learnt from all their curves by EM."""

from __future__ import annotations

import numpy as np

from ..arrays import Array

_MEAN = np.array([np.log(1e4), np.log(0.4), 0.4])
_SPREAD = np.diag([4.0, 0.5, 0.3]) ** 2
_WORTH = 5.0  # models
_STEPS = 20
_LEVEL_POINTS = 5


def features(theta: Array, y: Array) -> Array:
    """What is shared between curves: (ln D_c, ln β, E / median L(D_n)), [n, s, 3].

    The floor E = ε L(D_n) is shared as a loss, not as a share of each model's own loss: the test
    set is the same for all, and so is most of what cannot be learnt of it.

    Args:
        theta: (ln D_c, ln β, ε), [s, 3].
        y: ln L, [n, m].
    """
    last = np.exp(y[:, -1])
    result = np.repeat(theta[None], len(y), axis=0)
    result[:, :, 2] *= (last / np.median(last))[:, None]
    return result


def covariates(y: Array) -> Array:
    """X: 1 and the centred mean of the first five ln L, [n, 2]."""
    level = y[:, :_LEVEL_POINTS].mean(-1)
    return np.stack([np.ones(len(y)), level - level.mean()], -1)


def shared_prior(log_evidence: Array, shapes: Array, x: Array) -> Array:
    """ln p(shape) for every curve, [n, s]: N(X_i C, S) on the grid, after 20 steps of EM.

    C and S start at, and are pulled to, vague values worth five models:
    C⁰ = (ln 10⁴, ln .4, .4; 0), S⁰ = diag(4², .5², .3²).

    Args:
        log_evidence: ln p(y_i | shape), [n, s].
        shapes: [n, s, 3], see `features`.
        x: [n, 2].
    """
    start = np.stack([_MEAN, np.zeros(3)])
    coefficients, spread = start, _SPREAD
    normal = x.T @ x + _WORTH * np.eye(x.shape[1])
    for _ in range(_STEPS):
        share = _normalised(log_evidence + _log_normal(shapes, x @ coefficients, spread))
        mean = np.einsum("ns,nsp->np", share, shapes)
        coefficients = np.linalg.solve(normal, x.T @ mean + _WORTH * start)
        away = shapes - (x @ coefficients)[:, None]
        scatter = np.einsum("nsp,nsq->pq", share[..., None] * away, away)
        spread = (_WORTH * _SPREAD + scatter) / (_WORTH + len(x))
    return _log_normal(shapes, x @ coefficients, spread)


def _normalised(logs: Array) -> Array:
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _log_normal(shapes: Array, mean: Array, spread: Array) -> Array:
    """ln N(θ_is; mean_i, S), normalised over the grid, [n, s]."""
    away = shapes - mean[:, None]
    logs = -0.5 * ((away @ np.linalg.inv(spread)) * away).sum(-1)
    top = logs.max(-1, keepdims=True)
    return logs - top - np.log(np.exp(logs - top).sum(-1, keepdims=True))
