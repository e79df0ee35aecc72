"""`fit`: one law through one curve or many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..ntk import Spectrum
from .arrays import Array, Index, Mask
from .fitted import FittedCurve, FittedLaw, FittedLine
from .input_checks import Curves, check_curves
from .laws import LAWS, FreeLens, Law, MeasuredKernel, MeasuredLens, Points
from .least_squares import Solution, huber, minimise
from .loglinear import accept_then_stop

_ANNEALING = (8.0, 3.0)
"""Huber's threshold in the stages before the last, in multiples of the last."""
_EFFICIENT = 1.345  # Huber's threshold in noise deviations: 95 % efficient under Gaussian noise
_NARROWEST = 1e-3
_NORMAL_MEDIAN = 0.6745  # median of |z|


def fit(
    sizes: npt.ArrayLike,
    losses: npt.ArrayLike,
    law: str = "lensllm",
    *,
    parameters: npt.ArrayLike | None = None,
    fixed: Mapping[str, float] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    weights: npt.ArrayLike | None = None,
    huber_delta: float | None = None,
    starts: int = 8,
    gamma: int = 3,
    tau: float = 5.0,
    residual_square: float | None = None,
    theta: Tensor | Spectrum | Sequence[Tensor | Spectrum] | None = None,
    residual: Tensor | Sequence[Tensor] | None = None,
    t: npt.ArrayLike | None = None,
    lr: float | None = None,
) -> FittedLaw:
    """Fit a law to losses over sizes.

    All curves and all starts are one batch; the result does not depend on what else is in it.  The
    residual is ln L(D) − ln loss, under Huber's loss whose threshold is narrowed in stages.

    Args:
        sizes: training examples D, strictly increasing, [m].  0 (before fine-tuning) may come
            first; the laws with F or D_l use it, the others refuse it.
        losses: positive, [m] or [n, m].
        law: "lensllm" (Eq. 10; F free, or measured when `theta` is given), "rectified", "power"
            (Eq. 2), "ats" (the last points on a line; `gamma`, `tau`) or "kaplan" (Kaplan
            et al. 2020; one law for all rows of `losses`, with `parameters`).
        parameters: N of each row's model, [n]; for "kaplan".
        fixed: values of parameters that are not to be fitted.
        bounds: (low, high) instead of a law's own.
        weights: [m] or [n, m], not negative; 0 leaves a loss out.
        huber_delta: threshold in ln L; infinity gives least squares.  None: 1.345 robust standard
            deviations of the residuals after a first fit, per curve, and 0.001 at least.
        starts: how many of the law's grid of starting points, best first, are followed.
        gamma, tau: AtS's stop rule.
        residual_square: ‖r‖², upper bound of a free F.
        theta, residual, t, lr: as `jx.ntk_loss` takes them, for a single curve: F(Θ, t) is then
            computed.  One Θ and r, or one a size; t has one time a size.  The first stage holds the
            times, the second stretches them by one common factor, the parameter "t".

    Returns:
        A FittedLaw: .params, .predict(D), .interval(D, level), .transition.

    Raises:
        ValueError: a loss that is not positive or NaN, sizes that do not increase, fewer sizes than
            free parameters, an unknown law, parameter or starting point outside its bounds.
    """
    curves = check_curves(sizes, losses, weights)
    if law == "ats":
        return _fit_line(curves, gamma, tau)
    if law not in LAWS:
        raise ValueError(f"unknown law {law!r}; known are {', '.join([*sorted(LAWS), 'ats'])}")
    kernel = (theta, residual, t, lr)
    definition = _definition(law, curves, kernel, residual_square)
    points, curves = _points(definition, curves, parameters)
    free, low, high = _box(definition, curves, fixed or {}, bounds or {})
    counted = int((curves.weights > 0).sum(-1).min())
    if counted < free.sum():
        raise ValueError(
            f"the {definition.name} law has {int(free.sum())} free parameters and there are "
            f"{counted} losses; give more sizes, or fix parameters with fixed={{...}}"
        )
    problem = _Problem(definition, points, np.log(curves.losses), curves.weights)
    delta, solution = _solve(problem, low, high, free, huber_delta, starts)
    return _summary(problem, curves, solution, delta, free, low, high)


def _fit_line(curves: Curves, gamma: int, tau: float) -> FittedLine:
    if (curves.weights != 1).any():
        raise ValueError("the ats law takes no weights; give it the sizes that count")
    trained = curves.sizes > 0
    x, y = np.log(curves.sizes[trained]), np.log(curves.losses[:, trained])
    line = accept_then_stop(x, y, gamma, tau)
    return FittedLine(line, curves.sizes[trained], curves.single)


