"""`fit`: one law through one curve or many at once, by a batched Levenberg–Marquardt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from .._io import MissingExtra, axes_or_new
from .baselines import accept_then_stop, line_through
from .laws import (
    LAWS,
    Exponents,
    Law,
    MeasuredLens,
    Parameter,
    StraightLine,
    central_gradient,
    log_sizes,
)
from .least_squares import Residuals, Solution, minimise
from .predictive import Array, Index, Mask, Student, check_level
from .runs import check_losses, check_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from ..ntk import Spectrum

Values = Array | float


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

    Example:
        >>> import jachess_ext as jx
        >>> sizes = [100, 200, 400, 800, 1600]
        >>> law = jx.scaling.fit(sizes, [30 / d**0.5 + 0.4 for d in sizes], law="power")
        >>> round(law.predict(10_000), 2)
        0.7
    """
    curves = _check_curves(sizes, losses, weights)
    parts = {"theta": theta, "residual": residual, "t": t, "lr": lr}
    kernel = {name: value for name, value in parts.items() if value is not None}
    if law in (None, "ats") and not (fixed is None and bounds is None):
        raise ValueError("fixed and bounds are for one law; name it, such as law='rectified'")
    if kernel and law not in (None, "lensllm"):
        raise ValueError(f"{', '.join(kernel)} is for the lensllm law; the {law} law has no kernel")
    if kernel and (len(kernel) < len(parts) or len(curves.losses) > 1):
        text = f"a measured F needs {', '.join(parts)} of one curve"
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
    ends = _ends(definition, fixed or {}, bounds or {})
    free = np.array([parameter.name not in (fixed or {}) for parameter in definition.parameters])
    scale, low, high = _box(definition, curves, ends)
    scaled = curves.sizes / scale.size[:, None]
    log_losses = np.log(curves.losses / scale.loss[:, None])
    problem = _Problem(definition, scaled, log_losses, curves.weights, low, high, free)
    counted = int((curves.weights > 0).sum(-1).min())
    if counted < free.sum():
        text = f"the {definition.name} law has {int(free.sum())} free parameters"
        raise ValueError(f"{text} and there are {counted} losses; give more, or fix parameters")
    return _summary(problem, curves, scale, *_solve(problem))


def _fit_line(curves: _Curves, gamma: int, tau: float) -> FittedLaw:
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
_EQUAL = 9  # digits after the point; smaller errors are rounding's


def _fit_best(
    curves: _Curves, kernel: Mapping[str, object], fit_one: Callable[..., FittedLaw]
) -> FittedLaw:
    """Fit the law that would have forecast the larger sizes best from the smaller ones.

    Every law is fitted to the first k sizes, for every k of at least five sizes above 0 and half of
    all, and judged on the others.  The lowest median of |ln error| over all k, sizes held back and
    curves decides: the mean would be that of a few wild forecasts.  Of equals, and where there are
    too few sizes to hold any back, the law with the fewest parameters that takes the input is
    fitted.  The errors of that law widen its intervals.
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

    by_law = {law: {k: errors(k, law) for k in cuts} for law in (laws if cuts else ())}
    backtest = {law: median(errors) for law, errors in by_law.items()}
    # `min` takes the first of equals, and the laws stand with the simplest first.
    best = min(backtest, key=lambda law: round(backtest[law], _EQUAL), default=laws[0])
    chosen = fit_first(len(curves.sizes), best)
    drift = measure_drift(curves.sizes, curves.losses, curves.above, by_law.get(best, {}))
    return replace(chosen, backtest=backtest, drift=drift, _curves=curves)


# Arguments --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curves:
    """Losses of n curves at m sizes.

    Attributes:
        sizes: strictly increasing, [m]; the first may be 0.
        losses: positive, [n, m]; a curve's lowest stands for those that do not count.
        weights: not negative, [n, m]; the mean of those above 0 is 1.
        single: whether the caller gave one curve as [m].
    """

    sizes: Array
    losses: Array
    weights: Array
    single: bool

    @property
    def above(self) -> Mask:
        """Which losses count and are at a size above 0, [n, m]."""
        return (self.weights > 0) & (self.sizes > 0)


def _check_curves(
    sizes: npt.ArrayLike, losses: npt.ArrayLike, weights: npt.ArrayLike | None
) -> _Curves:
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
    return _Curves(d, np.where(w > 0, rows, lowest), w, y.ndim == 1)


def _ends(
    law: Law, fixed: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return the bounds that were given, in the units of the losses and sizes that were given."""
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


