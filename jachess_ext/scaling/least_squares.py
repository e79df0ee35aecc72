"""Batched Levenberg–Marquardt with Huber's loss and bounds: thousands of small fits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .predictive import Array, Index, Mask

Residuals = Callable[[Array, Index, bool], tuple[Array, Array]]
"""(coordinates [n, p], rows [n], gradient?) -> residuals [n, m] and their Jacobian [n, m, p]."""

_COMPACT_BELOW = 0.75  # rows that are done leave the arrays once a quarter of them is
_STALLED = 1e12


@dataclass(frozen=True)
class Solution:
    """Coordinates [P, p], objective [P], and which rows met the tolerance, [P]."""

    u: Array
    objective: Array
    converged: Mask


@dataclass
class _State:
    """The rows still at work: where they are, how they are damped, and what bounds them."""

    low: Array
    high: Array
    weights: Array
    delta: Array
    rows: Index
    u: Array
    objective: Array
    gradient: Array
    curvature: Array
    damping: Array
    growth: Array
    active: Mask

    def keep(self, mask: Mask) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name)[mask])


def huber(residuals: Array, weights: Array, delta: Array) -> Array:
    """Return Σ_j w_j h_δ(r_j) over the last axis; `delta` has one number a row."""
    size, delta = np.abs(residuals), delta[..., None]
    inside = np.minimum(size, delta)
    return (weights * inside * (size - inside / 2)).sum(-1)


def huber_weights(residuals: Array, weights: Array, delta: Array) -> Array:
    """Return w_j min(1, δ/|r_j|)."""
    size, delta = np.abs(residuals), delta[..., None]
    outside = size > delta  # δ may be infinite
    return weights * np.where(outside, delta, 1.0) / np.where(outside, size, 1.0)


def minimise(
    residuals: Residuals,
    start: Array,
    low: Array,
    high: Array,
    weights: Array,
    delta: Array,
    iterations: int = 200,
    tolerance: float = 1e-10,
) -> Solution:
    """Minimise Σ_j w_j h_δ(r_j) over a box, for every row.

    h_δ(r) = r²/2 for |r| ≤ δ and δ (|r| − δ/2) beyond.  A step solves (A + λ diag A) s = −g with
    g = Jᵀ W r and A = Jᵀ W J, where W = w · min(1, δ/|r|) (iteratively reweighted least squares: g
    is the exact gradient).  Coordinates at a bound that the gradient pushes outward are held.  λ
    follows the gain ratio (Nielsen 1999).

    Args:
        residuals: called with the coordinates of some rows, their numbers, and whether the Jacobian
            is wanted.
        start: [P, p]; put inside the box first.
        low, high: [P, p]; a coordinate with low = high is fixed there.
        weights: [P, m], 0 leaves a residual out.
        delta: Huber's threshold, [P]; infinite for least squares.
        iterations: at most.
        tolerance: a row is done when an accepted step lowers its objective by less than this
            share, or when no step lowers it.
    """
    u = np.clip(start, low, high)
    count = len(u)
    result = Solution(u.copy(), np.full(count, np.inf), np.zeros(count, dtype=bool))
    rows = np.arange(count)
    value, jacobian = residuals(u, rows, True)
    objective = huber(value, weights, delta)
    gradient, curvature = _normal_equations(value, jacobian, weights, delta)
    objective = np.where(np.isfinite(objective), objective, np.inf)
    damping, growth, active = np.full(count, 1e-2), np.full(count, 2.0), np.ones(count, dtype=bool)
    place = (u, objective, gradient, curvature)
    state = _State(low, high, weights, delta, rows, *place, damping, growth, active)
    for _ in range(iterations):
        _step(residuals, state, tolerance)
        if state.active.mean() <= _COMPACT_BELOW:
            _store(result, state)
            state.keep(state.active)
            if not len(state.rows):
                return result
    _store(result, state)
    return result


def _store(result: Solution, state: _State) -> None:
    result.u[state.rows] = state.u
    result.objective[state.rows] = state.objective
    result.converged[state.rows] = ~state.active


def _normal_equations(
    value: Array, jacobian: Array, weights: Array, delta: Array
) -> tuple[Array, Array]:
    weighted = huber_weights(value, weights, delta)[..., None] * jacobian
    transposed = weighted.swapaxes(-1, -2)
    return (transposed @ value[..., None])[..., 0], transposed @ jacobian


def _step(residuals: Residuals, state: _State, tolerance: float) -> None:
    """Take a damped step in every row; rows that are done stay where they are."""
    inside = np.clip(state.u + _bounded_step(state), state.low, state.high)
    trial = np.where(state.active[:, None], inside, state.u)
    moved = trial - state.u
    # A wild trial may overflow.  Infinity and NaN are not below the objective, so such a step is
    # refused as any other that is too long, and the damping grows.
    with np.errstate(all="ignore"):
        value, jacobian = residuals(trial, state.rows, True)
        objective = huber(value, state.weights, state.delta)
    better = state.active & (objective < state.objective)
    predicted = -(state.gradient * moved).sum(-1) - 0.5 * np.einsum(
        "ni,nij,nj->n", moved, state.curvature, moved
    )
    fall = np.where(better, state.objective - objective, 0.0)
    _damp(state, better, fall, predicted)
    small = better & (fall <= tolerance * state.objective)
    state.active &= ~small & (state.damping < _STALLED) & (moved != 0).any(-1)
    gradient, curvature = _normal_equations(
        value[better], jacobian[better], state.weights[better], state.delta[better]
    )
    state.u[better], state.objective[better] = trial[better], objective[better]
    state.gradient[better], state.curvature[better] = gradient, curvature


def _bounded_step(state: _State) -> Array:
    """Return −(A + λ diag A)⁻¹ g over the coordinates that are free to move, within the box.

    Where that step leaves the box, the coordinates that would are put on their bounds and the
    others are solved for again, given those.
    """
    g = state.gradient
    held = ((state.u <= state.low) & (g >= 0)) | ((state.u >= state.high) & (g <= 0))
    matrix = state.curvature.copy()
    diagonal = np.einsum("nii->ni", matrix)  # a view: writing to it writes to the matrix
    floor = 1e-14 * diagonal.max(-1, keepdims=True) + 1e-300
    diagonal += state.damping[:, None] * diagonal + floor
    step = _solve_free(matrix, g, ~held, np.zeros_like(g))
    room = np.clip(step, state.low - state.u, state.high - state.u)
    out = (room != step).any(-1)
    if out.any():
        stopped = held[out] | (room[out] != step[out])
        step[out] = _solve_free(matrix[out], g[out], ~stopped, np.where(stopped, room[out], 0.0))
    return step


def _solve_free(matrix: Array, g: Array, free: Mask, held: Array) -> Array:
    """Return M s = −g in the free coordinates, with the others at `held`."""
    right = np.where(free, -g - (matrix @ held[..., None])[..., 0], held)
    reduced = np.where(free[:, :, None] & free[:, None, :], matrix, np.eye(g.shape[1]))
    return np.linalg.solve(reduced, right[..., None])[..., 0]


def _damp(state: _State, better: Mask, fall: Array, predicted: Array) -> None:
    gain = np.minimum(fall / np.maximum(predicted, 1e-300), 2.0)
    shrink = np.clip(1 - (2 * gain - 1) ** 3, 1 / 5, 2.0)
    damping = state.damping * np.where(better, shrink, state.growth)
    state.damping = np.clip(damping, 1e-12, 10 * _STALLED)
    state.growth = np.where(better, 2.0, np.minimum(state.growth * 2, 64.0))
