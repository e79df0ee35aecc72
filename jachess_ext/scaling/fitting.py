"""`fit`: one law through one curve or many at once, by a batched Levenberg–Marquardt."""

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
    """Fit a law to losses over sizes.

    All curves and all starts are one batch; the result does not depend on what else is in it.  The
    residual is ln L(D) − ln loss, under Huber's loss whose threshold is narrowed in stages to 1.345
    robust standard deviations of a curve's residuals, or 0.001.

    Args:
        sizes: training examples D, strictly increasing, [m].  0 (before fine-tuning) may come
            first; the laws with F or D_l use it, the others refuse it.
        losses: positive, [m] or [n, m].
        law: "lensllm" (Eq. 10; F free, or measured when `theta` is given), "rectified", "power"
            (Eq. 2) or "ats" (the last points on a line; `gamma`, `tau`).  None: of ats, power,
            rectified and, with a kernel, lensllm the one that would have forecast these losses
            best, the same for all rows; `FittedLaw.backtest` has the errors.
        fixed: values of parameters that are not to be fitted, in the units of `sizes` and `losses`.
        bounds: (low, high) instead of a law's own, in the same units.
        weights: [m] or [n, m], not negative; 0 leaves a loss out.  Only their ratios count.
        gamma, tau: AtS's stop rule.
        theta, residual, t, lr: as `jx.ntk_loss` takes them, for a single curve: F(Θ, t) is then
            computed.  One Θ and r, or one a size; t has one time a size.  The first stage holds the
            times, the second stretches them by one common factor, the parameter "t".

    Returns:
        A FittedLaw: .law, .params, .predict(D), .interval(D, level), .transition; its repr says
        what was fitted and why.

    Raises:
        ValueError: a loss that is not positive or NaN, sizes that do not increase, fewer sizes than
            free parameters, an unknown law or parameter, bounds that it cannot have, or arguments
            of another law.

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
    ends = _user_bounds(definition, fixed or {}, bounds or {})
    free = np.array([parameter.name not in (fixed or {}) for parameter in definition.parameters])
    scale, low, high = _scale_and_bounds(definition, curves, ends)
    scaled = curves.sizes / scale.size[:, None]
    log_losses = np.log(curves.losses / scale.loss[:, None])
    problem = _Problem(definition, scaled, log_losses, curves.weights, low, high, free)
    counted = int((curves.weights > 0).sum(-1).min())
    if counted < free.sum():
        text = f"the {definition.name} law has {int(free.sum())} free parameters"
        raise ValueError(f"{text} and there are {counted} losses; give more, or fix parameters")
    return _summary(problem, curves, scale, *_solve(problem))


def _fit_line(curves: Curves, gamma: int, tau: float) -> FittedLaw:
    """Return AtS's line, with the covariance of a line of least squares (Student's t is exact)."""
    if (curves.weights != curves.weights[:, :1]).any():
        raise ValueError("the ats law takes no weights; give it the sizes that count")
    trained = curves.sizes > 0
    x, y = np.log(curves.sizes[trained]), np.log(curves.losses[:, trained])
    line = accept_then_stop(x, y, gamma, tau)
    slope = np.maximum(line.variance, _NO_NOISE) / line.square_x
    level = np.maximum(line.variance, _NO_NOISE) / line.count + slope * line.mean_x**2
    cross = -slope * line.mean_x
    ones, dof = np.ones(len(slope)), line.count - 2.0
    return FittedLaw(
        definition=StraightLine(),
        coordinates=np.stack([line.intercept, line.slope], -1),
        covariance=np.stack([level, cross, cross, slope], -1).reshape(-1, 2, 2),
        noise=np.sqrt(line.variance),
        dof=dof,
        objective=np.where(dof > 0, line.variance * dof / 2, 0.0),
        delta=np.full(len(slope), math.inf),
        scale=Scale(ones, ones),
        _curves=curves,
    )


# The law that forecasts best --------------------------------------------------------------------

_SIMPLEST_FIRST = ("ats", "power", "rectified", "lensllm")
_FEWEST_TO_JUDGE = 5  # sizes above 0: one more than a law has parameters
_DIGITS = 9  # after the point; smaller differences of errors are rounding


def _fit_best(
    curves: Curves, kernel: Mapping[str, object], fit_one: Callable[..., FittedLaw]
) -> FittedLaw:
    """Fit the law that would have forecast the larger sizes best from the smaller ones.

    Every law is fitted to the first k sizes, for every k of at least five sizes above 0 and half of
    all, and judged on the others.  The law with the lowest median |ln error| over all k, sizes held
    back and curves is chosen: a mean would be dominated by a few wild forecasts.  Of equals, and
    where there are too few sizes to hold any back, the law with the fewest parameters that takes
    the input is fitted.  The errors of that law widen its intervals.
    """
    laws = list(_SIMPLEST_FIRST)
    if not kernel:
        laws.remove("lensllm")  # with F free it is the rectified law
    if (curves.weights != curves.weights[:, :1]).any():
        laws.remove("ats")
    counts, half = curves.above.cumsum(-1).min(0), (len(curves.sizes) + 1) // 2
    cuts = [k for k in range(half, len(curves.sizes)) if counts[k - 1] >= _FEWEST_TO_JUDGE]

    def fit_first(k: int, law: str) -> FittedLaw:
        first = np.arange(len(curves.sizes)) < k
        if law == "power":
            first &= curves.sizes > 0
        weights = None if law == "ats" else curves.weights[:, first]
        parts: dict[str, object] = {}
        if law == "lensllm":
            # One Θ and r may stand for all sizes; a sequence has one a size, as t always does.
            parts = {n: v[:k] if isinstance(v, Sequence) else v for n, v in kernel.items()}
            parts["t"] = np.asarray(kernel["t"])[:k]
        return fit_one(curves.sizes[first], curves.losses[:, first], law, weights=weights, **parts)

    def errors(k: int, law: str) -> Array:
        return np.log(fit_first(k, law).predict(curves.sizes[k:]) / curves.losses[:, k:])

    def median(errors: Mapping[int, Array]) -> float:
        judged = [np.abs(error)[curves.weights[:, k:] > 0] for k, error in errors.items()]
        return float(np.median(np.concatenate(judged)))

    law_errors = {law: {k: errors(k, law) for k in cuts} for law in (laws if cuts else ())}
    backtest = {law: median(errors) for law, errors in law_errors.items()}
    # `min` takes the first of equals, and the simplest law comes first.
    best = min(backtest, key=lambda law: round(backtest[law], _DIGITS), default=laws[0])
    chosen = fit_first(len(curves.sizes), best)
    drift = measure_drift(curves.sizes, curves.losses, curves.above, law_errors.get(best, {}))
    return replace(chosen, backtest=backtest, drift=drift, _curves=curves)


def _check_curves(
    sizes: npt.ArrayLike, losses: npt.ArrayLike, weights: npt.ArrayLike | None
) -> Curves:
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
    """Return name -> (low, high) of `bounds` and `fixed`, in the units of the input, checked."""
    parameters = {parameter.name: parameter for parameter in law.parameters}
    ends = dict(bounds) | {name: (value, value) for name, value in fixed.items()}
    for name, (low, high) in ends.items():
        if name not in parameters:
            raise ValueError(f"the {law.name} law has no parameter {name!r} among {[*parameters]}")
        pair = np.array([parameters[name].coordinate(end) for end in (low, high)])
        if not (np.isfinite(pair).all() and pair[0] <= pair[1]) or low < 0:
            kind = "positive numbers" if parameters[name].log else "numbers"
            text = f"{name} is to lie in [{low}, {high}]"
            raise ValueError(f"{text}; expected two finite {kind}, the lower first")
    return ends


def _scale_and_bounds(
    law: Law, curves: Curves, ends: Mapping[str, tuple[float, float]]
) -> tuple[Scale, Array, Array]:
    """Return the units to fit in, and the bounds of the coordinates in these units, [n, p].

    Where the user bounds a parameter whose unit has a fitted exponent (B of loss · size^β), that
    unit stays 1: the bound cannot be converted before β is fitted.
    """
    # The unit of a parameter is loss^a · size^b, where a and b may be other parameters: numbers
    # where those are fixed, NaN where they are fitted.  NaN in the unit of a bound other than 0 is
    # the case above.
    fixed = {name: low if low == high else np.nan for name, (low, high) in ends.items()}
    units = law.units({p.name: fixed.get(p.name, np.nan) for p in law.parameters})
    powers = [units.get(name, NO_UNIT) for name, pair in ends.items() if any(pair)]
    loss, size = (not np.isnan(power).any() for power in zip(*powers, NO_UNIT, strict=True))
    counted, ones = curves.weights > 0, np.ones(len(curves.losses))
    largest = np.where(counted, curves.sizes, 0.0).max(-1)
    scale = Scale(
        loss=np.where(counted, curves.losses, np.inf).min(-1) if loss else ones,
        size=np.where(largest > 0, largest, 1.0) if size and not law.sizes_are_examples else ones,
    )
    low, high = np.empty((2, len(ones), len(law.parameters)))
    for column, p in enumerate(law.parameters):
        unit: Values = scale.unit(units.get(p.name, NO_UNIT)) if p.name in ends else 1.0
        pair = ends.get(p.name, (p.low, p.high))
        low[:, column], high[:, column] = (p.coordinate(end and end / unit) for end in pair)
    return scale, low, high


# The fit ----------------------------------------------------------------------------------------

Limits: TypeAlias = tuple[int, float]
"""Iterations at most, and the tolerance of `minimise`."""
_HELD_LIMITS, _SQUARES_LIMITS, _STAGE_LIMITS, _LAST_LIMITS = (
    (15, 1e-2),
    (60, 1e-7),
    (20, 1e-4),
    (200, 1e-10),
)
"""Of stages that only lead to the next one a rough minimum is enough."""
_ANNEALING = (8.0, 3.0)
"""Huber's threshold in the stages before the last, in multiples of the last."""
_STARTS = 8
_EFFICIENT = 1.345  # Huber's threshold in noise deviations: 95 % efficient under Gaussian noise
_NARROWEST = 1e-3
_NORMAL_MEDIAN = 0.6745  # median of |z|
_NO_NOISE = 1e-30  # variance of ln L, of a perfect fit