@dataclass(frozen=True)
class Scale:
    """Units of each curve's own, which a fit counts in: [n] each.

    Attributes:
        loss: its lowest loss.
        size: its largest size.
    """

    loss: Array
    size: Array

    def of(self, unit: Exponents) -> Array:
        """Return the unit of a parameter, [n]; an unknown exponent is none of a unit of 1."""
        pairs = zip(unit, (self.loss, self.size), strict=True)
        loss, size = (np.where(base == 1, 0.0, power * np.log(base)) for power, base in pairs)
        return np.exp(loss + size)


_NO_UNIT = (0.0, 0.0)


def _box(
    law: Law, curves: _Curves, ends: Mapping[str, tuple[float, float]]
) -> tuple[Scale, Array, Array]:
    """Return the units to fit in, and the bounds of the coordinates in these units, [n, p].

    Where a bound was given for a parameter whose unit is a power of losses or sizes that is itself
    fitted (B of loss · size^β), that unit stays 1: the bound has no other form.
    """
    # The unit of a parameter is loss^a · size^b, where a and b may hold other parameters: those are
    # numbers where they are fixed, NaN where they are fitted.  NaN in the unit of a bound other
    # than 0 is the case above.
    fixed = {name: low if low == high else np.nan for name, (low, high) in ends.items()}
    units = law.units({p.name: fixed.get(p.name, np.nan) for p in law.parameters})
    powers = [units.get(name, _NO_UNIT) for name, pair in ends.items() if any(pair)]
    loss, size = (not np.isnan(power).any() for power in zip(*powers, _NO_UNIT, strict=True))
    counted, ones = curves.weights > 0, np.ones(len(curves.losses))
    largest = np.where(counted, curves.sizes, 0.0).max(-1)
    scale = Scale(
        loss=np.where(counted, curves.losses, np.inf).min(-1) if loss else ones,
        size=np.where(largest > 0, largest, 1.0) if size and not law.only_in_rows else ones,
    )
    low, high = np.empty((2, len(ones), len(law.parameters)))
    for place, p in enumerate(law.parameters):
        unit: Values = scale.of(units.get(p.name, _NO_UNIT)) if p.name in ends else 1.0
        pair = ends.get(p.name, (p.low, p.high))
        low[:, place], high[:, place] = (p.coordinate(end and end / unit) for end in pair)
    return scale, low, high


# The fit ----------------------------------------------------------------------------------------

Limits: TypeAlias = tuple[int, float]
"""Iterations at most, and the tolerance of `minimise`."""
_HELD, _SQUARES, _STAGE, _LAST = (15, 1e-2), (60, 1e-7), (20, 1e-4), (200, 1e-10)
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

    def of(self, owner: Index) -> Residuals:
        """Return the residual function of rows that belong to the curves `owner`."""

        def residuals(u: Array, rows: Index, gradient: bool) -> tuple[Array, Array]:
            # In ln L an error of 1 % weighs the same at a loss of 3 and at 0.03, and the unit of
            # the losses drops out.  Residuals in L would fit the largest losses, which are those of
            # the smallest sizes, and it is the other end that is extrapolated.
            chosen = owner[rows]
            value, jacobian = self.law.log_loss(u, self.sizes[chosen], gradient)
            return value - self.log_losses[chosen], jacobian

        return residuals

    def at(self, u: Array) -> tuple[Array, Array]:
        """Return the residuals, [n, m], and their Jacobian with the coordinates u, [n, p]."""
        rows = np.arange(len(u))
        return self.of(rows)(u, rows, True)

    def minimise(
        self, u: Array, owner: Index, delta: Array, limits: Limits, held: Mask | bool = False
    ) -> Solution:
        """Minimise from u, a row a start; delta: one number a curve; `held` stay as they are."""
        low, high = (np.where(held, u, end[owner]) for end in (self.low, self.high))
        return minimise(self.of(owner), u, low, high, self.weights[owner], delta[owner], *limits)


