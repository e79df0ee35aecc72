"""`fit`: fit a scaling law to one curve or many at once, by batched Levenberg–Marquardt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from .ats import accept_then_stop
from .drift import measure_drift
from .fitted import NO_UNIT, Curves, FittedLaw, Scale, Values
from .laws import LAWS, Law, MeasuredLens, StraightLine
from .least_squares import Residuals, Solution, minimise
from .loss_table import check_losses, check_sizes
from .predictive import Array, Index, Mask

if TYPE_CHECKING:
    from torch import Tensor

    from ..ntk import Spectrum


def fit(
    sizes: npt.ArrayLike,
    losses: npt.ArrayLike,
    law: str | None = None,
    *,
    fixed: Mapping[str, float] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    weights: npt.ArrayLike | None = None,
    gamma: int = 3,
    tau: float = 5.0,
    theta: Tensor | Spectrum | Sequence[Tensor | Spectrum] | None = None,
    residual: Tensor | Sequence[Tensor] | None = None,
    t: npt.ArrayLike | None = None,
    lr: float | None = None,
) -> FittedLaw:
    """Fit a scaling law to losses at several training set sizes.

    All curves are fitted as one batch; the result for a curve does not depend on the others.  The
    residual is ln L(D) − ln loss, under Huber's loss, whose threshold is decreased in stages to the
    larger of 0.001 and 1.345 robust standard deviations of the curve's residuals.

    Args:
        sizes: numbers of training examples D, strictly increasing, [m].  The first may be 0 (before
            fine-tuning) for the laws lensllm and rectified.
        losses: positive, [m] or [n, m].
        law: "lensllm" (Eq. 10; F is a fitted number, or computed from `theta`), "rectified",
            "power" (Eq. 2) or "ats" (a line through the last points).  None chooses, for all curves
            together, the law among ats, power, rectified and, with a kernel, lensllm that would
            have forecast the larger sizes best; the errors are in `FittedLaw.backtest`.
        fixed: name -> value of parameters that are not fitted, in the units of `sizes` and
            `losses`.
        bounds: name -> (low, high) in place of the bounds of the law, in the same units.
        weights: [m] or [n, m], not negative; 0 leaves a loss out.  Only ratios within a curve
            matter.
        gamma, tau: for ats, the number of points that are accepted without a test, and the largest
            accepted deviation from the line in standard deviations.
        theta, residual, t, lr: kernel, residual, training times and learning rate as in
            `jx.ntk_loss`, for a single curve: F(Θ, t) is then computed.  There is one Θ and r, or
            one per size; t has one time per size.  The first stage of the fit keeps the times, the
            second multiplies them by a common factor, the parameter "t".

    Returns:
        The fitted law; its repr describes what was fitted and why.

    Raises:
        ValueError: a loss that is not positive, sizes that do not increase, fewer sizes than free
            parameters, an unknown law or parameter, `bounds` or `fixed` outside the parameter's
            domain, or arguments of another law.

    Examples:
        >>> import jachess_ext as jx
        >>> sizes = [100, 200, 400, 800, 1600]
        >>> law = jx.scaling.fit(sizes, [30 / d**0.5 + 0.4 for d in sizes], law="power")
        >>> round(law.predict(10_000), 2)
        0.7
    """
    curves = _check_curves(sizes, losses, weights)
    arguments = {"theta": theta, "residual": residual, "t": t, "lr": lr}
    kernel = {name: value for name, value in arguments.items() if value is not None}
    if law in (None, "ats") and not (fixed is None and bounds is None):
        raise ValueError("fixed and bounds are for one law; name it, such as law='rectified'")
    if kernel and law not in (None, "lensllm"):
        raise ValueError(f"{', '.join(kernel)} is for the lensllm law; the {law} law has no kernel")
    if kernel and (len(kernel) < len(arguments) or len(curves.losses) > 1):
        text = f"a measured F needs {', '.join(arguments)} of one curve"
        raise ValueError(f"{text}; there are {', '.join(kernel)} and {len(curves.losses)} curves")
    if law is None:
        return _fit_best(curves, kernel, partial(fit, gamma=gamma, tau=tau))
    if law == "ats":
        return _fit_line(curves, gamma, tau)
    if law not in LAWS:
        raise ValueError(f"unknown law {law!r}; known are {', '.join([*sorted(LAWS), 'ats'])}")
    definition: Law = LAWS[law]()
    if kernel:
        definition = MeasuredLens(curves.sizes, *kernel.values())  # type: ignore[arg-type]
    if not definition.reads_zero and curves.sizes[0] == 0:
        raise ValueError(f"the {law} law has no value at size 0; leave that size out")
    user_bounds = _user_bounds(definition, fixed or {}, bounds or {})
    free = np.array([parameter.name not in (fixed or {}) for parameter in definition.parameters])
    scale, low, high = _scale_and_bounds(definition, curves, user_bounds)
    scaled_sizes = curves.sizes / scale.size[:, None]
    log_losses = np.log(curves.losses / scale.loss[:, None])
    problem = _Problem(definition, scaled_sizes, log_losses, curves.weights, low, high, free)
    counted = int((curves.weights > 0).sum(-1).min())
    if counted < free.sum():
        text = f"the {definition.name} law has {int(free.sum())} free parameters"
        raise ValueError(f"{text} and there are {counted} losses; give more, or fix parameters")
    return _fitted_law(problem, curves, scale, *_solve(problem))


def _fit_line(curves: Curves, gamma: int, tau: float) -> FittedLaw:
    """Fit the line of AtS, with the covariance of linear least squares.

    Student's t intervals are exact for it.

    Raises:
        ValueError: weights that differ within a curve.
    """
    if (curves.weights != curves.weights[:, :1]).any():
        raise ValueError("the ats law takes no weights; give it the sizes that count")
    trained = curves.sizes > 0
    x, y = np.log(curves.sizes[trained]), np.log(curves.losses[:, trained])
    line = accept_then_stop(x, y, gamma, tau)
    slope_var = np.maximum(line.variance, _NO_NOISE) / line.square_x
    intercept_var = np.maximum(line.variance, _NO_NOISE) / line.count + slope_var * line.mean_x**2
    cross = -slope_var * line.mean_x
    ones, dof = np.ones(len(slope_var)), line.count - 2.0
    return FittedLaw(
        definition=StraightLine(),
        coordinates=np.stack([line.intercept, line.slope], -1),
        covariance=np.stack([intercept_var, cross, cross, slope_var], -1).reshape(-1, 2, 2),
        noise=np.sqrt(line.variance),
        dof=dof,
        objective=np.where(dof > 0, line.variance * dof / 2, 0.0),
        delta=np.full(len(slope_var), math.inf),
        scale=Scale(ones, ones),
        _curves=curves,
    )


# The law that forecasts best --------------------------------------------------------------------

_SIMPLEST_FIRST = ("ats", "power", "rectified", "lensllm")
_FEWEST_TO_JUDGE = 5  # smallest number of sizes above 0 of a backtest: one more than parameters
_DIGITS = 9  # decimals to which errors are compared, as smaller differences are due to rounding


def _fit_best(
    curves: Curves, kernel_args: Mapping[str, object], fit_one: Callable[..., FittedLaw]
) -> FittedLaw:
    """Fit the law that would have forecast the larger sizes best from the smaller ones.

    Every law is fitted to the first k sizes, for every k that is at least half of all sizes and
    includes five sizes above 0, and evaluated on the others.  The law with the lowest median
    |ln error| over all k, held-out sizes and curves is chosen: a mean would be dominated by a few
    extreme forecasts.  In a tie, and if there are too few sizes for a backtest, the simplest
    applicable law is fitted.  The errors of the chosen law widen its intervals.

    Args:
        curves: the losses.
        kernel_args: `theta`, `residual`, `t` and `lr` of `fit`; empty without a kernel.
        fit_one: (sizes, losses, law, weights and kernel by keyword) -> fitted law.
    """
    laws = list(_SIMPLEST_FIRST)
    if not kernel_args:
        laws.remove("lensllm")  # with F free it is the rectified law
    if (curves.weights != curves.weights[:, :1]).any():
        laws.remove("ats")
    counts, half_count = curves.counted.cumsum(-1).min(0), (len(curves.sizes) + 1) // 2
    lengths = [k for k in range(half_count, len(curves.sizes)) if counts[k - 1] >= _FEWEST_TO_JUDGE]

    def fit_first(k: int, law: str) -> FittedLaw:
        mask = np.arange(len(curves.sizes)) < k
        if law == "power":
            mask &= curves.sizes > 0
        options: dict[str, object] = {}
        if law == "lensllm":
            # Θ and r are either the same for all sizes, or sequences with one entry per size, as t.
            options = {n: v[:k] if isinstance(v, Sequence) else v for n, v in kernel_args.items()}
            options["t"] = np.asarray(kernel_args["t"])[:k]
        options["weights"] = None if law == "ats" else curves.weights[:, mask]
        return fit_one(curves.sizes[mask], curves.losses[:, mask], law, **options)

    def log_errors(k: int, law: str) -> Array:
        return np.log(fit_first(k, law).predict(curves.sizes[k:]) / curves.losses[:, k:])

    def median_error(errors_by_k: Mapping[int, Array]) -> float:
        held_out = [np.abs(error)[curves.weights[:, k:] > 0] for k, error in errors_by_k.items()]
        return float(np.median(np.concatenate(held_out)))

    errors = {law: {k: log_errors(k, law) for k in lengths} for law in (laws if lengths else ())}
    backtest = {law: median_error(errors_by_k) for law, errors_by_k in errors.items()}
    # `min` returns the first of equals, and the simplest law comes first.
    best = min(backtest, key=lambda law: round(backtest[law], _DIGITS), default=laws[0])
    chosen = fit_first(len(curves.sizes), best)
    drift = measure_drift(curves.sizes, curves.losses, curves.counted, errors.get(best, {}))
    return replace(chosen, backtest=backtest, drift=drift, _curves=curves)


def _check_curves(
    sizes: npt.ArrayLike, losses: npt.ArrayLike, weights: npt.ArrayLike | None
) -> Curves:
    """Validate the arguments of `fit` and return them as arrays, with normalised weights.

    Raises:
        ValueError: wrong shapes, sizes that do not increase, weights that are negative or all 0, or
            a loss with a weight that is not positive.
    """
    d, y = np.asarray(sizes, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    if d.ndim != 1 or y.ndim not in (1, 2) or y.shape[-1] != len(d) or not y.size:
        raise ValueError(f"sizes has shape {list(d.shape)} and losses {list(y.shape)}")
    check_sizes(d)
    rows = np.atleast_2d(y)
    w = np.ones_like(y) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape not in (y.shape, d.shape) or not (np.isfinite(w) & (w >= 0)).all():
        shapes = f"{list(y.shape)} or {list(d.shape)}"
        raise ValueError(f"weights has shape {list(w.shape)}; expected {shapes}, finite, from 0 up")
    w = np.broadcast_to(w, rows.shape)
    if not (w > 0).any(-1).all():
        raise ValueError("all weights of a curve are 0; every curve needs losses that count")
    w = w / w.max(-1, keepdims=True)  # first, so that the sum neither overflows nor underflows
    w = w * (w > 0).sum(-1, keepdims=True) / w.sum(-1, keepdims=True)
    check_losses(rows, d, w > 0)
    lowest = np.where(w > 0, rows, np.inf).min(-1, keepdims=True)
    return Curves(d, np.where(w > 0, rows, lowest), w, y.ndim == 1)


def _user_bounds(
    law: Law, fixed: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Merge `fixed` and `bounds` into name -> (low, high), in the units of the input.

    Raises:
        ValueError: an unknown parameter, or ends that it cannot have.
    """
    parameters = {parameter.name: parameter for parameter in law.parameters}
    merged = dict(bounds) | {name: (value, value) for name, value in fixed.items()}
    for name, (low, high) in merged.items():
        if name not in parameters:
            raise ValueError(f"the {law.name} law has no parameter {name!r} among {[*parameters]}")
        coordinates = np.array([parameters[name].coordinate(end) for end in (low, high)])
        if not (np.isfinite(coordinates).all() and coordinates[0] <= coordinates[1]) or low < 0:
            domain = "positive numbers" if parameters[name].is_log else "numbers"
            text = f"{name} is to lie in [{low}, {high}]"
            raise ValueError(f"{text}; expected two finite {domain}, the lower first")
    return merged