@dataclass(frozen=True)
class _Problem:
    """Residuals of a law at the points of a batch of curves, started several times each.

    Attributes:
        law, sizes, log_losses, weights: what is fitted to what, [n, m].
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

    def residuals(self, owner: Index) -> Residuals:
        """Return the residual function of rows that belong to the curves `owner`."""

        def residuals(u: Array, rows: Index, gradient: bool) -> tuple[Array, Array]:
            # In ln L an error of 1 % weighs the same at a loss of 3 and at 0.03, and the unit of
            # the losses drops out.  Residuals in L would fit the largest losses, which are those of
            # the smallest sizes, and it is the other end that is extrapolated.
            chosen = owner[rows]
            value, jacobian = self.law.log_loss(u, self.sizes[chosen], gradient)
            return value - self.log_losses[chosen], jacobian

        return residuals

    def evaluate(self, u: Array) -> tuple[Array, Array]:
        """Return the residuals, [n, m], and their Jacobian with the coordinates u, [n, p]."""
        rows = np.arange(len(u))
        return self.residuals(rows)(u, rows, True)

    def minimise(
        self, u: Array, owner: Index, delta: Array, limits: Limits, held: Mask | bool = False
    ) -> Solution:
        """Minimise from u, a row a start; delta: one number a curve; `held` stay as they are."""
        low, high = (np.where(held, u, end[owner]) for end in (self.low, self.high))
        return minimise(
            self.residuals(owner), u, low, high, self.weights[owner], delta[owner], *limits
        )


def _solve(problem: _Problem) -> tuple[Solution, Array]:
    """Return the best of several starts and Huber's threshold [n], for every curve."""
    curves = len(problem.log_losses)
    u, owner = _best_starts(problem)
    # Under a narrow threshold a law that meets any p losses exactly and ignores the others is a
    # minimum.  Least squares has no such minima: the starts go there first, and the threshold then
    # comes down in stages.
    squares = np.full(curves, np.inf)
    for names in problem.law.stages:
        held = np.array([parameter.name in names for parameter in problem.law.parameters])
        limits = _HELD_LIMITS if names else _SQUARES_LIMITS
        stage = problem.minimise(u, owner, squares, limits, held)
        u = stage.u
    delta = _robust_delta(problem, _best_solution(stage, curves).u)
    for factor in _ANNEALING:
        u = problem.minimise(u, owner, factor * delta, _STAGE_LIMITS).u
    best = _best_solution(problem.minimise(u, owner, delta, _LAST_LIMITS), curves)
    return replace(best, u=problem.law.canonical(best.u, problem.low, problem.high)), delta