def _solve(problem: _Problem) -> tuple[Solution, Array]:
    """Return the best of several starts and Huber's threshold [n], for every curve."""
    curves = len(problem.log_losses)
    u, owner = _best_candidates(problem)
    # Under a narrow threshold a law that meets any p losses exactly and ignores the others is a
    # minimum.  Least squares has no such minima: the starts go there first, and the threshold then
    # comes down in stages.
    squares = np.full(curves, np.inf)
    for names in problem.law.stages:
        held = np.array([parameter.name in names for parameter in problem.law.parameters])
        stage = problem.minimise(u, owner, squares, _HELD if names else _SQUARES, held)
        u = stage.u
    delta = _robust_delta(problem, _best_of(stage, curves).u)
    for factor in _ANNEALING:
        u = problem.minimise(u, owner, factor * delta, _STAGE).u
    best = _best_of(problem.minimise(u, owner, delta, _LAST), curves)
    return replace(best, u=problem.law.settle(best.u, problem.low, problem.high)), delta


def _best_candidates(problem: _Problem) -> tuple[Array, Index]:
    """Return the best points of the law's grid for each curve, by least squares."""
    # One start is not enough: a single bend can be the end of the flat phase or the way into the
    # floor E.  Each reading has its own minimum, and only following both tells the lower one.
    candidates = problem.law.candidates(problem.sizes, problem.log_losses, problem.weights)
    candidates = np.clip(candidates, problem.low[:, None], problem.high[:, None])
    curves, count, p = candidates.shape
    owner = np.repeat(np.arange(curves), count)
    with np.errstate(all="ignore"):
        value, _ = problem.of(owner)(candidates.reshape(-1, p), np.arange(len(owner)), False)
    objective = (problem.weights[owner] * value**2).sum(-1)
    objective = np.where(np.isfinite(objective), objective, np.inf).reshape(curves, count)
    best = np.argsort(objective, axis=1, kind="stable")[:, :_STARTS]
    chosen = np.take_along_axis(candidates, best[..., None], axis=1)
    return chosen.reshape(-1, p), np.repeat(np.arange(curves), best.shape[1])


def _best_of(starts: Solution, curves: int) -> Solution:
    """Return the start with the lowest objective, for every curve."""
    objective = starts.objective.reshape(curves, -1)
    best = objective.argmin(-1) + np.arange(curves) * objective.shape[1]
    return Solution(starts.u[best], starts.objective[best])


