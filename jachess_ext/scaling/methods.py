"""The methods of `select`, and what each forecasts of every model from its own sizes.

Importing this imports no torch: the command line's choices come from `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from .ats import accept_then_stop
from .blend import FEWEST_SIZES, BlendForecast, forecast_ahead, forecasts
from .fitted import FittedLaw
from .fitting import fit
from .loss_table import LossTable
from .predictive import Array, Index, Mixture, Student, idiosyncratic_deviation
from .table_error import TableError

DEFAULT = "blend"
"""The method where none is named."""
_LATE_FALL = 0.15
"""Standard deviation of ln L per doubling and nat of ln C, for a classifier that may not have begun
to learn; chosen by benchmarks.live_selection."""


class MethodSettings(NamedTuple):
    """A method of `select`, and Algorithm 1's γ and τ."""

    method: str
    gamma: int = 3
    tau: float = 5.0


@dataclass(frozen=True)
class Forecast:
    """A method's scores and forecasts, a row for each model.

    Attributes:
        score: what models are ranked by, lower is better, [n]; for "blend" not the forecast itself.
        trained: examples every model was trained on for this, over all its runs, [n].
        predictive: the distribution of ln L at the target, or None.
        fall: predicted fall of ln L from each model's last size to the target, [n]; None without a
            distribution.
        deviation: for "blend", the Gaussian process's standard deviation of ln L, [n].
        trust: for "blend", the probability that the process describes this table, [n].
        is_loss: whether the score is a loss at the target.
        mixture: the distribution of the losses without the error that all models share, from which
            P(best) is computed; set once all models are forecast.
    """

    score: Array
    trained: Array
    predictive: Student | None = None
    fall: Array | None = None
    deviation: Array | None = None
    trust: Array | None = None
    is_loss: bool = True
    mixture: Mixture | None = None

    @property
    def predicted(self) -> Array | None:
        """The loss at the target, [n]; None where the method predicts none."""
        if self.predictive is not None:
            return np.exp(self.predictive.location)
        return self.score if self.is_loss else None

    def rows(self, index: Index) -> Forecast:
        """Return the forecasts of the models at these rows."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        chosen = {name: value[index] for name, value in arrays.items() if value is not None}
        predictive = self.predictive and self.predictive.rows(index)
        return replace(self, predictive=predictive, **chosen)  # type: ignore[arg-type]


_ARRAYS = ("score", "trained", "fall", "deviation", "trust")


def _concatenate(parts: Sequence[Forecast]) -> Forecast:
    """Concatenate forecasts of groups of models; a field that one lacks is None in the result."""

    def join(values: Sequence[Array | None]) -> Array | None:
        arrays = [value for value in values if value is not None]
        return np.concatenate(arrays) if len(arrays) == len(values) else None

    arrays = {name: join([getattr(part, name) for part in parts]) for name in _ARRAYS}
    students = [part.predictive for part in parts if part.predictive is not None]
    columns = zip(*((s.location, s.scale, s.dof) for s in students), strict=True)
    predictive = Student(*map(np.concatenate, columns)) if len(students) == len(parts) else None
    return replace(parts[0], predictive=predictive, **arrays)  # type: ignore[arg-type]


# Methods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to rank models.

    Attributes:
        forecast: (losses up to the budget, target, settings) -> its forecast.
        needs: what it reads: "losses" of fine-tuned models, "zero" (losses before fine-tuning) or
            "parameters" (numbers of them).
        trains: the subsets every model is fine-tuned on for it: "all" up to the budget, the "last"
            alone, those a "walk" down from the budget visits, or "none".
        points: losses of a model it needs, the loss before fine-tuning counted where it
            `reads_zero`.
        reads_zero: whether the loss before fine-tuning is read where it is known.
    """

    forecast: Callable[[LossTable, float, MethodSettings], Forecast]
    needs: Literal["losses", "zero", "parameters"]
    trains: Literal["all", "last", "walk", "none"]
    points: int = 0
    reads_zero: bool = False

    def fewest_sizes(self, *, zero: bool) -> int:
        """Return how many subsets it needs, where the loss before fine-tuning is known (or not)."""
        return self.points - (zero and self.reads_zero)


