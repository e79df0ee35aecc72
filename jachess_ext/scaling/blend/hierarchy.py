"""What the candidates share, learnt from all their curves: noise, its kinds, a prior of shapes."""

from __future__ import annotations

import numpy as np

from ..arrays import Array

MEAN = np.array([0.0, np.log(0.4), 0.4])
SPREAD = np.diag([4.0, 0.5, 0.3]) ** 2
WORTH = 10.0  # models
STEPS = 12
LEVEL_POINTS = 5
KINDS_WORTH = 5.0  # models
SCALES = np.geomspace(0.002, 0.3, 12)
SHAPE = 2.0
"""Of the inverse gamma distribution of a curve's squared scale around the table's."""


def features(theta: Array, y: Array) -> Array:
    """What is shared between curves: (ln D_c/D_n, ln β, E / median L(D_n)), [n, s, 3].

    The floor E = ε L(D_n) is shared as a loss, not as a share of each model's own loss: the test
    set is the same for all, and so is most of what cannot be learnt of it.

    Args:
        theta: (ln D_c/D_n, ln β, ε), [s, 3].
        y: ln L, [n, m].
    """
    last = np.exp(y[:, -1])
    result = np.repeat(theta[None], len(y), axis=0)
    result[:, :, 2] *= (last / np.median(last))[:, None]
    return result


def covariates(y: Array) -> Array:
    """X: 1 and the centred mean of the last five ln L, [n, 2]."""
    level = y[:, -LEVEL_POINTS:].mean(-1)
    return np.stack([np.ones(len(y)), level - level.mean()], -1)


def log_marginal(squares: Array, log_weight: Array, points: int, scale: float) -> Array:
    """ln p(y_i | shape, kind of noise) up to a constant, the curve's own scale integrated out.

    A curve's squared scale is inverse gamma with shape a and mean-like value s²; the Gaussian
    evidence then becomes b^a / (b + Q/2)^(a + (m−1)/2) with b = a s².

    Args:
        squares: Q = rᵀ P r of every residual r, [k, n, s].
        log_weight: of the kinds, [k].
        points: m.
        scale: s, that of the table.
    """
    b = SHAPE * scale**2
    power = SHAPE + (points - 1) / 2
    return SHAPE * np.log(b) + log_weight[:, None, None] - power * np.log(b + squares / 2)


def table_scale(squares: Array, log_weight: Array, points: int, log_prior: Array) -> float:
    """The scale around which those of the curves lie: the mean of its posterior on a grid.

    Args:
        squares, log_weight, points: as in `log_marginal`.
        log_prior: of the shapes, [s].
    """
    logs = []
    for scale in SCALES:
        each = log_marginal(squares, log_weight, points, scale) + log_prior
        logs.append(log_sum(log_sum(each, 2), 0).sum())
    share = normalised(np.array(logs))
    return float(np.exp(share @ np.log(SCALES)))


def kind_shares(log_evidence: Array) -> Array:
    """How often each kind of noise occurs, [k]: EM from equal shares worth five models.

    Args:
        log_evidence: ln p(y_i | kind), [k, n].
    """
    kinds, models = log_evidence.shape
    share = np.full(kinds, 1 / kinds)
    for _ in range(STEPS):
        found = normalised((log_evidence + np.log(share)[:, None]).T).sum(0)
        share = (found + KINDS_WORTH / kinds) / (models + KINDS_WORTH)
    return share


def shared_prior(log_evidence: Array, shapes: Array, x: Array) -> Array:
    """ln p(shape) for every curve, [n, s]: N(X_i C, S) on the grid, by EM.

    C and S start at, and are pulled to, vague values worth ten models:
    C⁰ = (ln D_n, ln .4, .4; 0), S⁰ = diag(4², .5², .3²).

    Args:
        log_evidence: ln p(y_i | shape), [n, s].
        shapes: [n, s, 3], see `features`.
        x: [n, 2].
    """
    start = np.stack([MEAN, np.zeros(3)])
    coefficients, spread = start, SPREAD
    normal = x.T @ x + WORTH * np.eye(x.shape[1])
    for _ in range(STEPS):
        share = normalised(log_evidence + log_normal(shapes, x @ coefficients, spread))
        mean = np.einsum("ns,nsp->np", share, shapes)
        coefficients = np.linalg.solve(normal, x.T @ mean + WORTH * start)
        away = shapes - (x @ coefficients)[:, None]
        scatter = np.einsum("nsp,nsq->pq", share[..., None] * away, away)
        spread = (WORTH * SPREAD + scatter) / (WORTH + len(x))
    return log_normal(shapes, x @ coefficients, spread)


def normalised(logs: Array) -> Array:
    """exp of logs, with sum 1 over the last axis."""
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_sum(logs: Array, axis: int) -> Array:
    """ln Σ exp over one axis."""
    top = logs.max(axis, keepdims=True)
    return np.squeeze(top + np.log(np.exp(logs - top).sum(axis, keepdims=True)), axis)


def log_normal(shapes: Array, mean: Array, spread: Array) -> Array:
    """ln N(θ_is; mean_i, S), normalised over the grid, [n, s]."""
    away = shapes - mean[:, None]
    logs = -0.5 * ((away @ np.linalg.inv(spread)) * away).sum(-1)
    return logs - log_sum(logs, 1)[:, None]