def _robust_delta(problem: _Problem, u: Array) -> Array:
    """Return 1.345 robust standard deviations of the residuals, [n]."""
    # p parameters bend the law towards m points, so that residuals are smaller than the noise by
    # √((m − p)/m), if not by more.
    value = np.abs(problem.at(u)[0])
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

    E ψ² over the squared share inside: from 1 at infinity to π/2 at 0, the median's.
    """
    k = np.clip(delta, 1e-3, 10.0)
    share = np.vectorize(math.erf)(k / math.sqrt(2))
    density = np.exp(-(k**2) / 2) / math.sqrt(2 * math.pi)
    return (share - 2 * k * density + k**2 * (1 - share)) / share**2


def _summary(
    problem: _Problem, curves: _Curves, scale: Scale, solution: Solution, delta: Array
) -> FittedLaw:
    value, jacobian = problem.at(solution.u)
    weights, free = problem.weights, problem.free
    dof = (weights > 0).sum(-1) - float(free.sum())
    left = np.maximum(dof, 1)
    noise = np.sqrt((weights * value**2).sum(-1) / left)
    # Variance of Huber's estimator: Σ ψ² / (m − p) over the squared share of residuals inside.
    # Inside a threshold far below the noise are only the residuals that the fit makes 0: there it
    # is taken at the usual threshold, times what the narrow one loses under Gaussian noise.
    deviation = _robust_deviation(value, weights, int(free.sum()))
    wide = np.maximum(delta, _EFFICIENT * deviation)[:, None]
    share = np.maximum((weights * (np.abs(value) <= wide)).sum(-1) / weights.sum(-1), 0.5)
    spread = (weights * np.clip(value, -wide, wide) ** 2).sum(-1) / left / share**2
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


# Results ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transition:
    """The size D* where the pre-power phase of a curve ends, with an interval.

    Attributes:
        size: the estimate.
        low, high: the interval.

    Example:
        >>> import jachess_ext as jx
        >>> sizes = [10, 30, 100, 300, 1000, 3000, 10_000]
        >>> losses = [2.0, 1.98, 1.92, 1.7, 1.2, 0.8, 0.5]
        >>> 10 < jx.scaling.fit(sizes, losses, law="rectified").transition.size < 10_000
        True
    """

    size: float
    low: float
    high: float


Transitions = Transition | None | list[Transition | None]
"""Of a single curve, or a list with one a curve; None where none is seen."""


@dataclass(frozen=True, repr=False)
class FittedLaw:
    """What `fit` returns. Shapes below are for n curves; a single curve ([m]) has no leading n.

    Intervals are Student's t around the fit with m − p degrees of freedom: the noise, and the
    fit's own error carried over by the law's gradient (delta method).  That error comes from the
    curvature at the optimum plus a weak pull to the middle of each parameter's bounds, without
    which a parameter that the data say nothing about would have an infinite variance.  Those of
    ats are the exact ones of a straight line, given the points that were accepted.

    Attributes:
        definition: the law, with its `formula`.
        coordinates: [n, p], in units of `scale`; logarithms where the parameter says so.
        covariance: of the coordinates, [n, p, p]; zero for fixed ones.
        noise: standard deviation of ln L around the law, [n]; NaN without degrees of freedom.
        dof: sizes that count minus free parameters, [n].
        objective: the minimised Σ w h_δ(r), [n]; the mean of the weights above 0 is 1.
        delta: Huber's threshold δ in ln L, [n].
        scale: the units that the fit counted in.
        backtest: where `fit` chose the law, the median of |ln error| that each of the laws had when
            it forecast the larger sizes from the smaller ones; empty otherwise.
        drift: how far the curves may leave the law beyond the sizes measured, where `fit` chose it;
            None: a law that was named is taken as exact.

    Example:
        >>> import jachess_ext as jx
        >>> sizes = [100, 200, 400, 800, 1600]
        >>> law = jx.scaling.fit(sizes, [30 / d**0.5 + 0.4 for d in sizes], law="power")
        >>> sorted(law.params)
        ['B', 'E', 'alpha', 'beta']
        >>> print(repr(law).split(",")[0])
        power law
    """

    definition: Law
    coordinates: Array
    covariance: Array
    noise: Array
    dof: Array
    objective: Array
    delta: Array
    scale: Scale
    _curves: _Curves
    backtest: Mapping[str, float] = field(default_factory=dict)
    drift: Drift | None = None

    def __repr__(self) -> str:
        return describe(self)

    @property
    def law(self) -> str:
        """Name of the law."""
        return self.definition.name

    @property
    def measured(self) -> Array:
        """The smallest and the largest size above 0 that counted, [n, 2]."""
        sizes, above = self._curves.sizes, self._curves.above
        low, high = np.where(above, sizes, np.inf).min(-1), np.where(above, sizes, 0).max(-1)
        return np.stack([low, high], -1)

    @property
    def params(self) -> dict[str, Values]:
        """Parameters by name in the units that were given, [n]."""
        return {name: self._row(value) for name, value in self._values(self.coordinates).items()}

    def _values(self, coordinates: Array) -> dict[str, Array]:
        columns = zip(self.definition.parameters, coordinates.T, strict=True)
        values = {p.name: p.value(column) for p, column in columns}
        units = self.definition.units(values)
        scales = {name: self.scale.of(units.get(name, _NO_UNIT)) for name in values}
        return {name: value * scales[name] for name, value in values.items()}

    def parameter_intervals(self, level: float = 0.9) -> dict[str, tuple[Values, Values]]:
        """Return where the parameters lie with probability `level` if the law is exact.

        Args:
            level: in (0, 1).

        Returns:
            Lower and upper ends by name, [n]; fixed parameters have none.

        Raises:
            ValueError: a bad level, or no degree of freedom left to know the noise from.
            MissingExtra: scipy is not installed.
        """
        self._check_width()
        result: dict[str, tuple[Values, Values]] = {}
        for place, p in enumerate(self.definition.parameters):
            if not self.covariance[:, place, place].any():
                continue

            # Of ln value where the coordinate is one: it depends on others through its unit.
            def form(u: Array, p: Parameter = p) -> Array:
                return np.asarray(p.coordinate(self._values(u)[p.name]))

            gradient = central_gradient(form, self.coordinates, _STEP)
            error = np.sqrt(self._variance(gradient))
            spread = Student(form(self.coordinates), np.maximum(error, _NARROW), self.dof)
            ends = spread.interval(level)
            with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
                low, high = (np.exp(end) if p.log else np.maximum(end, p.low) for end in ends)
            result[p.name] = self._row(low), self._row(high)
        return result

    def _variance(self, gradient: Array) -> Array:
        """Return gᵀ C g, [n]: the variance of what has the gradient g, [n, p] (delta method)."""
        return np.einsum("np,npq,nq->n", gradient, self.covariance, gradient)

    @property
    def has_width(self) -> bool:
        """Whether degrees of freedom are left, so that `predictive` and `interval` are defined."""
        return bool((self.dof >= 1).all())

    def _check_width(self) -> None:
        if not self.has_width:
            text = f"the {self.law} law has as many free parameters as there are sizes"
            raise ValueError(f"{text}, so nothing tells the noise; fix a parameter, or give more")

    def predictive(self, size: float) -> Student:
        """Return the distribution of ln L that a measurement at `size` would give, one a curve.

        Raises:
            ValueError: no degree of freedom is left to estimate the noise from.
        """
        self._check_width()
        # Beyond the largest size the drift stands for the parameters' uncertainty, too.
        last = math.inf if self.drift is None else float(np.exp(self.drift.last.max()))
        within = self._scaled(np.array([min(size, last)]))
        _, gradient = self.definition.log_loss(self.coordinates, within)
        variance = self.noise**2 + self._variance(gradient[:, 0])
        # A perfect fit has no width; a positive scale keeps its quantiles defined.
        width = np.maximum(np.sqrt(variance), _NARROW)
        exact = Student(self._log_predict(np.array([size]))[:, 0], width, self.dof)
        return exact if self.drift is None else self.drift.added_to(exact, size)

    @property
    def transition(self) -> Transitions:
        """D* with its 90 % interval.

        None where no transition is seen: the law has none, or its interval leaves the sizes above 0
        that were measured.
        """
        seen: list[Transition | None] = [None] * len(self.coordinates)
        transition = self.definition.log_transition(self.coordinates)
        if transition is not None and self.has_width:
            value, gradient = transition
            error = np.sqrt(self._variance(gradient))
            spread = Student(value + np.log(self.scale.size), error, self.dof)
            ends = np.stack([spread.location, *spread.interval(0.9)], -1)
            first, last = np.log(self.measured.T)
            for row in np.flatnonzero((first < ends[:, 1]) & (ends[:, 2] < last)):
                seen[row] = Transition(*np.exp(ends[row]).tolist())
        return seen[0] if self._curves.single else seen

    def predict(self, sizes: npt.ArrayLike) -> Values:
        """Return the fitted loss.

        Args:
            sizes: training examples D, a number or [k].

        Returns:
            [n, k]; without k for a number, without n for a single curve.

        Raises:
            ValueError: a size that is negative, infinite or NaN.
        """
        return self._shaped(np.exp(self._log_predict(_sizes(sizes))), sizes)

    def interval(self, sizes: npt.ArrayLike, level: float = 0.9) -> tuple[Values, Values]:
        """Return where a loss measured at a size would lie with probability `level`.

        Of a law that `fit` chose, wider the further beyond the sizes measured (`drift`); a law that
        was named is taken as exact.

        Args:
            sizes: a number or [k].
            level: in (0, 1).

        Returns:
            Lower and upper ends, shaped as `predict`.

        Raises:
            ValueError: a bad size or level, or no degree of freedom left to know the noise from.
            MissingExtra: scipy is not installed.
        """
        ends = [self.predictive(float(size)).interval(level) for size in _sizes(sizes)]
        with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
            low, high = (np.exp(np.stack([end[side] for end in ends], -1)) for side in (0, 1))
        return self._shaped(low, sizes), self._shaped(high, sizes)

    def plot(self, ax: Axes | None = None, level: float = 0.9) -> Axes:
        """Draw the losses that were fitted, the curves and, where they have any, their intervals.

        The curves reach to four times the largest size.

        Args:
            ax: matplotlib axes to draw on; None: new axes.
            level: of the intervals.

        Returns:
            The axes.

        Raises:
            ValueError: a bad level.
            MissingExtra: matplotlib or scipy is not installed.

        Example:
            >>> import jachess_ext as jx
            >>> sizes = [100, 200, 400, 800, 1600]
            >>> losses = [1.1, 0.93, 0.8, 0.7, 0.62]
            >>> jx.scaling.fit(sizes, losses, law="power").plot().get_xscale()
            'log'
        """
        check_level(level)
        sizes = np.geomspace(self.measured[:, 0].min(), 4 * self.measured[:, 1].max(), 100)
        predicted = np.atleast_2d(self.predict(sizes))
        ends = [np.atleast_2d(end) for end in self.interval(sizes, level)] if self.has_width else []
        ax = axes_or_new(ax)
        for row, curve in enumerate(predicted):
            (line,) = ax.plot(sizes, curve)
            color, shown = line.get_color(), self._curves.above[row]
            ax.plot(self._curves.sizes[shown], self._curves.losses[row, shown], "o", color=color)
            if ends:
                ax.fill_between(sizes, *(end[row] for end in ends), color=color, alpha=0.2)
        ax.set(xscale="log", yscale="log", xlabel="training examples", ylabel="loss")
        ax.set_title(f"{self.law} law" + (f", {100 * level:g} % interval" if ends else ""))
        return ax

    def _log_predict(self, sizes: Array) -> Array:
        """Return ln L at sizes [k]: [n, k]."""
        if not self.definition.reads_zero and (sizes == 0).any():
            raise ValueError(f"the {self.law} law has no value at size 0; ask for sizes above 0")
        value, _ = self.definition.log_loss(self.coordinates, self._scaled(sizes), gradient=False)
        return value + np.log(self.scale.loss)[:, None]

    def _scaled(self, sizes: Array) -> Array:
        return sizes / self.scale.size[:, None]

    def _shaped(self, values: Array, sizes: npt.ArrayLike) -> Values:
        """Return [n, k] as the caller asked: without k for a number, without n for one curve."""
        return self._row(values[:, 0] if np.ndim(sizes) == 0 else values)

    def _row(self, values: Array) -> Values:
        if not self._curves.single:
            return values
        return float(values[0]) if values.ndim == 1 else values[0]


def _sizes(sizes: npt.ArrayLike) -> Array:
    array = np.atleast_1d(np.asarray(sizes, dtype=np.float64))
    if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"sizes is {sizes!r}; expected one or more finite numbers, from 0 up")
    return array


_STEP = 1e-6  # of a coordinate, for derivatives of what has no formula here
_NARROW = 1e-12  # the least scale of a distribution of ln L or of a parameter


# ---- a law in words: what a notebook shows of it -------------------------------------------------


def describe(fitted: FittedLaw) -> str:
    """Return the law, its parameters, transition, residual, and what intervals and choice rest on.

    One curve comes with 90 % intervals of its parameters, several with the range of theirs.
    """
    first, last = fitted.measured[:, 0].min(), fitted.measured[:, 1].max()
    curves = len(fitted.measured)
    through = "" if curves == 1 else f"{curves} curves at "
    sizes = f"{_size(first, 6)} to {_size(last, 6)}"
    head = f"{fitted.law} law, {fitted.definition.formula}, through {through}sizes {sizes}"
    if fitted.backtest:
        order = sorted(fitted.backtest, key=fitted.backtest.__getitem__)
        errors = ", ".join(f"{law} {fitted.backtest[law]:.2g}" for law in order)
        chosen = f"median |ln error| of larger sizes forecast from smaller ones: {errors}"
    elif fitted.drift is not None:
        chosen = "none, too few sizes; the simplest law"
    else:
        chosen = "none, the law was named"
    noise, dof = _range(fitted.noise, ".2g"), _range(fitted.dof, ".3g")
    residual = f"{noise} in ln L, degrees of freedom: {dof}"
    errors = "the backtest's errors and " if fitted.backtest else ""
    width = f"of losses widen beyond the largest size, by {errors}the slope there"
    if not fitted.has_width:
        residual = width = "unknown, no degree of freedom is left"
    elif fitted.drift is None:
        width = "of losses take the law as exact, and are too narrow where it is not"
    rows = [
        *_parameter_rows(fitted),
        ("residual", residual),
        ("backtest", chosen),
        ("intervals", width),
        ("forecasts", "of this law alone; select's, by default, are of many shapes and curves"),
    ]
    return "\n".join([head, *(f"  {label:<12}{text}" for label, text in rows)])


def _parameter_rows(fitted: FittedLaw) -> list[tuple[str, str]]:
    """Return the names of the parameters and of the transition, each with its estimate."""
    try:
        intervals = fitted.parameter_intervals() if fitted.has_width else {}
        transition = _transition_text(fitted)
    except MissingExtra:
        intervals, transition = {}, "unknown, scipy is not installed"
    rows = []
    for name, value in fitted.params.items():
        text = _range(np.ravel(value), ",.4g")
        if name in intervals and len(fitted.measured) == 1:
            low, high = (f"{np.ravel(end)[0]:,.4g}" for end in intervals[name])
            text = f"{text:<12}[{low}, {high}]"
        rows.append((name, text))
    return [*rows, ("transition", transition)]


def _transition_text(fitted: FittedLaw) -> str:
    if fitted.definition.log_transition(fitted.coordinates) is None:
        return "the law has none"
    seen = fitted.transition
    if isinstance(seen, list):
        return f"seen in {len(seen) - seen.count(None)} of {len(seen)} curves"
    if seen is None:
        return "none seen within these sizes"
    return f"{_size(seen.size):<12}[{_size(seen.low)}, {_size(seen.high)}]"


def _range(values: Array, form: str) -> str:
    """Return a number, or of several the lowest and the highest."""
    low, high = (f"{end:{form}}" for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _size(value: float, digits: int = 3) -> str:
    """Return a size to so many digits, with commas, and as a power of ten where that is shorter."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 100 <= rounded < 1e12 else f"{rounded:.{digits}g}"