def _scale_and_bounds(
    law: Law, curves: Curves, user_bounds: Mapping[str, tuple[float, float]]
) -> tuple[Scale, Array, Array]:
    """Return the units of the fit, and the bounds of the coordinates in these units, [n, p] each.

    If the user bounds a parameter whose unit depends on a fitted exponent (that of B is
    loss · size^β), that unit stays 1: the bound cannot be converted before β is fitted.

    Args:
        law: the law.
        curves: the losses.
        user_bounds: (low, high) of the parameters that the user bounds or fixes, by name.
    """
    # The unit of a parameter is loss^a · size^b, where a and b may be other parameters: numbers
    # if these are fixed, NaN if they are fitted.  NaN in the unit of a bound other than 0 is the
    # case above.
    fixed = {name: low if low == high else np.nan for name, (low, high) in user_bounds.items()}
    units = law.units({p.name: fixed.get(p.name, np.nan) for p in law.parameters})
    powers = [units.get(name, NO_UNIT) for name, pair in user_bounds.items() if any(pair)]
    is_convertible = (not np.isnan(power).any() for power in zip(*powers, NO_UNIT, strict=True))
    has_loss_unit, has_size_unit = is_convertible
    has_size_unit &= not law.sizes_are_examples
    is_counted, ones = curves.weights > 0, np.ones(len(curves.losses))
    largest = np.where(is_counted, curves.sizes, 0.0).max(-1)
    scale = Scale(
        loss=np.where(is_counted, curves.losses, np.inf).min(-1) if has_loss_unit else ones,
        size=np.where(largest > 0, largest, 1.0) if has_size_unit else ones,
    )
    low, high = np.empty((2, len(ones), len(law.parameters)))
    for column, p in enumerate(law.parameters):
        unit: Values = scale.unit(units.get(p.name, NO_UNIT)) if p.name in user_bounds else 1.0
        pair = user_bounds.get(p.name, (p.low, p.high))
        low[:, column], high[:, column] = (p.coordinate(end and end / unit) for end in pair)
    return scale, low, high


