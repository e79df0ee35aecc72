"""A fitted law: parameters, predictions, intervals, transition point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import Array, Mask
from .laws import Law, Points
from .loglinear import Line
from .predictive import Student, check_level

Values = Array | float


@dataclass(frozen=True)
class Transition:
    """The size D* where the pre-power phase ends, with an interval; [n], or numbers of one curve.

    Attributes:
        size: the estimate; NaN where there is none.
        low, high: the interval.
    """

    size: Values
    low: Values
    high: Values


class FittedLaw(ABC):
    """What `fit` returns. Shapes below are for n curves; a single curve ([m]) has no leading n.

    Attributes:
        law: name of the law.
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
        """The distribution of ln L that a measurement at `size` would give, one a curve.

        Raises:
            ValueError: no degree of freedom is left to estimate the noise from.
        """

    @abstractmethod
    def _log_predict(self, sizes: Array) -> Array:
        """ln L at sizes [k]: [n, k]."""

    @abstractmethod
    def transition_at(self, level: float = 0.9) -> Transition | None:
        """The transition with an interval of this level; None where the law has none."""

    @property
    def transition(self) -> Transition | None:
        """The transition with its 90 % interval; None where the law has none."""
        return self.transition_at(0.9)

    def predict(self, sizes: npt.ArrayLike) -> Values:
        """The fitted loss.

        Args:
            sizes: training examples D, a number or [k].

        Returns:
            [n, k]; without k for a number, without n for a single curve.

        Raises:
            ValueError: a size that is negative, infinite or NaN.
        """
        return self._shaped(np.exp(self._log_predict(_sizes(sizes))), sizes)

    def interval(self, sizes: npt.ArrayLike, level: float = 0.9) -> tuple[Values, Values]:
        """Where a loss measured at a size would lie with probability `level`.

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
        """[n, k] as the caller asked: without k for a number, without n for one curve."""
        if np.ndim(sizes) == 0:
            values = values[:, 0]
        return self._row(values)

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
        """Kaplan's law for a model of N parameters: what `predict` is then about."""
        return FittedCurve(**{**vars(self), "model_sizes": np.full(1, float(parameters))})

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
        found = self.definition.log_transition(self.coordinates)
        if found is None:
            return None
        value, gradient = found
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
    smallest one accepted; its estimate is their geometric mean, whatever the level asked.
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
        scale = self.line.standard_error(x)[:, 0]
        # A perfect line has no width; a positive one keeps its quantiles defined.
        return Student(
            self.line.predict(x)[:, 0], np.maximum(scale, 1e-12), (self.line.count - 2.0)
        )

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