# ---- how far a curve leaves its law beyond the sizes measured ------------------------------------

_SHARE = 0.85
_DOF = 2.0
"""Chosen on LCDB's data sets whose number 4 divides, and FLAN's even rows."""
_RECENT = 3  # sizes that the slope of a curve's end is taken from


@dataclass(frozen=True)
class Drift:
    """An error of the forecast that grows with the way from the largest size.

    No law is exact: from the largest size on a curve's slope d ln L / d ln D is another than the
    law's, and ln L is wrong by the difference times the reach, ln(size / largest size).  Two things
    tell how large the difference may be: that of a backtest, which knows the curve but looks a
    short way ahead, and the slope of the curve's end, as a curve may stop falling or go on twice as
    steeply.  Their geometric mean counts, and more the longer the reach is beside the span of the
    sizes measured:

        deviation of ln L = 0.85 √(slope · backtest's difference · reach / span) · reach

    Attributes:
        last: logarithm of each curve's largest size, [n].
        span: that minus the logarithm of its smallest size above 0, [n].
        rate: deviation of the slope at a reach as long as the span, [n].
    """

    last: Array
    span: Array
    rate: Array

    def added_to(self, exact: Student, size: float) -> Student:
        """Return an exact law's distribution of ln L with the drift at a size.

        Degrees of freedom are those of Welch and Satterthwaite for the sum; the drift has two.
        """
        reach = np.maximum(np.log(size) - self.last, 0.0) if size > 0 else np.zeros(len(self.last))
        drift, noise = self.rate**2 * reach**3 / self.span, np.maximum(exact.scale, _NARROW) ** 2
        dof = (noise + drift) ** 2 / (noise**2 / exact.dof + drift**2 / _DOF)
        return Student(exact.location, np.sqrt(noise + drift), dof)


