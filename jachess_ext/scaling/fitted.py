"""`FittedLaw`: the parameters, predictions and intervals of a law, its plot and its description."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._io import MissingExtra, axes_or_new
from .drift import Drift
from .laws import Exponents, Law, Parameter, central_gradient
from .predictive import Array, Mask, Student

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Array | float


@dataclass(frozen=True)
class Curves:
    """Losses of n curves at m sizes.

    Attributes:
        sizes: strictly increasing, [m]; the first may be 0.
        losses: positive, [n, m]; losses of weight 0 are replaced by the lowest of the curve.
        weights: not negative, [n, m]; the positive ones of a curve have mean 1.
        single: whether the losses were passed as one curve, [m].
    """

    sizes: Array
    losses: Array
    weights: Array
    is_single: bool

    @property
    def counted(self) -> Mask:
        """Mask of the losses whose weight and size are above 0, [n, m]."""
        return (self.weights > 0) & (self.sizes > 0)


@dataclass(frozen=True)
class Scale:
    """Units of losses and sizes in which each curve is fitted, [n] each.

    Attributes:
        loss: the curve's lowest loss, or 1.
        size: the curve's largest size, or 1.
    """

    loss: Array
    size: Array

    def unit(self, exponents: Exponents) -> Array:
        """Return the unit of a parameter, loss^a · size^b for exponents (a, b), [n].

        An exponent may be NaN where its base is 1.
        """
        pairs = zip(exponents, (self.loss, self.size), strict=True)
        logs = [np.where(base == 1, 0.0, power * np.log(base)) for power, base in pairs]
        return np.exp(logs[0] + logs[1])


NO_UNIT = (0.0, 0.0)  # exponents of a parameter without a unit


@dataclass(frozen=True)
class Transition:
    """The size D* where the pre-power phase of a curve ends, with a 90 % interval.

    Attributes:
        size: estimate of D*.
        low, high: ends of the interval.

    Examples:
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
"""Transition of a single curve, or a list with an entry per curve; None if there is none."""


