"""The methods of `select`, and the forecasts of each model from its own sizes.

This module must not import torch: the choices of the command line come from `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal, NamedTuple

import numpy as np

from .ats import accept_then_stop
from .blend import FEWEST_SIZES, BlendForecast, forecast_ahead, forecasts
from .fitted import FittedLaw
from .fitting import fit
from .loss_table import LossTable
from .predictive import Array, Index, Mixture, Student
from .table_error import TableError

DEFAULT = "blend"
"""The default method."""
_LATE_FALL = 0.15
"""Standard deviation of ln L per doubling and per nat of ln C, for a classifier of C classes that
may still be at the level of guessing; chosen by benchmarks.live_selection."""


class MethodSettings(NamedTuple):
    """The name of a method of `select`, and γ and τ of the method ats, see `fit`."""

    method: str
    gamma: int = 3
    tau: float = 5.0


@dataclass(frozen=True)
class Forecast:
    """A method's scores and forecasts for n models.

    Attributes:
        score: the score that models are ranked by, lower is better, [n]: the forecast loss if the
            method forecasts one.
        trained: number of examples each model was trained on, summed over the runs used, [n].
        predictive: the distribution of ln L at the target; None if the method gives none.
        deviation: standard deviation of each model's idiosyncratic error of ln L, [n]; None without
            a distribution.
        no_signal: probability that the models do not differ, [n]; None without a distribution.
        is_loss: whether the score is a loss at the target.
        mixture: the distribution of ln L without the error common to all models, from which P(best)
            is computed; None until all models have been forecast.
    """

    score: Array
    trained: Array
    predictive: Student | None = None
    deviation: Array | None = None
    no_signal: Array | None = None
    is_loss: bool = True
    mixture: Mixture | None = None

    @property
    def predicted(self) -> Array | None:
        """The forecast loss at the target, [n]; None if the method forecasts no loss."""
        return self.score if self.is_loss else None

    def rows(self, index: Index) -> Forecast:
        """Return the forecasts of the models at the rows `index`."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        indexed = {name: value[index] for name, value in arrays.items() if value is not None}
        predictive = self.predictive and self.predictive.rows(index)
        return replace(self, predictive=predictive, **indexed)  # type: ignore[arg-type]


_ARRAYS = ("score", "trained", "deviation", "no_signal")


def _concatenate(groups: Sequence[Forecast]) -> Forecast:
    """Concatenate the forecasts of several groups of models.

    A field that is None in any group is None in the result.
    """

    def join(arrays_or_none: Sequence[Array | None]) -> Array | None:
        arrays = [value for value in arrays_or_none if value is not None]
        return np.concatenate(arrays) if len(arrays) == len(arrays_or_none) else None

    arrays = {name: join([getattr(group, name) for group in groups]) for name in _ARRAYS}
    predictives = [group.predictive for group in groups if group.predictive is not None]
    fields = zip(*((s.location, s.scale, s.dof) for s in predictives), strict=True)
    predictive = Student(*map(np.concatenate, fields)) if len(predictives) == len(groups) else None
    return replace(groups[0], predictive=predictive, **arrays)  # type: ignore[arg-type]