def _best_starts(problem: _Problem) -> tuple[Array, Index]:
    """Return the best points of the law's grid for each curve, by least squares."""
    # One start is not enough: a single bend can be the end of the flat phase or the way into the
    # floor E.  Each reading has its own minimum, and only following both tells the lower one.
    candidates = problem.law.candidates(problem.sizes, problem.log_losses, problem.weights)
    candidates = np.clip(candidates, problem.low[:, None], problem.high[:, None])
    curves, count, p = candidates.shape
    owner = np.repeat(np.arange(curves), count)
    with np.errstate(all="ignore"):
        value, _ = problem.residuals(owner)(candidates.reshape(-1, p), np.arange(len(owner)), False)
    objective = (problem.weights[owner] * value**2).sum(-1)
    objective = np.where(np.isfinite(objective), objective, np.inf).reshape(curves, count)
    best = np.argsort(objective, axis=1, kind="stable")[:, :_STARTS]
    chosen = np.take_along_axis(candidates, best[..., None], axis=1)
    return chosen.reshape(-1, p), np.repeat(np.arange(curves), best.shape[1])


def _best_solution(starts: Solution, curves: int) -> Solution:
    """Return the start with the lowest objective, for every curve."""
    objective = starts.objective.reshape(curves, -1)
    best = objective.argmin(-1) + np.arange(curves) * objective.shape[1]
    return Solution(starts.u[best], starts.objective[best])