# The fit ----------------------------------------------------------------------------------------

Limits: TypeAlias = tuple[int, float]
"""Largest number of iterations, and tolerance, of `minimise`."""
_HELD_LIMITS, _SQUARES_LIMITS, _STAGE_LIMITS, _LAST_LIMITS = (
    (15, 1e-2),
    (60, 1e-7),
    (20, 1e-4),
    (200, 1e-10),
)
"""Limits of the stages: with held parameters, least squares, larger thresholds, and the last.  Only
the last stage needs an exact minimum."""
_ANNEALING = (8.0, 3.0)
"""Huber's threshold in the stages before the last, in multiples of the last."""
_STARTS = 8  # number of starts of each curve
_EFFICIENT = 1.345  # Huber's threshold in noise deviations: 95 % efficient under Gaussian noise
_NARROWEST = 1e-3  # smallest threshold
_NORMAL_MEDIAN = 0.6745  # median of |z| for a standard normal z
_NO_NOISE = 1e-30  # least variance of ln L, for a perfect fit


@dataclass(frozen=True)
class _Problem:
    """The fit of a law to a batch of n curves, with any number of starts (rows) of each curve.

    Attributes:
        law: the law.
        sizes, log_losses, weights: sizes, ln of losses and weights of the curves, [n, m].
        low, high: bounds of the coordinates, [n, p].
        free: which coordinates are not fixed, [p].
    """

    law: Law
    sizes: Array
    log_losses: Array
    weights: Array
    low: Array
    high: Array
    free: Mask

    def residuals(self, curve_ids: Index) -> Residuals:
        """Return the function that computes the residuals of some of the rows, for `minimise`.

        Args:
            curve_ids: curve of each row, [P].
        """

        def residuals(u: Array, rows: Index, needs_gradient: bool) -> tuple[Array, Array]:
            # In ln L, an error of 1 % has the same weight at a loss of 3 and at 0.03, whatever the
            # unit.  Residuals in L would be dominated by the largest losses, at the smallest sizes,
            # but the curve is extrapolated from its largest sizes.
            curves = curve_ids[rows]
            log_losses, jacobian = self.law.log_loss(u, self.sizes[curves], needs_gradient)
            return log_losses - self.log_losses[curves], jacobian

        return residuals

    def evaluate(self, u: Array) -> tuple[Array, Array]:
        """Return the residuals, [n, m], and their Jacobian, [n, m, p], at coordinates u, [n, p]."""
        rows = np.arange(len(u))
        return self.residuals(rows)(u, rows, True)

    def minimise(
        self, u: Array, curve_ids: Index, delta: Array, limits: Limits, is_held: Mask | bool = False
    ) -> Solution:
        """Minimise Huber's objective from each of P starts.

        Args:
            u: starts, [P, p].
            curve_ids: curve of each start, [P].
            delta: Huber's threshold of each curve, [n].
            limits: number of iterations and tolerance.
            is_held: which coordinates stay at their start, [p].
        """
        low, high = (np.where(is_held, u, end[curve_ids]) for end in (self.low, self.high))
        weights, residuals = self.weights[curve_ids], self.residuals(curve_ids)
        return minimise(residuals, u, low, high, weights, delta[curve_ids], *limits)