def _definition(law: str, curves: Curves, kernel: tuple[Any, ...], square: float | None) -> Law:
    given = [name for name, value in zip(_KERNEL, kernel, strict=True) if value is not None]
    if not given:
        if law == "lensllm" and square is not None:
            if not 0 < square < np.inf:
                raise ValueError(f"residual_square is {square}; expected ‖r‖², a positive number")
            return FreeLens(square)
        return LAWS[law]()
    if law != "lensllm":
        raise ValueError(f"{given[0]} is for the lensllm law; the {law} law has no kernel")
    if len(given) < len(_KERNEL):
        missing = [name for name in _KERNEL if name not in given]
        raise ValueError(f"a measured F needs theta, residual, t and lr; {missing[0]} is missing")
    if len(curves.losses) != 1:
        raise ValueError(
            f"a kernel belongs to one curve, there are {len(curves.losses)}; fit them one by one"
        )
    return MeasuredLens(MeasuredKernel(curves.sizes, *kernel))


_KERNEL = ("theta", "residual", "t", "lr")


def _points(law: Law, curves: Curves, parameters: npt.ArrayLike | None) -> tuple[Points, Curves]:
    """What the law is to be fitted at; Kaplan's law takes all rows as one curve."""
    if not law.reads_zero and curves.sizes[0] == 0:
        raise ValueError(f"the {law.name} law has no value at size 0; leave that size out")
    grid = np.broadcast_to(curves.sizes, curves.losses.shape)
    if law.name != "kaplan":
        if parameters is not None:
            raise ValueError(f"parameters is for Kaplan's law; the {law.name} law has one curve")
        return Points(grid), curves
    models = np.asarray([] if parameters is None else parameters, dtype=np.float64)
    if models.shape != (len(curves.losses),) or not (np.isfinite(models) & (models > 0)).all():
        raise ValueError(
            f"Kaplan's law needs parameters=, a positive number for each of the "
            f"{len(curves.losses)} rows of losses"
        )
    rows = np.repeat(models, len(curves.sizes))[None]
    return Points(grid.reshape(1, -1), rows), curves.joined()


