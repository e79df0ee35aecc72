"""Batched Levenberg–Marquardt with Huber's loss and bounds, for thousands of small fits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .predictive import Array, Index, Mask

Residuals = Callable[[Array, Index, bool], tuple[Array, Array]]
"""(coordinates [n, p], row numbers [n], whether the Jacobian is needed) -> residuals [n, m] and
their Jacobian [n, m, p]."""

_STALLED = 1e12  # damping above which a row is done, as no step lowers its objective


@dataclass(frozen=True)
class Solution:
    """The result of P minimisations.

    Attributes:
        u: coordinates of the minima, [P, p].
        objective: objective at the minima, [P].
    """

    u: Array
    objective: Array


def huber(residuals: Array, weights: Array, delta: Array) -> Array:
    """Return Huber's objective Σ_j w_j h_δ(r_j), [n].

    Args:
        residuals: r, [n, m].
        weights: w, [n, m].
        delta: threshold δ of each row, [n].
    """
    magnitudes, delta = np.abs(residuals), delta[..., None]
    clipped = np.minimum(magnitudes, delta)
    return (weights * clipped * (magnitudes - clipped / 2)).sum(-1)


def huber_weights(residuals: Array, weights: Array, delta: Array) -> Array:
    """Return the weights of reweighted least squares, w_j min(1, δ/|r_j|), [n, m]."""
    magnitudes, delta = np.abs(residuals), delta[..., None]
    is_outside = magnitudes > delta  # δ may be infinite
    return weights * np.where(is_outside, delta, 1.0) / np.where(is_outside, magnitudes, 1.0)


def minimise(
    residuals: Residuals,
    start: Array,
    low: Array,
    high: Array,
    weights: Array,
    delta: Array,
    max_iterations: int = 200,
    tolerance: float = 1e-10,
) -> Solution:
    """Minimise Σ_j w_j h_δ(r_j) over a box, for each of P rows.

    h_δ(r) = r²/2 for |r| ≤ δ and δ (|r| − δ/2) beyond.  A step solves (A + λ diag A) s = −g with
    g = Jᵀ W r and A = Jᵀ W J, where W = w · min(1, δ/|r|) (iteratively reweighted least squares: g
    is the exact gradient).  Coordinates at a bound that the gradient pushes outward are held.  λ
    follows the gain ratio (Nielsen 1999).

    Args:
        residuals: returns the residuals and their Jacobian for some of the rows.
        start: initial coordinates, [P, p]; clipped to the box.
        low, high: bounds of the box, [P, p]; a coordinate with low = high is fixed.
        weights: w, [P, m]; 0 leaves a residual out.
        delta: Huber's threshold δ, [P]; infinite for least squares.
        max_iterations: largest number of iterations.
        tolerance: a row is done when an accepted step lowers its objective by a smaller fraction
            than this, or when no step lowers it.
    """
    u = np.clip(start, low, high)
    rows = np.arange(len(u))  # that are not done
    r, jacobian = residuals(u, rows, True)
    objective = huber(r, weights, delta)
    objective = np.where(np.isfinite(objective), objective, np.inf)
    gradient, curvature = _normal_equations(r, jacobian, weights, delta)
    damping, growth = np.full(len(u), 1e-2), np.full(len(u), 2.0)
    for _ in range(max_iterations):
        if not len(rows):
            break
        current, old_objective, g, a = u[rows], objective[rows], gradient[rows], curvature[rows]
        box = low[rows], high[rows]
        trial = np.clip(current + _bounded_step(current, *box, g, a, damping[rows]), *box)
        step = trial - current
        # A trial far away may overflow.  Infinity and NaN are not below the objective, so that the
        # step is rejected like any other that is too long, and the damping grows.
        with np.errstate(all="ignore"):
            r, jacobian = residuals(trial, rows, True)
            new_objective = huber(r, weights[rows], delta[rows])
        is_better = new_objective < old_objective
        decrease = np.where(is_better, old_objective - new_objective, 0.0)
        predicted = -(g * step).sum(-1) - 0.5 * np.einsum("ni,nij,nj->n", step, a, step)
        gain = np.minimum(decrease / np.maximum(predicted, 1e-300), 2.0)
        shrink = np.clip(1 - (2 * gain - 1) ** 3, 1 / 5, 2.0)
        damping[rows] *= np.where(is_better, shrink, growth[rows])
        damping[rows] = np.clip(damping[rows], 1e-12, 10 * _STALLED)
        growth[rows] = np.where(is_better, 2.0, np.minimum(growth[rows] * 2, 64.0))
        improved = rows[is_better]
        u[improved], objective[improved] = trial[is_better], new_objective[is_better]
        gradient[improved], curvature[improved] = _normal_equations(
            r[is_better], jacobian[is_better], weights[improved], delta[improved]
        )
        is_done = is_better & (decrease <= tolerance * old_objective) | (damping[rows] >= _STALLED)
        rows = rows[~is_done & (step != 0).any(-1)]
    return Solution(u, objective)


def _normal_equations(
    r: Array, jacobian: Array, weights: Array, delta: Array
) -> tuple[Array, Array]:
    """Return the gradient Jᵀ W r, [n, p], and the curvature Jᵀ W J, [n, p, p]."""
    weighted = huber_weights(r, weights, delta)[..., None] * jacobian
    transposed = weighted.swapaxes(-1, -2)
    return (transposed @ r[..., None])[..., 0], transposed @ jacobian


def _bounded_step(
    u: Array, low: Array, high: Array, g: Array, curvature: Array, damping: Array
) -> Array:
    """Return the step −(A + λ diag A)⁻¹ g of the coordinates that are free to move, within the box.

    If that step leaves the box, the coordinates that leave it are put on their bounds, and the
    system is solved again for the other coordinates.
    """
    is_held = ((u <= low) & (g >= 0)) | ((u >= high) & (g <= 0))
    diagonal = np.einsum("nii->ni", curvature)
    floor = 1e-14 * diagonal.max(-1, keepdims=True) + 1e-300
    damped = damping[:, None] * diagonal + floor
    matrix = curvature + damped[:, :, None] * np.eye(u.shape[1])
    step = _solve_free(matrix, g, ~is_held, np.zeros_like(g))
    clipped = np.clip(step, low - u, high - u)
    rows = (clipped != step).any(-1)
    if rows.any():
        bound = is_held[rows] | (clipped[rows] != step[rows])
        step[rows] = _solve_free(matrix[rows], g[rows], ~bound, np.where(bound, clipped[rows], 0.0))
    return step


def _solve_free(matrix: Array, g: Array, is_free: Mask, held: Array) -> Array:
    """Solve M s = −g for the free coordinates of s, with the others equal to `held`."""
    rhs = np.where(is_free, -g - (matrix @ held[..., None])[..., 0], held)
    reduced = np.where(is_free[:, :, None] & is_free[:, None, :], matrix, np.eye(g.shape[1]))
    return np.linalg.solve(reduced, rhs[..., None])[..., 0]
