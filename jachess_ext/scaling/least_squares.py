"""Batched Levenberg–Marquardt with Huber's loss and bounds: thousands of small fits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .predictive import Array, Index, Mask

Residuals = Callable[[Array, Index, bool], tuple[Array, Array]]
"""(coordinates [n, p], rows [n], gradient?) -> residuals [n, m] and their Jacobian [n, m, p]."""

_STALLED = 1e12  # damping of a row that no step lowers any more


@dataclass(frozen=True)
class Solution:
    """Coordinates [P, p], and the objective there, [P]."""

    u: Array
    objective: Array


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
    rows = np.arange(len(u))  # still at work
    value, jacobian = residuals(u, rows, True)
    objective = huber(value, weights, delta)
    objective = np.where(np.isfinite(objective), objective, np.inf)
    gradient, curvature = _normal_equations(value, jacobian, weights, delta)
    damping, growth = np.full(len(u), 1e-2), np.full(len(u), 2.0)
    for _ in range(iterations):
        if not len(rows):
            break
        place, before, g, a = u[rows], objective[rows], gradient[rows], curvature[rows]
        box = low[rows], high[rows]
        trial = np.clip(place + _bounded_step(place, *box, g, a, damping[rows]), *box)
        moved = trial - place
        # A wild trial may overflow.  Infinity and NaN are not below the objective, so such a step
        # is refused as any other that is too long, and the damping grows.
        with np.errstate(all="ignore"):
            value, jacobian = residuals(trial, rows, True)
            after = huber(value, weights[rows], delta[rows])
        better = after < before
        fall = np.where(better, before - after, 0.0)
        predicted = -(g * moved).sum(-1) - 0.5 * np.einsum("ni,nij,nj->n", moved, a, moved)
        gain = np.minimum(fall / np.maximum(predicted, 1e-300), 2.0)
        shrink = np.clip(1 - (2 * gain - 1) ** 3, 1 / 5, 2.0)
        damping[rows] *= np.where(better, shrink, growth[rows])
        damping[rows] = np.clip(damping[rows], 1e-12, 10 * _STALLED)
        growth[rows] = np.where(better, 2.0, np.minimum(growth[rows] * 2, 64.0))
        won = rows[better]
        u[won], objective[won] = trial[better], after[better]
        gradient[won], curvature[won] = _normal_equations(
            value[better], jacobian[better], weights[won], delta[won]
        )
        done = better & (fall <= tolerance * before) | (damping[rows] >= _STALLED)
        rows = rows[~done & (moved != 0).any(-1)]
    return Solution(u, objective)


def _normal_equations(
    value: Array, jacobian: Array, weights: Array, delta: Array
) -> tuple[Array, Array]:
    weighted = huber_weights(value, weights, delta)[..., None] * jacobian
    transposed = weighted.swapaxes(-1, -2)
    return (transposed @ value[..., None])[..., 0], transposed @ jacobian


def _bounded_step(
    u: Array, low: Array, high: Array, g: Array, curvature: Array, damping: Array
) -> Array:
    """Return −(A + λ diag A)⁻¹ g over the coordinates that are free to move, within the box.

    Where that step leaves the box, the coordinates that would are put on their bounds and the
    others are solved for again, given those.
    """
    held = ((u <= low) & (g >= 0)) | ((u >= high) & (g <= 0))
    diagonal = np.einsum("nii->ni", curvature)
    floor = 1e-14 * diagonal.max(-1, keepdims=True) + 1e-300
    added = damping[:, None] * diagonal + floor
    matrix = curvature + added[:, :, None] * np.eye(u.shape[1])
    step = _solve_free(matrix, g, ~held, np.zeros_like(g))
    room = np.clip(step, low - u, high - u)
    out = (room != step).any(-1)
    if out.any():
        stopped = held[out] | (room[out] != step[out])
        step[out] = _solve_free(matrix[out], g[out], ~stopped, np.where(stopped, room[out], 0.0))
    return step


def _solve_free(matrix: Array, g: Array, free: Mask, held: Array) -> Array:
    """Return M s = −g in the free coordinates, with the others at `held`."""
    rhs = np.where(free, -g - (matrix @ held[..., None])[..., 0], held)
    reduced = np.where(free[:, :, None] & free[:, None, :], matrix, np.eye(g.shape[1]))
    return np.linalg.solve(reduced, rhs[..., None])[..., 0]
