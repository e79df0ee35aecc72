"""`fit`: one law through one curve or many at once, by a batched Levenberg–Marquardt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..ntk import Spectrum
from .baselines import Line, accept_then_stop
from .laws import LAWS, FreeLens, Law, MeasuredKernel, MeasuredLens, Points
from .predictive import Array, Index, Mask, Student, check_level
from .runs import check_losses, check_sizes

Values = Array | float


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

    Example:
        >>> import jachess_ext as jx
        >>> sizes = [100, 200, 400, 800, 1600]
        >>> law = jx.scaling.fit(sizes, [30 / d**0.5 + 0.4 for d in sizes], law="power")
        >>> round(law.predict(10_000), 2)
        0.7
    """
    curves = _check_curves(sizes, losses, weights)
    if law == "ats":
        if (curves.weights != 1).any():
            raise ValueError("the ats law takes no weights; give it the sizes that count")
        trained = curves.sizes > 0
        x, y = np.log(curves.sizes[trained]), np.log(curves.losses[:, trained])
        line = accept_then_stop(x, y, gamma, tau)
        return FittedLine(line, curves.sizes[trained], curves.single)
    if law not in LAWS:
        raise ValueError(f"unknown law {law!r}; known are {', '.join([*sorted(LAWS), 'ats'])}")
    kernel = {"theta": theta, "residual": residual, "t": t, "lr": lr}
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


# Arguments --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curves:
    """Losses of n curves at m sizes.

    Attributes:
        sizes: strictly increasing, [m]; the first may be 0.
        losses: positive, [n, m].
        weights: not negative, [n, m].
        single: whether the caller gave one curve as [m].
    """

    sizes: Array
    losses: Array
    weights: Array
    single: bool


def _check_curves(
    sizes: npt.ArrayLike, losses: npt.ArrayLike, weights: npt.ArrayLike | None
) -> _Curves:
    d, y = _numbers("sizes", sizes), _numbers("losses", losses)
    if d.ndim != 1 or y.ndim not in (1, 2) or y.shape[-1] != len(d) or not y.size:
        raise ValueError(
            f"sizes has shape {list(d.shape)} and losses {list(y.shape)}; expected [m], and [m] or "
            "[n, m]"
        )
    check_sizes(d)
    rows = np.atleast_2d(y)
    if weights is None:
        w = np.ones_like(rows)
    else:
        w = _numbers("weights", weights)
        if w.shape not in (y.shape, d.shape) or not (np.isfinite(w) & (w >= 0)).all():
            raise ValueError(
                f"weights has shape {list(w.shape)}; expected {list(y.shape)} or {list(d.shape)}, "
                "finite and not negative"
            )
        w = np.broadcast_to(w, rows.shape)
        if not (w > 0).any(-1).all():
            raise ValueError("all weights of a curve are 0; every curve needs losses that count")
    check_losses(rows, d, w > 0)
    return _Curves(d, np.where(w > 0, rows, 1.0), w, y.ndim == 1)


def _numbers(name: str, values: npt.ArrayLike) -> Array:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} holds something that is no number, or rows of unequal length"
        ) from None


def _definition(
    law: str, curves: _Curves, kernel: Mapping[str, object], square: float | None
) -> Law:
    missing = [name for name, value in kernel.items() if value is None]
    if len(missing) == len(kernel):
        if law == "lensllm" and square is not None:
            if not 0 < square < np.inf:
                raise ValueError(f"residual_square is {square}; expected ‖r‖², a positive number")
            return FreeLens(square)
        return LAWS[law]()
    if law != "lensllm":
        given = next(name for name in kernel if name not in missing)
        raise ValueError(f"{given} is for the lensllm law; the {law} law has no kernel")
    if missing:
        raise ValueError(f"a measured F needs theta, residual, t and lr; {missing[0]} is missing")
    if len(curves.losses) != 1:
        raise ValueError(
            f"a kernel belongs to one curve, there are {len(curves.losses)}; fit them one by one"
        )
    return MeasuredLens(MeasuredKernel(curves.sizes, *kernel.values()))  # type: ignore[arg-type]