def _blend(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    (blend_forecast,) = forecasts(table.trained, table.trained_losses, [target])
    return _from_blend(blend_forecast, _all_sizes(table))


def _from_blend(blend: BlendForecast, trained: Array) -> Forecast:
    score = np.exp(blend.choice)
    return Forecast(score, trained, blend.predictive, blend.fall, blend.deviation, blend.trust)


def _rectified(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    return _from_law(table, target, fit(table.sizes, table.losses, "rectified"))


def _power(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    return _from_law(table, target, fit(table.trained, table.trained_losses, "power"))


def _from_law(table: LossTable, target: float, fitted: FittedLaw) -> Forecast:
    """Forecast by a fitted law, with a distribution where degrees of freedom are left."""
    predicted = np.atleast_1d(fitted.predict(target))
    predictive = fitted.predictive(target) if fitted.has_intervals else None
    fall = np.log(table.trained_losses[:, -1] / predicted)
    return Forecast(predicted, _all_sizes(table), predictive, fall)


def _ats(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    """Halve the budget until a point leaves the line (Algorithm 1); continue the line."""
    sizes, losses = table.trained, table.trained_losses
    _, gamma, tau = settings
    forecast = _from_law(table, target, fit(sizes, losses, "ats", gamma=gamma, tau=tau))
    visited = accept_then_stop(np.log(sizes), np.log(losses), gamma, tau).visited
    last = np.arange(len(sizes)) >= len(sizes) - visited[:, None]
    return replace(forecast, trained=(last * sizes).sum(-1))


def _subtuning(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    loss = table.trained_losses[:, -1]
    return Forecast(loss, np.full(len(loss), table.trained[-1]))


def _zeroshot(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    if table.sizes[0] != 0:
        raise TableError("zeroshot needs a column 0, the losses before fine-tuning")
    return Forecast(table.losses[:, 0], np.zeros(len(table.names)))


def _modelsize(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    score = -np.log(table.known_parameters())
    return Forecast(score, np.zeros(len(score)), is_loss=False)


def _all_sizes(table: LossTable) -> Array:
    return np.full(len(table.names), table.trained.sum())


METHODS: dict[str, Method] = {
    "blend": Method(_blend, "losses", "all", FEWEST_SIZES),
    # Eq. 10 with F free: a number, as D_l is, so that both are one.
    "lensllm": Method(_rectified, "losses", "all", 4, reads_zero=True),
    "rectified": Method(_rectified, "losses", "all", 4, reads_zero=True),
    "power": Method(_power, "losses", "all", 4),
    "ats": Method(_ats, "losses", "walk", 2),
    "subtuning": Method(_subtuning, "losses", "last", 1),
    "zeroshot": Method(_zeroshot, "zero", "none", 1, reads_zero=True),
    "modelsize": Method(_modelsize, "parameters", "none"),
}


def unranked_reasons(table: LossTable, method: str) -> dict[str, str]:
    """Return why models cannot be ranked by a method: model -> a sentence on its sizes."""
    present = np.isfinite(table.losses)
    trained = present[:, table.sizes > 0].sum(1)
    zero = present[:, table.sizes == 0].sum(1) > 0
    reasons = {}
    for name, count, has_zero in zip(table.names, trained, zero, strict=True):
        needed = METHODS[method].fewest_sizes(zero=bool(has_zero))
        if count < needed:
            reasons[name] = f"{method} needs {needed} sizes above 0 or more, and {name} has {count}"
        elif METHODS[method].needs == "zero" and zero.any() and not has_zero:
            reasons[name] = f"{method} needs the loss before fine-tuning, and {name} has none"
    return reasons


def forecast_models(
    table: LossTable, target: float, settings: MethodSettings, classes: int | None = None
) -> Forecast:
    """Forecast every model from its own sizes, where losses of some are missing (NaN).

    blend learns what curves share from all models that have a model's sizes, so that models that
    were stopped early stay comparable.  With `classes`, C, intervals widen: a classifier stays at
    ln C until it learns anything, then falls fast, and no subset tells when that is.

    Raises:
        ValueError: a model has fewer sizes than the method needs.
    """
    present, method = np.isfinite(table.losses), settings.method
    if reasons := unranked_reasons(table, method):
        raise ValueError(next(iter(reasons.values())))
    # One forecast for each set of sizes.  The models with just these sizes are forecast together
    # with those that have them and more, cut to the same sizes, and only the former are kept.
    parts, part_rows = [], []
    for pattern in np.unique(present, axis=0):
        rows = np.flatnonzero((present == pattern).all(1))
        group = np.flatnonzero(present[:, pattern].all(1))
        chosen = table.rows(group)
        common = replace(chosen, sizes=table.sizes[pattern], losses=chosen.losses[:, pattern])
        is_single_blend = method == "blend" and len(group) == 1
        ahead = _blend_ahead(table, int(rows[0]), target) if is_single_blend else None
        forecast = ahead or METHODS[method].forecast(common, target, settings)
        parts.append(forecast.rows(np.searchsorted(group, rows)))
        part_rows.append(rows)
    forecast = _concatenate(parts).rows(np.argsort(np.concatenate(part_rows)))
    predicted = forecast.predicted
    if predicted is not None:
        numbers = np.stack([predicted, forecast.score])
        wrong = ~((numbers > 0) & (numbers < math.inf)).all(0)  # NaN, 0 by underflow, overflow
        if wrong.any():
            raise ValueError(
                f"{method} forecasts no number for the target {target:g} of "
                f"{table.names[int(wrong.argmax())]}: expected one nearer to the largest size, "
                f"{table.sizes[-1]:g}, and losses nearer to each other than "
                f"{np.nanmin(table.losses):g} and {np.nanmax(table.losses):g}"
            )
    if forecast.predictive is None or forecast.fall is None:
        return forecast
    # A mean over seeds, or over a sample of test rows, is off by its standard error, and so is what
    # is forecast from it.
    predictive = forecast.predictive.with_noise(table.last_noise)
    last = np.where(present, table.sizes, 0.0).max(1)
    doublings = np.log2(target / last) if last.all() else np.ones(len(last))
    deviations = [idiosyncratic_deviation(predictive.scale, forecast.fall)]
    weights = [1.0]
    if forecast.deviation is not None and forecast.trust is not None:
        trust = float(forecast.trust.mean())
        deviations.append(float(np.median(np.hypot(forecast.deviation, table.last_noise))))
        weights = [1 - trust, trust]
    location = np.log(forecast.score)
    mixture = Mixture.gaussian(location, np.array(deviations), np.array(weights), doublings)
    if classes is not None:
        predictive = predictive.with_noise(_LATE_FALL * math.log(classes) * doublings)
    return replace(forecast, predictive=predictive, mixture=mixture)


def _blend_ahead(table: LossTable, row: int, target: float) -> Forecast | None:
    """Forecast a model that was run on larger sizes than all others; None: it was not.

    Only its largest size is read: those below it are left out until another model has the rest.
    """
    present = np.isfinite(table.losses) & (table.sizes > 0)
    columns = np.flatnonzero(present[row])
    for count in range(len(columns) - 1, FEWEST_SIZES - 1, -1):
        common = columns[:count]
        group = np.flatnonzero(present[:, common].all(1))
        if len(group) > 1:
            break
    else:
        return None
    last = table.sizes[columns[-1]], table.losses[row, columns[-1]]
    losses, group_row = table.losses[np.ix_(group, common)], int(np.searchsorted(group, row))
    blend = forecast_ahead(table.sizes[common], losses, group_row, last, target)
    return _from_blend(blend, np.array([table.sizes[columns].sum()]))


def forecast_up_to(
    table: LossTable,
    budget: float,
    target: float,
    settings: MethodSettings,
    classes: int | None = None,
) -> tuple[LossTable, Forecast, dict[str, str]]:
    """Forecast the models that have enough sizes up to a budget.

    Args:
        table: losses, also above the budget.
        budget, target: the largest size read, and the one predicted for.
        settings: of the method.
        classes: see `forecast_models`.

    Returns:
        The losses that were read, the forecasts, and the models without, see `unranked_reasons`.

    Raises:
        ValueError: too few sizes of every model, or as `forecast_models`.
    """
    read = table.up_to(budget)
    unranked = unranked_reasons(read, settings.method)
    if len(unranked) == len(read.names):
        raise ValueError(next(iter(unranked.values())))
    read = read.rows(np.flatnonzero([name not in unranked for name in read.names]))
    return read, forecast_models(read, target, settings, classes), unranked