# Methods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A method of ranking models.

    Attributes:
        forecast: (losses up to the budget, target, settings) -> forecast.
        needs: the data it needs: "losses" of fine-tuned models, "zero" (losses before fine-tuning)
            or "parameters" (numbers of parameters).
        trains: which sizes every model has to be fine-tuned on: "all" up to the budget, only the
            "last", those visited in a "walk" from the budget down (Accept-then-Stop), or "none".
        min_losses: number of losses needed of each model; if `reads_zero`, the loss before
            fine-tuning is one of them.
        reads_zero: whether it uses the loss before fine-tuning if it is known.
    """

    forecast: Callable[[LossTable, float, MethodSettings], Forecast]
    needs: Literal["losses", "zero", "parameters"]
    trains: Literal["all", "last", "walk", "none"]
    min_losses: int = 0
    reads_zero: bool = False

    def fewest_sizes(self, *, has_zero: bool) -> int:
        """Return the smallest number of sizes above 0 that the method needs of a model.

        Args:
            has_zero: whether the loss before fine-tuning is known.
        """
        return self.min_losses - (has_zero and self.reads_zero)


# The functions below are the `forecast` of one method each, and their helpers.


def _blend(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    (blend_forecast,) = forecasts(table.trained, table.trained_losses, [target])
    return _from_blend(blend_forecast, _all_sizes(table))


def _from_blend(blend: BlendForecast, trained: Array) -> Forecast:
    """Convert the forecast of "blend" to a `Forecast` with the field `trained`."""
    score = np.exp(blend.predictive.location)
    return Forecast(score, trained, blend.predictive, blend.deviation, blend.no_signal)


def _rectified(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    return _from_law(table, target, fit(table.sizes, table.losses, "rectified"))


def _power(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    return _from_law(table, target, fit(table.trained, table.trained_losses, "power"))


def _from_law(table: LossTable, target: float, fitted: FittedLaw) -> Forecast:
    """Forecast by a fitted law; with a distribution if the fit has degrees of freedom left."""
    predicted = np.atleast_1d(fitted.predict(target))
    predictive = fitted.predictive(target) if fitted.has_intervals else None
    deviation = None
    if predictive is not None:  # laws are least sure where they let the models fall differently
        spread = np.log(table.trained_losses[:, -1] / predicted).std()
        deviation = np.full(len(predicted), np.hypot(np.median(predictive.scale), spread))
    return Forecast(predicted, _all_sizes(table), predictive, deviation)


def _ats(table: LossTable, target: float, settings: MethodSettings) -> Forecast:
    """Extrapolate the line of Accept-then-Stop (Algorithm 1)."""
    sizes, losses = table.trained, table.trained_losses
    _, gamma, tau = settings
    forecast = _from_law(table, target, fit(sizes, losses, "ats", gamma=gamma, tau=tau))
    visited = accept_then_stop(np.log(sizes), np.log(losses), gamma, tau).visited
    is_visited = np.arange(len(sizes)) >= len(sizes) - visited[:, None]
    return replace(forecast, trained=(is_visited * sizes).sum(-1))


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
    """Return the number of training examples of runs on all sizes, for each model, [n]."""
    return np.full(len(table.names), table.trained.sum())


METHODS: dict[str, Method] = {
    "blend": Method(_blend, "losses", "all", FEWEST_SIZES),
    # Without a kernel, F of Eq. 10 is a free number as D_l is, so that both laws are the same.
    "lensllm": Method(_rectified, "losses", "all", 4, reads_zero=True),
    "rectified": Method(_rectified, "losses", "all", 4, reads_zero=True),
    "power": Method(_power, "losses", "all", 4),
    "ats": Method(_ats, "losses", "walk", 2),
    "subtuning": Method(_subtuning, "losses", "last", 1),
    "zeroshot": Method(_zeroshot, "zero", "none", 1, reads_zero=True),
    "modelsize": Method(_modelsize, "parameters", "none"),
}


def unranked_reasons(table: LossTable, method: str) -> dict[str, str]:
    """Return a dict of the models that a method cannot rank: model -> reason, a sentence."""
    is_present = np.isfinite(table.losses)
    counts = is_present[:, table.sizes > 0].sum(1)
    has_zero_loss = is_present[:, table.sizes == 0].sum(1) > 0
    reasons = {}
    for name, count, has_zero in zip(table.names, counts, has_zero_loss, strict=True):
        needed = METHODS[method].fewest_sizes(has_zero=bool(has_zero))
        if count < needed:
            reasons[name] = f"{method} needs {needed} sizes above 0 or more, and {name} has {count}"
        elif METHODS[method].needs == "zero" and has_zero_loss.any() and not has_zero:
            reasons[name] = f"{method} needs the loss before fine-tuning, and {name} has none"
    return reasons


def forecast_models(
    table: LossTable, target: float, settings: MethodSettings, classes: int | None = None
) -> Forecast:
    """Forecast every model from its own sizes; losses may be missing (NaN).

    For each set of sizes, "blend" fits its hyperparameters to all models that have these sizes, so
    that models that were stopped early stay comparable.

    Args:
        table: losses up to the budget.
        target: size of the forecast.
        settings: the method.
        classes: number of classes, C; None if the task is no classification.  Intervals of a
            classifier are wider, as its loss stays at ln C until it begins to learn, at an unknown
            size.

    Raises:
        ValueError: a model has fewer sizes than the method needs, or a forecast overflows.
    """
    has_loss, method = np.isfinite(table.losses), settings.method
    if reasons := unranked_reasons(table, method):
        raise ValueError(next(iter(reasons.values())))
    # One forecast for each set of sizes: of all models that have these sizes, at these sizes.  It
    # is kept for the models that have no other size.
    group_forecasts, group_rows = [], []
    for pattern in np.unique(has_loss, axis=0):
        rows = np.flatnonzero((has_loss == pattern).all(1))
        group = np.flatnonzero(has_loss[:, pattern].all(1))
        subset = table.rows(group)
        common = replace(subset, sizes=table.sizes[pattern], losses=subset.losses[:, pattern])
        is_single_blend = method == "blend" and len(group) == 1
        single_forecast = _blend_ahead(table, int(rows[0]), target) if is_single_blend else None
        forecast = single_forecast or METHODS[method].forecast(common, target, settings)
        group_forecasts.append(forecast.rows(np.searchsorted(group, rows)))
        group_rows.append(rows)
    forecast = _concatenate(group_forecasts).rows(np.argsort(np.concatenate(group_rows)))
    if forecast.is_loss:
        invalid = ~((forecast.score > 0) & (forecast.score < math.inf))  # NaN, underflow, overflow
        if invalid.any():
            raise ValueError(
                f"{method} forecasts no number for the target {target:g} of "
                f"{table.names[int(invalid.argmax())]}: expected one nearer to the largest size, "
                f"{table.sizes[-1]:g}, and losses nearer to each other than "
                f"{np.nanmin(table.losses):g} and {np.nanmax(table.losses):g}"
            )
    if forecast.predictive is None or forecast.deviation is None:
        return forecast
    # The standard error of the last loss (over seeds or test examples) widens the distributions,
    # and so does the unknown size at which a model that still guesses begins to learn.
    last = np.where(has_loss, table.sizes, 0.0).max(1)
    doublings = np.log2(target / last) if last.all() else np.ones(len(last))
    late_error = 0.0 if classes is None else _LATE_FALL * math.log(classes) * doublings
    at_chance = table.at_chance(classes)
    noise = table.last_noise
    deviation = np.hypot(np.hypot(forecast.deviation, noise), np.where(at_chance, late_error, 0.0))
    no_signal = 0.0 if forecast.no_signal is None else float(forecast.no_signal.mean())
    if at_chance.all() or no_signal > 0.5:
        no_signal = 1.0
    location, scale = np.log(forecast.score), np.maximum(deviation, 1e-12)
    dof = np.full(len(last), math.inf)
    mean, mean_scale = (np.full(len(last), x.mean()) for x in (location, scale))
    components = (Student(location, scale, dof), Student(mean, mean_scale, dof))
    weights = np.array([1 - no_signal, no_signal])
    mixture = Mixture(weights[weights > 0], tuple(compress(components, weights > 0)))
    predictive = forecast.predictive.with_noise(np.hypot(noise, late_error))
    no_signals = np.full(len(last), no_signal)
    return replace(forecast, predictive=predictive, mixture=mixture, no_signal=no_signals)


def _blend_ahead(table: LossTable, row: int, target: float) -> Forecast | None:
    """Forecast a model by "blend" if no other model has all of its sizes.

    The forecast uses as many of its first sizes as another model also has, and its largest size;
    sizes in between are left out.

    Args:
        table: losses of all models.
        row: row of the model.
        target: size of the forecast.

    Returns:
        The forecast of that model; None if it shares fewer than `FEWEST_SIZES` sizes.
    """
    has_loss = np.isfinite(table.losses) & (table.sizes > 0)
    columns = np.flatnonzero(has_loss[row])
    for count in range(len(columns) - 1, FEWEST_SIZES - 1, -1):
        common_cols = columns[:count]
        group = np.flatnonzero(has_loss[:, common_cols].all(1))
        if len(group) > 1:
            break
    else:
        return None
    last = table.sizes[columns[-1]], table.losses[row, columns[-1]]
    losses, group_row = table.losses[np.ix_(group, common_cols)], int(np.searchsorted(group, row))
    blend = forecast_ahead(table.sizes[common_cols], losses, group_row, last, target)
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
        table: losses at all sizes.
        budget: largest size used.
        target: size of the forecast.
        settings: the method.
        classes: number of classes or None, see `forecast_models`.

    Returns:
        The losses used, the forecasts, and model -> reason of the models that are not forecast.

    Raises:
        ValueError: no model has enough sizes, or a forecast overflows.
    """
    subset = table.up_to(budget)
    unranked = unranked_reasons(subset, settings.method)
    if len(unranked) == len(subset.names):
        raise ValueError(next(iter(unranked.values())))
    subset = subset.rows(np.flatnonzero([name not in unranked for name in subset.names]))
    return subset, forecast_models(subset, target, settings, classes), unranked