def _box(
    law: Law,
    curves: Curves,
    fixed: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> tuple[Mask, Array, Array]:
    """Which coordinates are free, [p], and the bounds of all, [n, p]."""
    names = [parameter.name for parameter in law.parameters]
    for name in (*fixed, *bounds):
        if name not in names:
            raise ValueError(f"the {law.name} law has no parameter {name!r}; it has {names}")
    low, high = [], []
    for parameter in law.parameters:
        ends = bounds.get(parameter.name, (parameter.low, parameter.high))
        if parameter.name in fixed:
            ends = (fixed[parameter.name],) * 2
        pair = [parameter.coordinate(end) for end in ends]
        if not (np.isfinite(pair).all() and pair[0] <= pair[1]) or ends[0] < 0:
            raise ValueError(
                f"{parameter.name} is to lie in [{ends[0]}, {ends[1]}]; expected two finite "
                f"{'positive ' if parameter.log else ''}numbers, the lower first"
            )
        low.append(pair[0])
        high.append(pair[1])
    free = np.array([name not in fixed for name in names])
    shape = (len(curves.losses), len(names))
    return free, np.broadcast_to(low, shape), np.broadcast_to(high, shape)


class _Problem:
    """Residuals of a law at the points of a batch of curves, started several times each."""

    def __init__(self, law: Law, points: Points, log_losses: Array, weights: Array) -> None:
        self.law, self.points, self.log_losses, self.weights = law, points, log_losses, weights

    def of(self, owner: Index) -> Any:
        """Residual function for rows that belong to the curves `owner`."""

        def residuals(u: Array, rows: Index, gradient: bool) -> tuple[Array, Array]:
            chosen = owner[rows]
            value, jacobian = self.law.log_loss(u, self.points.rows(chosen), gradient)
            return value - self.log_losses[chosen], jacobian

        return residuals

    def minimise(
        self, u: Array, owner: Index, low: Array, high: Array, delta: Array, **settings: Any
    ) -> Solution:
        """`u`, `low`, `high`: one row a start; `delta`: one number a curve."""
        weights = self.weights[owner]
        return minimise(self.of(owner), u, low, high, weights, delta[owner], **settings)


def _solve(
    problem: _Problem,
    low: Array,
    high: Array,
    free: Mask,
    huber_delta: float | None,
    starts: int,
) -> tuple[Array, Solution]:
    """Best of several starts for every curve; Huber's threshold [n] and the solution."""
    if starts < 1:
        raise ValueError(f"starts is {starts}; expected 1 or more")
    if huber_delta is not None and not huber_delta > 0:
        raise ValueError(f"huber_delta is {huber_delta}; expected a positive threshold in ln L")
    curves = len(problem.log_losses)
    u, owner = _best_candidates(problem, low, high, starts)
    low, high = low[owner], high[owner]
    for names in problem.law.stages:
        held = np.array([parameter.name in names for parameter in problem.law.parameters])
        stage = problem.minimise(
            *(u, owner, np.where(held, u, low), np.where(held, u, high), np.full(curves, np.inf)),
            iterations=15 if names else 60,
            tolerance=1e-2 if names else 1e-7,
        )
        u = stage.u
    if huber_delta is None:
        delta = _robust_delta(problem, _best_of(stage, owner, curves).u, free)
    else:
        delta = np.full(curves, float(huber_delta))
    if np.isfinite(delta).all():
        for factor in _ANNEALING:
            settings = {"iterations": 20, "tolerance": 1e-4}
            u = problem.minimise(u, owner, low, high, factor * delta, **settings).u
    return delta, _best_of(problem.minimise(u, owner, low, high, delta), owner, curves)


def _best_candidates(
    problem: _Problem, low: Array, high: Array, starts: int
) -> tuple[Array, Index]:
    """The `starts` best points of the law's grid for each curve, by least squares."""
    candidates = problem.law.candidates(problem.points, problem.log_losses, problem.weights)
    candidates = np.clip(candidates, low[:, None], high[:, None])
    curves, count, p = candidates.shape
    owner = np.repeat(np.arange(curves), count)
    with np.errstate(all="ignore"):
        value, _ = problem.of(owner)(candidates.reshape(-1, p), np.arange(len(owner)), False)
    objective = huber(value, problem.weights[owner], np.full(len(owner), np.inf))
    objective = np.where(np.isfinite(objective), objective, np.inf).reshape(curves, count)
    best = np.argsort(objective, axis=1, kind="stable")[:, :starts]
    chosen = np.take_along_axis(candidates, best[..., None], axis=1)
    return chosen.reshape(-1, p), np.repeat(np.arange(curves), best.shape[1])


def _best_of(found: Solution, owner: Index, curves: int) -> Solution:
    """The start with the lowest objective, for every curve."""
    best = found.objective.reshape(curves, -1).argmin(-1) + np.flatnonzero(
        np.diff(owner, prepend=-1)
    )
    return Solution(found.u[best], found.objective[best], found.converged[best])


def _robust_delta(problem: _Problem, u: Array, free: Mask) -> Array:
    """1.345 robust standard deviations of the residuals, [n]."""
    value = np.abs(_residuals(problem, u)[0])
    counted = problem.weights > 0
    median = np.nanmedian(np.where(counted, value, np.nan), -1)
    points = counted.sum(-1)
    inflation = np.sqrt(points / np.maximum(points - free.sum(), 1))
    return np.maximum(_EFFICIENT * median / _NORMAL_MEDIAN * inflation, _NARROWEST)


def _residuals(problem: _Problem, u: Array) -> tuple[Array, Array]:
    rows = np.arange(len(u))
    return problem.of(rows)(u, rows, True)


def _summary(
    problem: _Problem,
    curves: Curves,
    solution: Solution,
    delta: Array,
    free: Mask,
    low: Array,
    high: Array,
) -> FittedCurve:
    value, jacobian = _residuals(problem, solution.u)
    weights = problem.weights
    dof = (weights > 0).sum(-1) - float(free.sum())
    inside = np.abs(value) <= delta[:, None]
    clipped = np.clip(value, -delta[:, None], delta[:, None])
    left = np.maximum(dof, 1)
    noise = np.sqrt((weights * value**2).sum(-1) / left)
    # Variance of Huber's estimator: Σ ψ² / (m − p) over the squared share of residuals inside.
    share = np.maximum((weights * inside).sum(-1) / weights.sum(-1), 0.5)
    spread = (weights * clipped**2).sum(-1) / left / share**2
    covariance = _covariance(jacobian, weights, spread, free, high - low)
    return FittedCurve(
        problem.law,
        solution.u,
        covariance,
        np.where(dof > 0, noise, np.nan),
        dof,
        solution.objective,
        delta,
        solution.converged,
        None,
        curves.single or problem.law.name == "kaplan",
    )


def _covariance(jacobian: Array, weights: Array, spread: Array, free: Mask, width: Array) -> Array:
    """(JᵀJ/s² + 12/width²)⁻¹ over the free coordinates: a uniform prior's variance where JᵀJ is 0.

    s² → 0 (a perfect fit) gives 0.
    """
    information = np.einsum("nmp,nm,nmq->npq", jacobian, weights, jacobian)
    s = np.maximum(spread, 1e-30)[:, None, None]
    prior = 12 * s[..., 0] / np.maximum(width, 1e-9) ** 2
    matrix = information + np.einsum("np,pq->npq", prior, np.eye(len(free)))
    keep = free[:, None] & free
    matrix = np.where(keep, matrix, np.eye(len(free)))
    return np.where(keep, s * np.linalg.pinv(matrix, hermitian=True, rcond=1e-15), 0.0)