@dataclass(frozen=True, repr=False)
class FittedLaw:
    """A law fitted to n curves; results for a single curve ([m]) have no dimension n.

    Intervals are those of Student's t around the fit, with m − p degrees of freedom; the variance
    is that of the noise plus that of the parameters (delta method).  The covariance of the
    parameters is the inverse curvature at the optimum.  It includes a weak prior over the bounds of
    each parameter, as a parameter that the data do not determine would else have infinite variance.
    Intervals of ats are exact for a straight line through the accepted points.

    Attributes:
        definition: the law, with its `formula`.
        coordinates: fitted coordinates, [n, p], in units of `scale`; logarithms if
            `Parameter.is_log`.
        covariance: covariance of the coordinates, [n, p, p]; zero for fixed ones.
        noise: standard deviation of ln L around the law, [n]; NaN without degrees of freedom.
        dof: number of losses with a weight above 0 minus number of free parameters, [n].
        objective: minimum of Σ w h_δ(r), Huber's loss of the residuals, [n]; the weights above 0
            have mean 1.
        delta: Huber's threshold δ in ln L, [n].
        scale: units of the fit.
        backtest: if `fit` chose the law, name of each law -> median |ln error| of its forecasts of
            the larger sizes from the smaller ones; otherwise empty.
        drift: if `fit` chose the law, its error beyond the measured sizes; None if the law was
            named, as it is then assumed to be exact.

    Examples:
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
    _curves: Curves
    backtest: Mapping[str, float] = field(default_factory=dict)
    drift: Drift | None = None

    def __repr__(self) -> str:
        return describe(self)

    @property
    def law(self) -> str:
        """Name of the law."""
        return self.definition.name

    @property
    def size_range(self) -> Array:
        """The smallest and the largest size above 0 with a weight above 0, [n, 2]."""
        sizes, counted = self._curves.sizes, self._curves.counted
        low, high = np.where(counted, sizes, np.inf).min(-1), np.where(counted, sizes, 0).max(-1)
        return np.stack([low, high], -1)

    @property
    def params(self) -> dict[str, Values]:
        """Name -> value of each parameter, [n], in the units of the losses and sizes."""
        return {
            name: self._match_curves(value)
            for name, value in self._values(self.coordinates).items()
        }

    def _values(self, coordinates: Array) -> dict[str, Array]:
        """Convert coordinates, [n, p], to name -> value of each parameter, [n]."""
        columns = zip(self.definition.parameters, coordinates.T, strict=True)
        values = {p.name: p.value(column) for p, column in columns}
        units = self.definition.units(values)
        scales = {name: self.scale.unit(units.get(name, NO_UNIT)) for name in values}
        return {name: value * scales[name] for name, value in values.items()}

    def parameter_intervals(self, level: float = 0.9) -> dict[str, tuple[Values, Values]]:
        """Return confidence intervals of the free parameters, assuming that the law is exact.

        Args:
            level: probability of the intervals, in (0, 1).

        Returns:
            Name -> lower and upper ends, [n] each.

        Raises:
            ValueError: `level` is outside (0, 1), or no degree of freedom is left to estimate the
                noise.
            MissingExtra: scipy is not installed.
        """
        self._require_noise()
        result: dict[str, tuple[Values, Values]] = {}
        for column, p in enumerate(self.definition.parameters):
            if not self.covariance[:, column, column].any():
                continue

            # The coordinate in the units of the data, which may depend on other parameters.
            def coordinate(u: Array, p: Parameter = p) -> Array:
                return np.asarray(p.coordinate(self._values(u)[p.name]))

            gradient = central_gradient(coordinate, self.coordinates, _STEP)
            error = np.maximum(np.sqrt(self._variance(gradient)), _LEAST_SCALE)
            student = Student(coordinate(self.coordinates), error, self.dof)
            low, high = student.exp_interval(level) if p.is_log else student.interval(level)
            low = low if p.is_log else np.maximum(low, p.low)
            result[p.name] = self._match_curves(low), self._match_curves(high)
        return result

    def _variance(self, gradient: Array) -> Array:
        """Return gᵀ C g, [n], the variance of a function with gradient g, [n, p], by the delta
        method; C is the covariance of the coordinates."""
        return np.einsum("np,npq,nq->n", gradient, self.covariance, gradient)

    @property
    def has_intervals(self) -> bool:
        """Whether degrees of freedom are left, so that `predictive` and `interval` are defined."""
        return bool((self.dof >= 1).all())

    def _require_noise(self) -> None:
        """Raise ValueError if no degree of freedom is left to estimate the noise."""
        if not self.has_intervals:
            text = f"the {self.law} law has as many free parameters as there are sizes"
            raise ValueError(f"{text}, so nothing tells the noise; fix a parameter, or give more")

    def predictive(self, size: float) -> Student:
        """Return the predictive distribution of the measured ln L at a size, for each curve, [n].

        Raises:
            ValueError: no degree of freedom is left to estimate the noise from.
        """
        self._require_noise()
        # Beyond the largest size, the drift includes the uncertainty of the parameters.
        last = math.inf if self.drift is None else float(np.exp(self.drift.last.max()))
        clipped = self._scaled(np.array([min(size, last)]))
        _, gradient = self.definition.log_loss(self.coordinates, clipped)
        variance = self.noise**2 + self._variance(gradient[:, 0])
        # A perfect fit has no variance; quantiles need a positive scale.
        scale = np.maximum(np.sqrt(variance), _LEAST_SCALE)
        exact = Student(self._log_predict(np.array([size]))[:, 0], scale, self.dof)
        return exact if self.drift is None else self.drift.widen(exact, size)

    @property
    def transition(self) -> Transitions:
        """The transition D* of each curve with its 90 % interval.

        None if the law has no transition, or the interval is not within the measured sizes above 0.
        """
        transitions: list[Transition | None] = [None] * len(self.coordinates)
        log_transition = self.definition.log_transition(self.coordinates)
        if log_transition is not None and self.has_intervals:
            log_size, gradient = log_transition
            error = np.sqrt(self._variance(gradient))
            student = Student(log_size + np.log(self.scale.size), error, self.dof)
            ends = np.stack([student.location, *student.interval(0.9)], -1)
            first, last = np.log(self.size_range.T)
            for row in np.flatnonzero((first < ends[:, 1]) & (ends[:, 2] < last)):
                transitions[row] = Transition(*np.exp(ends[row]).tolist())
        return transitions[0] if self._curves.is_single else transitions

    def predict(self, sizes: npt.ArrayLike) -> Values:
        """Return the loss of the fitted law at each size.

        Args:
            sizes: numbers of training examples D, one number or [k].

        Returns:
            [n, k]; without the dimension k for one number, and without n for a single curve.

        Raises:
            ValueError: a size is negative, infinite or NaN.
        """
        return self._match_sizes(np.exp(self._log_predict(_sizes(sizes))), sizes)

    def interval(self, sizes: npt.ArrayLike, level: float = 0.9) -> tuple[Values, Values]:
        """Return the prediction interval of a loss measured at each size.

        If `fit` chose the law, the interval widens with the distance beyond the measured sizes
        (`drift`); a law that was named is assumed to be exact.

        Args:
            sizes: one number or [k].
            level: probability of the interval, in (0, 1).

        Returns:
            Lower and upper ends, of the shape of `predict`.

        Raises:
            ValueError: a size is negative or not finite, `level` is outside (0, 1), or no degree of
                freedom is left to estimate the noise.
            MissingExtra: scipy is not installed.
        """
        ends = [self.predictive(float(size)).exp_interval(level) for size in _sizes(sizes)]
        low, high = (np.stack(side, -1) for side in zip(*ends, strict=True))
        return self._match_sizes(low, sizes), self._match_sizes(high, sizes)

    def plot(self, ax: Axes | None = None, level: float = 0.9) -> Axes:
        """Plot the fitted losses, the curves up to four times the largest size, and intervals.

        Args:
            ax: matplotlib axes to draw on; None creates new ones.
            level: probability of the intervals, in (0, 1).

        Returns:
            The axes.

        Raises:
            ValueError: `level` is outside (0, 1).
            MissingExtra: matplotlib or scipy is not installed.

        Examples:
            >>> import jachess_ext as jx
            >>> sizes = [100, 200, 400, 800, 1600]
            >>> losses = [1.1, 0.93, 0.8, 0.7, 0.62]
            >>> jx.scaling.fit(sizes, losses, law="power").plot().get_xscale()
            'log'
        """
        sizes = np.geomspace(self.size_range[:, 0].min(), 4 * self.size_range[:, 1].max(), 100)
        predicted = np.atleast_2d(self.predict(sizes))
        ends = (
            [np.atleast_2d(end) for end in self.interval(sizes, level)]
            if self.has_intervals
            else []
        )
        ax = axes_or_new(ax)
        for row, curve in enumerate(predicted):
            (line,) = ax.plot(sizes, curve)
            color, mask = line.get_color(), self._curves.counted[row]
            ax.plot(self._curves.sizes[mask], self._curves.losses[row, mask], "o", color=color)
            if ends:
                ax.fill_between(sizes, *(end[row] for end in ends), color=color, alpha=0.2)
        ax.set(xscale="log", yscale="log", xlabel="training examples", ylabel="loss")
        ax.set_title(f"{self.law} law" + (f", {100 * level:g} % interval" if ends else ""))
        return ax

    def _log_predict(self, sizes: Array) -> Array:
        """Return the predicted ln L, [n, k], at sizes, [k]."""
        if not self.definition.reads_zero and (sizes == 0).any():
            raise ValueError(f"the {self.law} law has no value at size 0; ask for sizes above 0")
        log_losses, _ = self.definition.log_loss(self.coordinates, self._scaled(sizes), False)
        return log_losses + np.log(self.scale.loss)[:, None]

    def _scaled(self, sizes: Array) -> Array:
        """Return sizes, [k], in units of the fit, [n, k]."""
        return sizes / self.scale.size[:, None]

    def _match_sizes(self, values: Array, sizes: npt.ArrayLike) -> Values:
        """Drop the dimension k of [n, k] if `sizes` is one number, and n for a single curve."""
        return self._match_curves(values[:, 0] if np.ndim(sizes) == 0 else values)

    def _match_curves(self, values: Array) -> Values:
        """Drop the dimension n of [n] or [n, k] for a single curve."""
        if not self._curves.is_single:
            return values
        return float(values[0]) if values.ndim == 1 else values[0]


def _sizes(sizes: npt.ArrayLike) -> Array:
    """Convert sizes to an array [k]; raise ValueError for one that is negative or not finite."""
    array = np.atleast_1d(np.asarray(sizes, dtype=np.float64))
    if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"sizes is {sizes!r}; expected one or more finite numbers, from 0 up")
    return array


_STEP = 1e-6  # step of central differences in a coordinate
_LEAST_SCALE = 1e-12  # smallest scale of the distribution of ln L or of a parameter


def describe(fitted: FittedLaw) -> str:
    """Describe a fitted law as text: parameters, transition, residual, backtest and intervals.

    Parameters of a single curve have 90 % intervals; for several curves, their range is printed.
    """
    smallest, largest = fitted.size_range[:, 0].min(), fitted.size_range[:, 1].max()
    num_curves = len(fitted.size_range)
    prefix = "" if num_curves == 1 else f"{num_curves} curves at "
    range_text = f"{_size_text(smallest, 6)} to {_size_text(largest, 6)}"
    title = f"{fitted.law} law, {fitted.definition.formula}, through {prefix}sizes {range_text}"
    if fitted.backtest:
        order = sorted(fitted.backtest, key=fitted.backtest.__getitem__)
        errors = ", ".join(f"{law} {fitted.backtest[law]:.2g}" for law in order)
        backtest_text = f"median |ln error| of larger sizes forecast from smaller ones: {errors}"
    elif fitted.drift is not None:
        backtest_text = "none, too few sizes; the simplest law"
    else:
        backtest_text = "none, the law was named"
    noise, dof = _range_text(fitted.noise, ".2g"), _range_text(fitted.dof, ".3g")
    residual_text = f"{noise} in ln L, degrees of freedom: {dof}"
    errors = "the backtest's errors and " if fitted.backtest else ""
    interval_text = f"of losses widen beyond the largest size, by {errors}the slope there"
    if not fitted.has_intervals:
        residual_text = interval_text = "unknown, no degree of freedom is left"
    elif fitted.drift is None:
        interval_text = "of losses take the law as exact, and are too narrow where it is not"
    rows = [
        *_parameter_rows(fitted),
        ("residual", residual_text),
        ("backtest", backtest_text),
        ("intervals", interval_text),
        ("forecasts", "of this law alone; select's, by default, are of many shapes and curves"),
    ]
    return "\n".join([title, *(f"  {label:<12}{text}" for label, text in rows)])


def _parameter_rows(fitted: FittedLaw) -> list[tuple[str, str]]:
    """Return (name, text of the estimate) of each parameter and of the transition."""
    try:
        intervals = fitted.parameter_intervals() if fitted.has_intervals else {}
        transition = _transition_text(fitted)
    except MissingExtra:
        intervals, transition = {}, "unknown, scipy is not installed"
    rows = []
    for name, value in fitted.params.items():
        text = _range_text(np.ravel(value), ",.4g")
        if name in intervals and len(fitted.size_range) == 1:
            low, high = (f"{np.ravel(end)[0]:,.4g}" for end in intervals[name])
            text = f"{text:<12}[{low}, {high}]"
        rows.append((name, text))
    return [*rows, ("transition", transition)]


def _transition_text(fitted: FittedLaw) -> str:
    """Format the transition with its interval, or the number of curves that have one."""
    if fitted.definition.log_transition(fitted.coordinates) is None:
        return "the law has none"
    transition = fitted.transition
    if isinstance(transition, list):
        return f"seen in {len(transition) - transition.count(None)} of {len(transition)} curves"
    if transition is None:
        return "none seen within these sizes"
    size, low, high = map(_size_text, (transition.size, transition.low, transition.high))
    return f"{size:<12}[{low}, {high}]"


def _range_text(values: Array, form: str) -> str:
    """Format one value, or "lowest to highest" of several, with the format specification `form`."""
    low, high = (f"{end:{form}}" for end in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _size_text(value: float, digits: int = 3) -> str:
    """Format a size rounded to significant digits, with commas or as a power of ten."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 100 <= rounded < 1e12 else f"{rounded:.{digits}g}"