def _robust_delta(problem: _Problem, u: Array) -> Array:
    """Return 1.345 robust standard deviations of the residuals, [n]."""
    # p parameters bend the law towards m points, so that residuals are smaller than the noise by
    # √((m − p)/m), if not by more.
    value = np.abs(problem.evaluate(u)[0])
    counted = problem.weights > 0
    median = np.nanmedian(np.where(counted, value, np.nan), -1)
    points = counted.sum(-1)
    inflation = np.sqrt(points / np.maximum(points - problem.free.sum(), 1))
    return np.maximum(_EFFICIENT * median / _NORMAL_MEDIAN * inflation, _NARROWEST)


def _robust_deviation(value: Array, weights: Array, free: int) -> Array:
    """Return the robust standard deviation of the residuals, [n], from the m − p largest.

    Of a fit by absolute residuals, which a small δ comes to, the p smallest are 0.
    """
    size = np.sort(np.where(weights > 0, np.abs(value), np.nan), -1)  # NaN last
    size[:, : min(free, size.shape[1] - 1)] = np.nan
    return np.nanmedian(size, -1) / _NORMAL_MEDIAN


def _gaussian_variance(delta: Array) -> Array:
    """Return the variance of Huber's location under Gaussian noise, the unit of the thresholds.

    E ψ² over the squared probability inside: from 1 at infinity to π/2 at 0, the median's.
    """
    k = np.clip(delta, 1e-3, 10.0)
    inside = np.vectorize(math.erf)(k / math.sqrt(2))
    density = np.exp(-(k**2) / 2) / math.sqrt(2 * math.pi)
    return (inside - 2 * k * density + k**2 * (1 - inside)) / inside**2


def _summary(
    problem: _Problem, curves: Curves, scale: Scale, solution: Solution, delta: Array
) -> FittedLaw:
    value, jacobian = problem.evaluate(solution.u)
    weights, free = problem.weights, problem.free
    dof = (weights > 0).sum(-1) - float(free.sum())
    remaining = np.maximum(dof, 1)
    noise = np.sqrt((weights * value**2).sum(-1) / remaining)
    # Variance of Huber's estimator: Σ ψ² / (m − p) over the squared fraction of residuals inside.
    # Inside a threshold far below the noise are only the residuals that the fit makes 0: there the
    # variance is that at the usual threshold, times the ratio of both under Gaussian noise.
    deviation = _robust_deviation(value, weights, int(free.sum()))
    wide = np.maximum(delta, _EFFICIENT * deviation)[:, None]
    inside = np.maximum((weights * (np.abs(value) <= wide)).sum(-1) / weights.sum(-1), 0.5)
    spread = (weights * np.clip(value, -wide, wide) ** 2).sum(-1) / remaining / inside**2
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = _gaussian_variance(delta / deviation) / _gaussian_variance(wide[:, 0] / deviation)
    spread *= np.where(deviation > 0, loss, 1.0)
    return FittedLaw(
        definition=problem.law,
        coordinates=solution.u,
        covariance=_covariance(jacobian, weights, spread, free, problem.high - problem.low),
        noise=np.where(dof > 0, noise, np.nan),
        dof=dof,
        objective=solution.objective,
        delta=delta,
        scale=scale,
        _curves=curves,
    )


def _covariance(jacobian: Array, weights: Array, spread: Array, free: Mask, width: Array) -> Array:
    """Return (JᵀJ/s² + 12/width²)⁻¹ over the free coordinates.

    That is a uniform prior's variance where JᵀJ is 0; s² → 0 (a perfect fit) gives 0.
    """
    information = np.einsum("nmp,nm,nmq->npq", jacobian, weights, jacobian)
    s = np.maximum(spread, _NO_NOISE)[:, None, None]
    prior = 12 * s[..., 0] / np.maximum(width, 1e-9) ** 2
    matrix = information + np.einsum("np,pq->npq", prior, np.eye(len(free)))
    # A fixed coordinate's row and column are the unit matrix's, so that the others' inverse is
    # what it would be without it; pinv, since two parameters may do the same to every loss.
    keep = free[:, None] & free
    matrix = np.where(keep, matrix, np.eye(len(free)))
    return np.where(keep, s * np.linalg.pinv(matrix, hermitian=True, rcond=1e-15), 0.0)