def _solve(problem: _Problem) -> tuple[Solution, Array]:
    """Return the best of several fits of each curve, [n, p], and Huber's thresholds, [n]."""
    num_curves = len(problem.log_losses)
    u, curve_ids = _best_starts(problem)
    # With a small threshold, any curve through p of the losses is a local minimum, as the other
    # residuals hardly count.  Least squares has no such minima: it comes first, and the threshold
    # is then decreased in stages.
    infinite = np.full(num_curves, np.inf)
    for names in problem.law.held_by_stage:
        is_held = np.array([parameter.name in names for parameter in problem.law.parameters])
        limits = _HELD_LIMITS if names else _SQUARES_LIMITS
        stage = problem.minimise(u, curve_ids, infinite, limits, is_held)
        u = stage.u
    delta = _robust_delta(problem, _best_solution(stage, num_curves).u)
    for factor in _ANNEALING:
        u = problem.minimise(u, curve_ids, factor * delta, _STAGE_LIMITS).u
    best = _best_solution(problem.minimise(u, curve_ids, delta, _LAST_LIMITS), num_curves)
    return replace(best, u=problem.law.canonical(best.u, problem.low, problem.high)), delta


def _best_starts(problem: _Problem) -> tuple[Array, Index]:
    """Return the points of the law's grid with the lowest squared error, for each curve.

    Returns:
        The `_STARTS` best starts of each curve, [P, p], and the curve of each, [P].
    """
    # One start is not enough: a single bend may be the end of the flat phase or the approach to the
    # floor E.  Either gives a local minimum, and both have to be followed to find the lower one.
    candidates = problem.law.candidates(problem.sizes, problem.log_losses, problem.weights)
    candidates = np.clip(candidates, problem.low[:, None], problem.high[:, None])
    num_curves, count, p = candidates.shape
    curve_ids = np.repeat(np.arange(num_curves), count)
    with np.errstate(all="ignore"):
        u, rows = candidates.reshape(-1, p), np.arange(len(curve_ids))
        residuals, _ = problem.residuals(curve_ids)(u, rows, False)
    objective = (problem.weights[curve_ids] * residuals**2).sum(-1)
    objective = np.where(np.isfinite(objective), objective, np.inf).reshape(num_curves, count)
    best = np.argsort(objective, axis=1, kind="stable")[:, :_STARTS]
    starts = np.take_along_axis(candidates, best[..., None], axis=1)
    return starts.reshape(-1, p), np.repeat(np.arange(num_curves), best.shape[1])


