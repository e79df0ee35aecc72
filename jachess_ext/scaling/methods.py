"""Every selection method: losses up to a budget to a score, and a forecast if it makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import Array
from .blend import cautious
from .blend import forecast as blend_forecast
from .fitted import FittedLaw
from .fitting import fit
from .heavy_tail import mean_exponent
from .loglinear import accept_then_stop
from .predictive import Student
from .registry import REGISTRY
from .table import LossTable, TableError


@dataclass(frozen=True)
class Settings:
    """What a user may choose.

    Attributes:
        gamma, tau: Algorithm 1's points accepted unseen and deviations that stop it.
        weights: for nlpmetrics, each model's weight matrices (a state dict or an iterable).
    """

    gamma: int = 3
    tau: float = 5.0
    weights: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """What a method says.

    Attributes:
        score: what to choose by, lower is better, [n]; the predicted loss where the method predicts
            one, but for blend, which chooses more cautiously than it predicts.
        predicted: the loss at the target, [n], or None.
        predictive: its distribution in ln L, or None.
        trained: examples every model was trained on for this, over all its runs, [n].
        cautious: the distribution in ln L that `score` is of, where it is not `predictive`.
    """

    score: Array
    predicted: Array | None
    predictive: Student | None
    trained: Array
    cautious: Student | None = None

    @property
    def choosing(self) -> Student | None:
        """The distribution that P(best) is of."""
        return self.predictive if self.cautious is None else self.cautious


Forecaster = Callable[[LossTable, float, Settings], Forecast]


def _law(name: str) -> Forecaster:
    """A law fitted to every size up to the budget (size 0 too where the law reads it)."""

    def forecast(table: LossTable, target: float, settings: Settings) -> Forecast:
        zero = REGISTRY[name].reads_zero
        sizes = table.sizes if zero else table.trained
        losses = table.losses if zero else table.trained_losses
        return forecast_of(fit(sizes, losses, name), target, _all_sizes(table))

    return forecast


def forecast_of(fitted: FittedLaw, target: float, trained: Array) -> Forecast:
    """What a fitted law says; without a width where it has as many parameters as sizes."""
    predicted = np.atleast_1d(fitted.predict(target))
    predictive = fitted.predictive(target) if fitted.has_width else None
    return Forecast(predicted, predicted, predictive, trained)


def _ats(table: LossTable, target: float, settings: Settings) -> Forecast:
    """Algorithm 1: halve the budget until a point leaves the line; continue the line."""
    line = accept_then_stop(
        np.log(table.trained), np.log(table.trained_losses), settings.gamma, settings.tau
    )
    x = np.log([target])
    predicted = np.exp(line.predict(x)[:, 0])
    predictive = None
    if (line.count > 2).all():
        scale = np.maximum(line.standard_error(x)[:, 0], 1e-12)
        predictive = Student(np.log(predicted), scale, line.count - 2.0)
    last = np.arange(len(table.trained)) >= len(table.trained) - line.visited[:, None]
    return Forecast(predicted, predicted, predictive, (last * table.trained).sum(-1))


def _blend(table: LossTable, target: float, settings: Settings) -> Forecast:
    found = blend_forecast(table.trained, table.trained_losses, target)
    choosing = cautious(found, table.trained_losses)
    score, predicted = np.exp(choosing.location), np.exp(found.location)
    return Forecast(score, predicted, found, _all_sizes(table), choosing)


def _subtuning(table: LossTable, target: float, settings: Settings) -> Forecast:
    loss = table.trained_losses[:, -1]
    return Forecast(loss, loss, None, np.full(len(loss), table.trained[-1]))


def _zeroshot(table: LossTable, target: float, settings: Settings) -> Forecast:
    if table.sizes[0] != 0:
        raise TableError("zeroshot needs a column 0, the losses before fine-tuning")
    return Forecast(table.losses[:, 0], table.losses[:, 0], None, np.zeros(len(table.names)))


def _modelsize(table: LossTable, target: float, settings: Settings) -> Forecast:
    return Forecast(-np.log(table.known_parameters()), None, None, np.zeros(len(table.names)))


def _nlpmetrics(table: LossTable, target: float, settings: Settings) -> Forecast:
    missing = [name for name in table.names if name not in settings.weights]
    if missing:
        raise TableError(
            f"nlpmetrics reads the models' weights, and there are none for {missing[0]!r}; pass "
            "weights={name: model.state_dict()} with one entry a model"
        )
    score = np.array([mean_exponent(settings.weights[name]) for name in table.names])
    return Forecast(score, None, None, np.zeros(len(table.names)))


def _all_sizes(table: LossTable) -> Array:
    return np.full(len(table.names), table.trained.sum())


METHODS: dict[str, Forecaster] = {
    "blend": _blend,
    "lensllm": _law("rectified"),  # F is free where there is no Θ, as D_l is
    "rectified": _law("rectified"),
    "power": _law("power"),
    "ats": _ats,
    "subtuning": _subtuning,
    "zeroshot": _zeroshot,
    "modelsize": _modelsize,
    "nlpmetrics": _nlpmetrics,
}