def measure_drift(sizes: Array, losses: Array, counted: Mask, errors: Mapping[int, Array]) -> Drift:
    """Return the drift of every curve.

    Args:
        sizes: increasing, [m].
        losses: [n, m].
        counted: losses that count, at sizes above 0, two or more in every curve, [n, m].
        errors: by k: ln forecast − ln loss from the k-th size on, of the law fitted to those before
            it, [n, m − k].  The slope counts for the backtest's difference where there is none.
    """
    x = np.broadcast_to(log_sizes(sizes), counted.shape)
    recent = counted & (counted[:, ::-1].cumsum(-1)[:, ::-1] <= _RECENT)
    (_, slope, _, _), _ = line_through(x, np.log(losses), recent, recent.sum(-1))
    logs = np.where(counted, x, np.nan)
    squares = np.full((len(x), len(errors)), np.nan)
    for place, (k, error) in enumerate(errors.items()):
        reach = logs[:, k:] - np.nanmax(logs[:, :k], -1, keepdims=True)
        squares[:, place] = _mean((error / reach) ** 2)
    backtest = np.sqrt(_mean(squares))
    backtest = np.where(np.isnan(backtest), np.abs(slope), backtest)
    last = np.nanmax(logs, -1)
    rate = _SHARE * np.sqrt(np.abs(slope) * backtest)
    return Drift(last, last - np.nanmin(logs, -1), rate)


def _mean(values: Array) -> Array:
    """Return the mean over the last axis of what is not NaN; NaN where all is."""
    count = (~np.isnan(values)).sum(-1)
    return np.where(count > 0, np.nansum(values, -1) / np.maximum(count, 1), np.nan)