def _best_solution(solutions: Solution, num_curves: int) -> Solution:
    """Return the solution with the lowest objective of each curve, from all its starts."""
    objective = solutions.objective.reshape(num_curves, -1)
    best = objective.argmin(-1) + np.arange(num_curves) * objective.shape[1]
    return Solution(solutions.u[best], solutions.objective[best])


def _robust_delta(problem: _Problem, u: Array) -> Array:
    """Return Huber's threshold of each curve, [n]: 1.345 robust standard deviations of its
    residuals at coordinates u, [n, p]."""
    # As p parameters are fitted to m points, residuals are smaller than the noise by about
    # √((m − p)/m).
    magnitudes = np.abs(problem.evaluate(u)[0])
    is_counted = problem.weights > 0
    median = np.nanmedian(np.where(is_counted, magnitudes, np.nan), -1)
    num_points = is_counted.sum(-1)
    inflation = np.sqrt(num_points / np.maximum(num_points - problem.free.sum(), 1))
    return np.maximum(_EFFICIENT * median / _NORMAL_MEDIAN * inflation, _NARROWEST)


def _robust_deviation(residuals: Array, weights: Array, num_free: int) -> Array:
    """Return the robust standard deviation of the residuals, [n], from the m − p largest.

    The p smallest residuals are left out, as a fit with a small threshold δ minimises the sum of
    absolute residuals, which makes p of them 0.

    Args:
        residuals: [n, m].
        weights: [n, m].
        num_free: number of free parameters, p.
    """
    magnitudes = np.sort(np.where(weights > 0, np.abs(residuals), np.nan), -1)  # NaN last
    magnitudes[:, : min(num_free, magnitudes.shape[1] - 1)] = np.nan
    return np.nanmedian(magnitudes, -1) / _NORMAL_MEDIAN