def _points(law: Law, curves: _Curves, parameters: npt.ArrayLike | None) -> tuple[Points, _Curves]:
    """Return what the law is to be fitted at; Kaplan's law takes all rows as one curve."""
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
    joined = _Curves(
        sizes=np.tile(curves.sizes, len(models)),
        losses=curves.losses.reshape(1, -1),
        weights=curves.weights.reshape(1, -1),
        single=True,
    )
    return Points(grid.reshape(1, -1), rows), joined


def _box(
    law: Law,
    curves: _Curves,
    fixed: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> tuple[Mask, Array, Array]:
    """Return which coordinates are free, [p], and the bounds of all, [n, p]."""
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


# The fit ----------------------------------------------------------------------------------------

_ANNEALING = (8.0, 3.0)
"""Huber's threshold in the stages before the last, in multiples of the last."""
_EFFICIENT = 1.345  # Huber's threshold in noise deviations: 95 % efficient under Gaussian noise
_NARROWEST = 1e-3
_NORMAL_MEDIAN = 0.6745  # median of |z|


@dataclass(frozen=True)
class _Problem:
    """Residuals of a law at the points of a batch of curves, started several times each."""

    law: Law
    points: Points
    log_losses: Array
    weights: Array

    def of(self, owner: Index) -> Residuals:
        """Return the residual function of rows that belong to the curves `owner`."""

        def residuals(u: Array, rows: Index, gradient: bool) -> tuple[Array, Array]:
            chosen = owner[rows]
            value, jacobian = self.law.log_loss(u, self.points.rows(chosen), gradient)
            return value - self.log_losses[chosen], jacobian

        return residuals

    def at(self, u: Array) -> tuple[Array, Array]:
        """Return the residuals, [n, m], and their Jacobian with the coordinates u, [n, p]."""
        rows = np.arange(len(u))
        return self.of(rows)(u, rows, True)

    def minimise(
        self,
        u: Array,
        owner: Index,
        low: Array,
        high: Array,
        delta: Array,
        iterations: int = 200,
        tolerance: float = 1e-10,
    ) -> Solution:
        """`u`, `low`, `high`: one row a start; `delta`: one number a curve."""
        return minimise(
            self.of(owner),
            u,
            low,
            high,
            self.weights[owner],
            delta[owner],
            iterations=iterations,
            tolerance=tolerance,
        )


def _solve(
    problem: _Problem,
    low: Array,
    high: Array,
    free: Mask,
    huber_delta: float | None,
    starts: int,
) -> tuple[Array, Solution]:
    """Return Huber's threshold [n] and the best of several starts, for every curve."""
    if starts < 1:
        raise ValueError(f"starts is {starts}; expected 1 or more")
    if huber_delta is not None and not huber_delta > 0:
        raise ValueError(f"huber_delta is {huber_delta}; expected a positive threshold in ln L")
    curves = len(problem.log_losses)
    u, owner = _best_candidates(problem, low, high, starts)
    low, high = low[owner], high[owner]
    squares = np.full(curves, np.inf)
    for names in problem.law.stages:
        held = np.array([parameter.name in names for parameter in problem.law.parameters])
        stage = problem.minimise(
            u,
            owner,
            np.where(held, u, low),
            np.where(held, u, high),
            squares,
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
            wide = factor * delta
            u = problem.minimise(u, owner, low, high, wide, iterations=20, tolerance=1e-4).u
    return delta, _best_of(problem.minimise(u, owner, low, high, delta), owner, curves)


def _best_candidates(
    problem: _Problem, low: Array, high: Array, starts: int
) -> tuple[Array, Index]:
    """Return the `starts` best points of the law's grid for each curve, by least squares."""
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


def _best_of(each: Solution, owner: Index, curves: int) -> Solution:
    """Return the start with the lowest objective, for every curve."""
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    best = each.objective.reshape(curves, -1).argmin(-1) + first
    return Solution(each.u[best], each.objective[best], each.converged[best])


def _robust_delta(problem: _Problem, u: Array, free: Mask) -> Array:
    """Return 1.345 robust standard deviations of the residuals, [n]."""
    value = np.abs(problem.at(u)[0])
    counted = problem.weights > 0
    median = np.nanmedian(np.where(counted, value, np.nan), -1)
    points = counted.sum(-1)
    inflation = np.sqrt(points / np.maximum(points - free.sum(), 1))
    return np.maximum(_EFFICIENT * median / _NORMAL_MEDIAN * inflation, _NARROWEST)


def _summary(
    problem: _Problem,
    curves: _Curves,
    solution: Solution,
    delta: Array,
    free: Mask,
    low: Array,
    high: Array,
) -> FittedCurve:
    value, jacobian = problem.at(solution.u)
    weights = problem.weights
    dof = (weights > 0).sum(-1) - float(free.sum())
    inside = np.abs(value) <= delta[:, None]
    clipped = np.clip(value, -delta[:, None], delta[:, None])
    left = np.maximum(dof, 1)
    noise = np.sqrt((weights * value**2).sum(-1) / left)
    # Variance of Huber's estimator: Σ ψ² / (m − p) over the squared share of residuals inside.
    share = np.maximum((weights * inside).sum(-1) / weights.sum(-1), 0.5)
    spread = (weights * clipped**2).sum(-1) / left / share**2
    return FittedCurve(
        definition=problem.law,
        coordinates=solution.u,
        covariance=_covariance(jacobian, weights, spread, free, high - low),
        noise=np.where(dof > 0, noise, np.nan),
        dof=dof,
        objective=solution.objective,
        delta=delta,
        converged=solution.converged,
        model_sizes=None,
        _single=curves.single,
    )


def _covariance(jacobian: Array, weights: Array, spread: Array, free: Mask, width: Array) -> Array:
    """Return (JᵀJ/s² + 12/width²)⁻¹ over the free coordinates.

    That is a uniform prior's variance where JᵀJ is 0; s² → 0 (a perfect fit) gives 0.
    """
    information = np.einsum("nmp,nm,nmq->npq", jacobian, weights, jacobian)
    s = np.maximum(spread, 1e-30)[:, None, None]
    prior = 12 * s[..., 0] / np.maximum(width, 1e-9) ** 2
    matrix = information + np.einsum("np,pq->npq", prior, np.eye(len(free)))
    keep = free[:, None] & free
    matrix = np.where(keep, matrix, np.eye(len(free)))
    return np.where(keep, s * np.linalg.pinv(matrix, hermitian=True, rcond=1e-15), 0.0)


# Results ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transition:
    """The size D* where the pre-power phase ends, with an interval; [n], or numbers of one curve.

    Attributes:
        size: the estimate; NaN where there is none.
        low, high: the interval.

    Example:
        >>> import jachess_ext as jx
        >>> sizes = [10, 30, 100, 300, 1000, 3000, 10_000]
        >>> losses = [2.0, 1.98, 1.92, 1.7, 1.2, 0.8, 0.5]
        >>> 10 < jx.scaling.fit(sizes, losses, law="lensllm").transition.size < 10_000
        True
    """

    size: Values
    low: Values
    high: Values


class FittedLaw(ABC):
    """What `fit` returns. Shapes below are for n curves; a single curve ([m]) has no leading n.

    Attributes:
        law: name of the law.

    Example:
        >>> import jachess_ext as jx
        >>> sizes = [100, 200, 400, 800, 1600]
        >>> law = jx.scaling.fit(sizes, [30 / d**0.5 + 0.4 for d in sizes], law="power")
        >>> sorted(law.params)
        ['B', 'E', 'alpha', 'beta']
    """

    law: str
    _single: bool

    @property
    @abstractmethod
    def params(self) -> dict[str, Values]:
        """Parameters by name, [n]."""

    @property
    @abstractmethod
    def has_width(self) -> bool:
        """Whether degrees of freedom are left, so that `predictive` and `interval` are defined."""

    @abstractmethod
    def predictive(self, size: float) -> Student:
        """Return the distribution of ln L that a measurement at `size` would give, one a curve.

        Raises:
            ValueError: no degree of freedom is left to estimate the noise from.
        """

    @abstractmethod
    def _log_predict(self, sizes: Array) -> Array:
        """Return ln L at sizes [k]: [n, k]."""

    @abstractmethod
    def transition_at(self, level: float = 0.9) -> Transition | None:
        """Return the transition with an interval of this level; None where the law has none."""

    @property
    def transition(self) -> Transition | None:
        """The transition with its 90 % interval; None where the law has none."""
        return self.transition_at(0.9)

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

        Args:
            sizes: a number or [k].
            level: in (0, 1).

        Returns:
            Lower and upper ends, shaped as `predict`.

        Raises:
            ValueError: a bad size or level, or no degree of freedom left to know the noise from.
            MissingExtra: scipy is not installed.
        """
        check_level(level)
        ends = [self.predictive(float(size)).interval(level) for size in _sizes(sizes)]
        with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
            low, high = (np.exp(np.stack([end[side] for end in ends], -1)) for side in (0, 1))
        return self._shaped(low, sizes), self._shaped(high, sizes)

    def _shaped(self, values: Array, sizes: npt.ArrayLike) -> Values:
        """Return [n, k] as the caller asked: without k for a number, without n for one curve."""
        return self._row(values[:, 0] if np.ndim(sizes) == 0 else values)

    def _row(self, values: Array) -> Values:
        if not self._single:
            return values
        return float(values[0]) if values.ndim == 1 else values[0]


def _sizes(sizes: npt.ArrayLike) -> Array:
    array = np.atleast_1d(np.asarray(sizes, dtype=np.float64))
    if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(
            f"sizes is {sizes!r}; expected a number of training examples, or a list of them, each "
            "finite and not negative"
        )
    return array


@dataclass(frozen=True)
class FittedCurve(FittedLaw):
    """A law fitted by least squares or Huber's loss in ln L.

    Intervals are Student's t around the fit with m − p degrees of freedom: the noise, and the
    fit's own error carried over by the law's gradient (delta method).  That error comes from the
    curvature at the optimum plus a weak pull to the middle of each parameter's bounds, without
    which a parameter that the data say nothing about would have an infinite variance.

    Attributes:
        coordinates: [n, p]; logarithms where the parameter says so.
        covariance: of the coordinates, [n, p, p]; zero for fixed ones.
        noise: standard deviation of ln L around the law, [n]; NaN without degrees of freedom.
        dof: sizes minus free parameters, [n].
        objective: the minimised Σ w h_δ(r), [n].
        delta: Huber's threshold, [n].
        converged: [n].
        model_sizes: N that Kaplan's law predicts for, [1]; None before `for_model`.
    """

    definition: Law
    coordinates: Array
    covariance: Array
    noise: Array
    dof: Array
    objective: Array
    delta: Array
    converged: Mask
    model_sizes: Array | None
    _single: bool

    @property
    def law(self) -> str:  # type: ignore[override]
        return self.definition.name

    @property
    def params(self) -> dict[str, Values]:
        columns = zip(self.definition.parameters, self.coordinates.T, strict=True)
        return {p.name: self._row(p.value(column)) for p, column in columns}

    def for_model(self, parameters: float) -> FittedCurve:
        """Return Kaplan's law for a model of N parameters: what `predict` is then about."""
        return replace(self, model_sizes=np.full(1, float(parameters)))

    @property
    def has_width(self) -> bool:
        return bool((self.dof >= 1).all())

    def predictive(self, size: float) -> Student:
        if not self.has_width:
            raise ValueError(
                f"the {self.law} law has as many free parameters as there are sizes, so nothing "
                "tells the noise; fix a parameter or give more sizes"
            )
        value, gradient = self.definition.log_loss(self.coordinates, self._points(np.array([size])))
        carried = np.einsum("np,npq,nq->n", gradient[:, 0], self.covariance, gradient[:, 0])
        return Student(value[:, 0], np.sqrt(self.noise**2 + carried), self.dof)

    def transition_at(self, level: float = 0.9) -> Transition | None:
        check_level(level)
        transition = self.definition.log_transition(self.coordinates)
        if transition is None:
            return None
        value, gradient = transition
        error = np.sqrt(np.einsum("np,npq,nq->n", gradient, self.covariance, gradient))
        spread = Student(value, error, np.where(self.dof < 1, np.nan, self.dof))
        with np.errstate(over="ignore"):
            low, high = (np.exp(end) for end in spread.interval(level))
        return Transition(self._row(np.exp(value)), self._row(low), self._row(high))

    def _log_predict(self, sizes: Array) -> Array:
        if not self.definition.reads_zero and (sizes == 0).any():
            raise ValueError(f"the {self.law} law has no value at size 0; ask for sizes above 0")
        return self.definition.log_loss(self.coordinates, self._points(sizes), gradient=False)[0]

    def _points(self, sizes: Array) -> Points:
        shape = (len(self.coordinates), len(sizes))
        models = self.model_sizes
        if models is None and self.law == "kaplan":
            raise ValueError("Kaplan's law predicts for a model: fitted.for_model(N).predict(D)")
        n = None if models is None else np.broadcast_to(models[:, None], shape)
        return Points(np.broadcast_to(sizes, shape), n)


@dataclass(frozen=True)
class FittedLine(FittedLaw):
    """The last accepted points on a line in ln L over ln D (AtS).

    Intervals are the exact ones of a straight line (Student's t, count − 2 degrees of freedom),
    given the points that were accepted.  The transition lies between the point refused and the
    smallest point accepted; its estimate is their geometric mean, whatever the level asked.
    """

    line: Line
    sizes: Array  # [m]
    _single: bool
    law = "ats"

    @property
    def params(self) -> dict[str, Values]:
        columns = {
            "intercept": self.line.intercept,
            "slope": self.line.slope,
            "count": self.line.count.astype(np.float64),
        }
        return {name: self._row(column) for name, column in columns.items()}

    @property
    def has_width(self) -> bool:
        return bool((self.line.count > 2).all())

    def predictive(self, size: float) -> Student:
        if not self.has_width:
            raise ValueError(
                "a line through two sizes leaves nothing to tell the noise from; give 3 or more"
            )
        x = np.log(np.array([size]))
        # A perfect line has no width; a positive scale keeps its quantiles defined.
        scale = np.maximum(self.line.standard_error(x)[:, 0], 1e-12)
        return Student(self.line.predict(x)[:, 0], scale, self.line.count - 2.0)

    def transition_at(self, level: float = 0.9) -> Transition | None:
        check_level(level)
        first = len(self.sizes) - self.line.count
        stopped = self.line.stopped
        low = np.where(stopped, self.sizes[np.maximum(first - 1, 0)], np.nan)
        high = np.where(stopped, self.sizes[first], np.nan)
        middle = np.sqrt(low * high)
        return Transition(self._row(middle), self._row(low), self._row(high))

    def _log_predict(self, sizes: Array) -> Array:
        if (sizes == 0).any():
            raise ValueError("a line over ln D has no value at size 0; ask for sizes above 0")
        return self.line.predict(np.log(sizes))


# Batched Levenberg–Marquardt with Huber's loss and bounds: thousands of small fits at once --------

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
    """The rows still at work."""

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
    *,
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
    state = _State(
        rows=rows,
        u=u,
        objective=np.where(np.isfinite(objective), objective, np.inf),
        gradient=gradient,
        curvature=curvature,
        damping=np.full(count, 1e-2),
        growth=np.full(count, 2.0),
        active=np.ones(count, dtype=bool),
    )
    for _ in range(iterations):
        _step(residuals, state, low, high, weights, delta, tolerance)
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


def _step(
    residuals: Residuals,
    state: _State,
    low: Array,
    high: Array,
    weights: Array,
    delta: Array,
    tolerance: float,
) -> None:
    """Take a damped step in every row; rows that are done stay where they are."""
    rows = state.rows
    lower, upper = low[rows], high[rows]
    step = _bounded_step(state, lower, upper)
    trial = np.where(state.active[:, None], np.clip(state.u + step, lower, upper), state.u)
    moved = trial - state.u
    with np.errstate(all="ignore"):  # a wild trial may overflow; it is then refused
        value, jacobian = residuals(trial, rows, True)
        objective = huber(value, weights[rows], delta[rows])
    better = state.active & (objective < state.objective)
    predicted = -(state.gradient * moved).sum(-1) - 0.5 * np.einsum(
        "ni,nij,nj->n", moved, state.curvature, moved
    )
    fall = np.where(better, state.objective - objective, 0.0)
    _damp(state, better, fall, predicted)
    small = better & (fall <= tolerance * state.objective)
    state.active &= ~small & (state.damping < _STALLED) & (moved != 0).any(-1)
    gradient, curvature = _normal_equations(
        value[better], jacobian[better], weights[rows[better]], delta[rows[better]]
    )
    state.u[better], state.objective[better] = trial[better], objective[better]
    state.gradient[better], state.curvature[better] = gradient, curvature


def _bounded_step(state: _State, lower: Array, upper: Array) -> Array:
    """Return −(A + λ diag A)⁻¹ g over the coordinates that are free to move, within the box.

    Where that step leaves the box, the coordinates that would are put on their bounds and the
    others are solved for again, given those.
    """
    g = state.gradient
    held = ((state.u <= lower) & (g >= 0)) | ((state.u >= upper) & (g <= 0))
    matrix = state.curvature.copy()
    diagonal = np.einsum("nii->ni", matrix)  # a view: writing to it writes to the matrix
    floor = 1e-14 * diagonal.max(-1, keepdims=True) + 1e-300
    diagonal += state.damping[:, None] * diagonal + floor
    step = _solve_free(matrix, g, ~held, np.zeros_like(g))
    room = np.clip(step, lower - state.u, upper - state.u)
    out = (room != step).any(-1)
    if out.any():
        stopped = held[out] | (room[out] != step[out])
        step[out] = _solve_free(matrix[out], g[out], ~stopped, np.where(stopped, room[out], 0.0))
    return step


def _solve_free(matrix: Array, g: Array, free: Mask, given: Array) -> Array:
    """Return M s = −g in the free coordinates, with the others at `given`."""
    right = np.where(free, -g - (matrix @ given[..., None])[..., 0], given)
    reduced = np.where(free[:, :, None] & free[:, None, :], matrix, np.eye(g.shape[1]))
    return np.linalg.solve(reduced, right[..., None])[..., 0]


def _damp(state: _State, better: Mask, fall: Array, predicted: Array) -> None:
    gain = np.minimum(fall / np.maximum(predicted, 1e-300), 2.0)
    shrink = np.clip(1 - (2 * gain - 1) ** 3, 1 / 5, 2.0)
    damping = state.damping * np.where(better, shrink, state.growth)
    state.damping = np.clip(damping, 1e-12, 10 * _STALLED)
    state.growth = np.where(better, 2.0, np.minimum(state.growth * 2, 64.0))
