"""The method "blend" of `select`: two extrapolations of ln L, weighed by the table's backtests.

One is the mean over a grid of rectified shapes (shapes.py).  The other continues the slope that a
curve has at its largest size, which fades by a factor φ per doubling.  How well both have forecast
the table's later sizes from its earlier ones decides φ, the weights of the two, and the width of
the intervals.  The difference between the forecasts of two models is moved half-way towards the
difference between their last losses, as forecasts exaggerate differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._io import require
from .constants import CONSTANTS
from .predictive import Array, Student
from .shapes import Kriging, covariances, log_sum, posterior_means, softmax

FEWEST_SIZES = 3
_FADES = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
_ROUNDING = 1e-4
"""Error of ln L below which a forecast is as good as exact, as tables have four digits."""
_MEDIAN_TO_DEVIATION = 1.4826  # of a normal distribution: standard deviation / median |deviation|
_LOG_MEAN_TO_DEVIATION = 0.635  # of a normal distribution: ln standard deviation − mean ln |x|
_MOST_MODELS = 300  # in backtests, for speed


def replace_spikes(y: Array, sizes: Array) -> Array:
    """Return ln L, [n, m], with first losses of failed runs replaced.

    A run that diverged at the smallest size makes its curve fall steeply, and would make its model
    the best.  If the fall from the first to the second loss is far above that of the other models,
    the first loss is replaced by the second plus the curve's next fall, so that no model gains by a
    worse loss.
    """
    steps = np.diff(np.log2(sizes))
    falls = -np.diff(y) / steps
    median = np.median(falls[:, 0])
    deviation = _MEDIAN_TO_DEVIATION * np.median(abs(falls[:, 0] - median))
    limit = median + CONSTANTS.spike * deviation + abs(median) / 2
    first_loss = y[:, 1] + np.minimum(falls[:, 1], limit) * steps[0]
    return np.column_stack([np.where(falls[:, 0] > limit, first_loss, y[:, 0]), y[:, 1:]])


def fading_doublings(doublings: float, fade: float | Array) -> float | Array:
    """Return the change of ln L divided by the initial slope: ∫ φ^t dt, t from 0 to `doublings`.

    Args:
        doublings: log₂(target / largest size).
        fade: φ, the factor that the slope keeps per doubling.
    """
    return (1 - fade**doublings) / -np.log(fade)


@dataclass(frozen=True)
class Process:
    """A Gaussian process of ln L over doublings, with hyperparameters fitted to one table.

    A curve is the sum of an unknown constant, a line whose slope at the largest size D_n is normal
    around the mean slope of all curves, a random walk of the slope, and noise.  It assumes no shape
    of the curves and nothing from other tables, so that its variance is small if the curves of the
    table are similar and smooth.

    Attributes:
        slope: mean change of ln L per doubling at D_n.
        deviations: standard deviations of the curves' slopes at D_n, of the slope's walk over one
            doubling, and of the noise, [3].
    """

    slope: float
    deviations: Array

    @classmethod
    def fit(cls, y: Array, sizes: Array) -> Process:
        """Return the maximum a posteriori process for ln L, [n, m], at sizes, [m].

        The priors are N(−.1, .15²) for the slope and N(ln (.06, .02, .02), 1) for ln of the
        deviations, wide compared to the likelihood of even three sizes.
        """
        white, _, bend, line = covariances(sizes, sizes[:0])
        components, u = np.stack([line, bend, white]), np.log2(sizes / sizes[-1])
        residual = y - y[:, -1:] + 0.1 * u  # from the line of the prior; constants have no effect
        scatter, total = residual.T @ residual, residual.sum(0)

        def negative_log_posterior(logs: Array) -> tuple[float, Array, float]:
            covariance = np.exp(2 * logs)[:, None, None] * components
            model = Kriging.solve(covariance.sum(0, keepdims=True), len(sizes))
            precision = model.precision[0]
            weight = len(y) * (u @ precision @ u) + 0.15**-2
            slope = u @ precision @ total / weight  # the most probable for these deviations
            cross = np.outer(total - len(y) * slope / 2 * u, slope * u)
            squares = scatter - cross - cross.T
            prior = (slope / 0.15) ** 2 + ((logs - _DEVIATIONS) ** 2).sum()
            objective = ((precision * squares).sum() + prior) / 2 - len(y) * model.log_weight[0]
            curvature = len(y) * precision - precision @ squares @ precision
            gradient = (covariance * curvature).sum((1, 2)) + logs - _DEVIATIONS
            return float(objective), gradient, float(slope)

        minimum = require("scipy.optimize").minimize(
            lambda logs: negative_log_posterior(logs)[:2],
            _DEVIATIONS,
            method="L-BFGS-B",
            jac=True,
            bounds=[(-7, 1), (-8, 0), (-8, 0)],
            options={"ftol": 1e-15, "gtol": 1e-9},
        )
        return cls(negative_log_posterior(minimum.x)[2] - 0.1, np.exp(minimum.x))

    def predict(self, y: Array, sizes: Array, targets: Array) -> tuple[Array, Array]:
        """Return the means of ln L at the targets, [t, n], and its standard deviations, [t].

        Args:
            y: ln L, [n, m].
            sizes: [m].
            targets: [t].
        """
        white, _, bend, line = covariances(sizes, targets)
        components = np.stack([line, bend, white])
        kriging = Kriging.solve(np.tensordot(self.deviations**2, components, 1)[None], len(sizes))
        residual = y - y[:, -1:] - self.slope * np.log2(sizes / sizes[-1])
        change = self.slope * np.log2(targets / sizes[-1])[:, None]
        return y[:, -1] + change + kriging.weights[0] @ residual.T, np.sqrt(kriging.variance[0])


_DEVIATIONS = np.log([0.06, 0.02, 0.02])  # prior mean of ln `Process.deviations`


class Start(NamedTuple):
    """Level and slope of n curves, estimated from the first k sizes, from which a backtest starts.

    Attributes:
        level: ln L at the k-th size without its noise, [n].
        slope: change of ln L per doubling there, [n].
        deviations: standard deviations of the process's predictions of ln L at t later sizes, [t].
    """

    level: Array
    slope: Array
    deviations: Array

    @classmethod
    def fit(cls, y: Array, sizes: Array, later: Array) -> Start:
        """Fit the process to ln L, [n, m], at sizes, [m]; return the start at the last size.

        Level and slope are those of the line through the process's means at the next two doublings.
        """
        ahead = np.append(sizes[-1] * np.array([2.0, 4.0]), later)
        means, deviations = Process.fit(y, sizes).predict(y, sizes, ahead)
        return cls(2 * means[0] - means[1], means[1] - means[0], deviations[2:])


@dataclass(frozen=True)
class Backtests:
    """Settings of "blend", estimated from forecasts of a table's later sizes by its earlier ones.

    Attributes:
        fade: φ, the factor by which slopes fade per doubling.
        shape_weight: weight of the shapes' forecast against that of the fading slope, 0 to 1.
        log_rates: ln of the forecast error per doubling, averaged over the later sizes and summed
            over the starts, [2]: of the idiosyncratic error of a model, and of the error common to
            all models.
        count: number of starts, one for each k.
    """

    fade: float
    shape_weight: float
    log_rates: Array
    count: int

    @classmethod
    def run(cls, y: Array, sizes: Array) -> Backtests:
        """Forecast every later size from the first k sizes, for each k from 2.

        Args:
            y: ln L, [n, m].
            sizes: [m].
        """
        u, (n, m) = np.log2(sizes), y.shape
        starts = {k: Start.fit(y[:, :k], sizes[:k], sizes[k:]) for k in range(2, m)}
        pairs = [(k, j) for k in starts for j in range(k, m)]

        def slope_forecast(k: int, j: int, fade: float | Array) -> Array:
            start = starts[k]
            return start.level + start.slope * fading_doublings(u[j] - u[k - 1], fade)

        fade_errors = {
            (k, j): _log(np.median(abs(slope_forecast(k, j, _FADES[:, None]) - y[:, j]), 1))
            for k, j in pairs
        }
        fades = {
            count: _posterior_fade([fade_errors[k, j] for k, j in pairs if j < count])
            for count in range(2, m + 1)
        }
        slopes = {(k, j): slope_forecast(k, j, fades[k]) for k, j in pairs}
        shapes: dict[tuple[int, int], Array] = {}
        for k in range(FEWEST_SIZES, m):
            means = posterior_means(y[:, :k], sizes[:k], sizes[k:])
            shapes |= {(k, j): mean for j, mean in enumerate(means, k)}
        weight = 0.0
        if shapes:
            errors = [[_log_error(x[k, j] - y[:, j]) for k, j in shapes] for x in (slopes, shapes)]
            gain = np.mean(errors[0]) - np.mean(errors[1])
            odds = CONSTANTS.evidence * min(len(shapes), CONSTANTS.backtests) * gain
            weight = _probability(odds)
        log_rates = np.zeros(2)
        for k in starts:
            rates = []
            for j in range(k, m):
                forecast = slopes[k, j]
                forecast = forecast + weight * (shapes.get((k, j), forecast) - forecast)
                error = draw(forecast, y[:, k - 1]) - y[:, j]
                deviation = np.sqrt((centre(error) ** 2).sum() / max(n - 1, 1))
                common = _log(abs(error.mean())) + _LOG_MEAN_TO_DEVIATION
                rates.append(np.array([_log(deviation), common]) - np.log(u[j] - u[k - 1]))
            log_rates += np.mean(rates, 0)
        return cls(fades[m], weight, log_rates, len(starts))

    def deviations(self, doublings: float, process: float) -> tuple[float, float]:
        """Return the standard deviations of the idiosyncratic and of the common forecast error.

        Both grow in proportion to the doublings.

        Args:
            doublings: log₂(target / largest size).
            process: standard deviation of ln L in the process, from which the prior follows.
        """
        prior = np.log(CONSTANTS.width * process / doublings)
        idiosyncratic, common = doublings * np.exp((prior + self.log_rates) / (1 + self.count))
        return float(idiosyncratic), float(common)


def _posterior_fade(log_errors: Sequence[Array]) -> float:
    """Return the posterior mean of φ.

    Args:
        log_errors: ln of the median error of each backtest for each of `_FADES`.
    """
    logs = -((np.log(_FADES / CONSTANTS.fade) / CONSTANTS.fade_spread) ** 2) / 2
    if log_errors:
        count = min(len(log_errors), CONSTANTS.backtests)
        logs = logs - CONSTANTS.evidence * count * np.mean(log_errors, 0)
    return float(softmax(logs) @ _FADES)


def _probability(log_odds: float) -> float:
    """Return the probability of log odds, without overflow."""
    return float(np.exp(-np.logaddexp(0, -log_odds)))


def _log(errors: Array) -> Array:
    """Return ln of absolute errors, to which `_ROUNDING` is added to keep the result finite."""
    return np.log(errors + _ROUNDING)


def _log_error(errors: Array) -> Array:
    """Return ln of the root mean square of errors."""
    return _log(np.sqrt(np.mean(errors**2)))


def centre(values: Array) -> Array:
    """Return the values minus their mean."""
    return values - values.mean()


def draw(forecast: Array, last: Array) -> Array:
    """Return forecasts, [n], whose differences are moved towards those of the last ln losses, [n].

    Their mean does not change.
    """
    return forecast + CONSTANTS.draw * (centre(last) - centre(forecast))


def no_signal_probability(y: Array, sizes: Array) -> float:
    """Return the probability that all differences between models are noise, independent by size.

    The alternatives are differences in level and slope that last from one of the sizes on.  The
    evidence is that of matrix normal distributions, with the scale integrated out.

    Args:
        y: ln L, [n, m].
        sizes: [m].
    """
    (n, m), u = y.shape, np.log2(sizes)
    if n < 2:
        return 0.0
    z = y - y.mean(0)
    if (z**2).mean() < _ROUNDING**2:
        return 1.0
    v = (u - u[-1]) / (u[-1] - u[0])
    onsets = np.tri(m)[:, : m - 1].T  # [m − 1, m]: from which size on differences last
    lasting = [
        scale**2 * np.outer(on, on) * (1 + slope * np.outer(v, v))
        for on in onsets
        for scale in (0.5, 1, 2, 4, 8, 16)
        for slope in (0, 1, 4)
    ]
    covariance = np.stack([np.zeros((m, m)), *lasting]) + np.eye(m)
    inner = np.einsum("ij,bjk,ik->b", z, np.linalg.inv(covariance), z)
    logs = -(n - 1) / 2 * (np.linalg.slogdet(covariance)[1] + m * np.log(inner))
    prior = np.log(1 / CONSTANTS.no_signal - 1)
    odds = logs[0] - log_sum(logs[1:], 0) + np.log(len(logs) - 1) - prior
    return _probability(odds)


class BlendForecast(NamedTuple):
    """The forecasts of n curves at a target.

    Attributes:
        predictive: Student's t distributions of ln L; their centres rank the models.
        deviation: standard deviation of the idiosyncratic error of ln L, [n].
        no_signal: probability that the models do not differ, [n].
        extrapolation: ln L before the differences are moved towards those of the last losses, [n].
    """

    predictive: Student
    deviation: Array
    no_signal: Array
    extrapolation: Array


def forecasts(sizes: Array, losses: Array, targets: Sequence[float]) -> list[BlendForecast]:
    """Forecast ln L at each of the targets.

    Args:
        sizes: `FEWEST_SIZES` or more, positive, ascending, [m].
        losses: [n, m].
        targets: sizes above the last one.
    """
    y, later = replace_spikes(np.log(losses), sizes), np.array(targets)
    order = np.argsort(y[:, -1], kind="stable")  # a sample does not depend on the table's order
    sample = order[np.linspace(0, len(y) - 1, min(len(y), _MOST_MODELS)).round().astype(int)]
    backtests, start = Backtests.run(y[sample], sizes), Start.fit(y, sizes, later)
    no_signal = np.full(len(y), no_signal_probability(y, sizes))
    shapes = posterior_means(y, sizes, later) if backtests.shape_weight else [0.0] * len(later)
    results = []
    for target, shape, process in zip(later, shapes, start.deviations, strict=True):
        doublings = np.log2(target / sizes[-1])
        slope = start.level + start.slope * fading_doublings(doublings, backtests.fade)
        extrapolation = slope + backtests.shape_weight * (shape - slope)
        location = draw(extrapolation, y[:, -1])
        idiosyncratic, common = backtests.deviations(doublings, process)
        # Forecasts by which the models fall differently, and so may change places, are less sure.
        idiosyncratic = np.hypot(idiosyncratic, CONSTANTS.fall * np.std(y[:, -1] - location))
        scales = np.full((2, len(y)), [[np.hypot(idiosyncratic, common)], [idiosyncratic]])
        dof = np.full(len(y), CONSTANTS.dof)
        predictive = Student(location, scales[0], dof)
        results.append(BlendForecast(predictive, scales[1], no_signal, extrapolation))
    return results


def forecast_ahead(
    sizes: Array, losses: Array, row: int, last: tuple[float, float], target: float
) -> BlendForecast:
    """Forecast ln L at the target for one curve that has a larger size than the others.

    The curve is forecast with the others from their common sizes, and corrected by the error of
    that forecast at its last size.  Errors grow in proportion to the doublings.

    Args:
        sizes: common sizes of all curves, positive, ascending, [m].
        losses: losses at these sizes, [n, m].
        row: row of the curve.
        last: larger size of the curve, and its loss there.
        target: size of the forecast, above the larger size.

    Returns:
        The forecast of that curve alone.
    """
    last_size, log_loss = last[0], np.log(last[1])
    at_last, at_target = forecasts(sizes, losses, [last_size, target])
    remaining = np.log(target / last_size) / np.log(target / sizes[-1])
    index = np.array([row])
    student = at_target.predictive.rows(index)
    correction = log_loss - at_last.predictive.location[index]
    return BlendForecast(
        Student(student.location + correction, student.scale * remaining, student.dof),
        at_target.deviation[index] * remaining,
        at_target.no_signal[index],
        at_target.extrapolation[index] + log_loss - at_last.extrapolation[index],
    )