def _gaussian_variance(delta: Array) -> Array:
    """Return the asymptotic variance of Huber's location estimator for standard normal noise z.

    It is E[ψ(z)²] / P(|z| ≤ δ)², with ψ(z) the clipped z: 1 (the variance of the mean) for an
    infinite threshold, π/2 (the variance of the median) for 0.

    Args:
        delta: thresholds, in standard deviations of the noise.
    """
    k = np.clip(delta, 1e-3, 10.0)
    coverage = np.vectorize(math.erf)(k / math.sqrt(2))
    density = np.exp(-(k**2) / 2) / math.sqrt(2 * math.pi)
    return (coverage - 2 * k * density + k**2 * (1 - coverage)) / coverage**2


def _fitted_law(
    problem: _Problem, curves: Curves, scale: Scale, solution: Solution, delta: Array
) -> FittedLaw:
    """Return the fitted law with the noise and the covariance of its parameters."""
    residuals, jacobian = problem.evaluate(solution.u)
    weights, free = problem.weights, problem.free
    dof = (weights > 0).sum(-1) - float(free.sum())
    remaining = np.maximum(dof, 1)
    noise = np.sqrt((weights * residuals**2).sum(-1) / remaining)
    # Variance of Huber's estimator: Σ ψ² / (m − p), divided by the squared fraction of residuals
    # within the threshold.  If the threshold is far below the noise, only the p residuals that the
    # fit makes 0 are within it: then the variance is computed for the usual `limit`, and
    # multiplied by the ratio of both variances under Gaussian noise.
    deviation = _robust_deviation(residuals, weights, int(free.sum()))
    limit = np.maximum(delta, _EFFICIENT * deviation)[:, None]
    inliers = np.maximum((weights * (np.abs(residuals) <= limit)).sum(-1) / weights.sum(-1), 0.5)
    variance = (weights * np.clip(residuals, -limit, limit) ** 2).sum(-1) / remaining / inliers**2
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = _gaussian_variance(delta / deviation) / _gaussian_variance(limit[:, 0] / deviation)
    variance *= np.where(deviation > 0, ratio, 1.0)
    return FittedLaw(
        definition=problem.law,
        coordinates=solution.u,
        covariance=_covariance(jacobian, weights, variance, free, problem.high - problem.low),
        noise=np.where(dof > 0, noise, np.nan),
        dof=dof,
        objective=solution.objective,
        delta=delta,
        scale=scale,
        _curves=curves,
    )


def _covariance(jacobian: Array, weights: Array, noise: Array, free: Mask, width: Array) -> Array:
    """Return the coordinates' covariance (JᵀWJ/s² + 12/width²)⁻¹, [n, p, p]; 0 where not free.

    12/width² is the precision of a uniform prior between the bounds.

    Args:
        jacobian: J, [n, m, p].
        weights: W, [n, m].
        noise: variance s² of the noise, [n]; for 0 (a perfect fit) the covariance is about 0.
        free: which coordinates are free, [p].
        width: distance between the bounds of the coordinates, [n, p].
    """
    information = np.einsum("nmp,nm,nmq->npq", jacobian, weights, jacobian)
    s = np.maximum(noise, _NO_NOISE)[:, None, None]
    prior = 12 * s[..., 0] / np.maximum(width, 1e-9) ** 2
    matrix = information + np.einsum("np,pq->npq", prior, np.eye(len(free)))
    # Rows and columns of fixed coordinates are those of the identity, so that they do not affect
    # the inverse for the others.  pinv, as two parameters may have the same effect on every loss.
    both_free = free[:, None] & free
    matrix = np.where(both_free, matrix, np.eye(len(free)))
    return np.where(both_free, s * np.linalg.pinv(matrix, hermitian=True, rcond=1e-15), 0.0)
