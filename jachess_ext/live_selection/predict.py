"""From the records of runs to every method's predictions; F(Θ, t) measured where Eq. 10 asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..scaling.arrays import Array
from ..scaling.fitted import FittedLaw
from ..scaling.fitting import fit
from ..scaling.methods import METHODS, Forecast, Settings, forecast_of
from ..scaling.predictive import Student
from ..scaling.registry import FEATURES, REGISTRY
from ..scaling.table import LossTable
from .measure import flow_rate
from .records import Kernel, RunRecord, merged
from .result import Prediction
from .scores import LOSS


@dataclass(frozen=True)
class Curve:
    """The finished runs of one model, one record a size (see `records.merged`).

    Attributes:
        records: with losses, sizes ascending; 0 first where it was run.
        kernels: one a record, None where none was measured.
        rank_by: the score the selection ranks by.
    """

    records: tuple[RunRecord, ...]
    kernels: tuple[Kernel | None, ...]
    rank_by: str = LOSS

    @property
    def model(self) -> str:
        """As given."""
        return self.records[0].model

    @property
    def sizes(self) -> Array:
        """D, [m]."""
        return np.array([record.size for record in self.records], dtype=np.float64)

    @property
    def losses(self) -> Array:
        """Dev losses, or what is forecast of another score (`scores.to_forecast`), [m]."""
        return np.array([record.to_rank_by(self.rank_by) for record in self.records])

    @property
    def has_zero(self) -> bool:
        """Whether the model was judged before fine-tuning."""
        return self.records[0].size == 0

    def up_to(self, size: float) -> Curve:
        """The same curve without larger sizes."""
        kept = sum(record.size <= size for record in self.records)
        return Curve(self.records[:kept], self.kernels[:kept], self.rank_by)


def make_curve(
    records: Sequence[RunRecord], kernel: Callable[[RunRecord], Kernel], rank_by: str = LOSS
) -> Curve:
    """The curve of one model's runs, those that failed left out; `kernel` reads a run's kernel."""
    by_size: dict[int, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.size):
        if record.error is None:
            by_size.setdefault(record.size, []).append(record)
    points = tuple(merged(runs, rank_by) for runs in by_size.values())
    kernels = tuple(None if point.kernel is None else kernel(point) for point in points)
    return Curve(points, kernels, rank_by)


def fit_measured(curve: Curve) -> FittedLaw:
    """Eq. 10 in its two phases, with F(Θ, t) of every size as measured, the size 0 included.

    r is that of the model before fine-tuning, Θ that of the model each run left, t its own.

    Times are in steps at the learning rate of the largest size.

    Raises:
        ValueError: fewer than three sizes above 0, or a run without a kernel.
    """
    kernels = [kernel for kernel in curve.kernels if kernel is not None]
    if len(kernels) < len(curve.records):
        raise ValueError(
            f"lensllm reads the kernel Θ of every run, and {curve.model} has runs without one; "
            "measure it with --probe 32"
        )
    last = curve.records[-1]
    return fit(
        curve.sizes,
        curve.losses,
        "lensllm",
        theta=[kernel.spectrum() for kernel in kernels],
        residual=[torch.from_numpy(kernel.residual) for kernel in kernels],
        t=[record.time * record.learning_rate / last.learning_rate for record in curve.records],
        lr=flow_rate(last, len(kernels[-1].labels)),
    )


def predict(
    curves: Sequence[Curve],
    target: float,
    method: str,
    *,
    level: float = 0.9,
    gamma: int = 3,
    tau: float = 5.0,
) -> tuple[Prediction, ...]:
    """Every model at the target, best first.

    A model's prediction comes from all its own sizes.  blend learns what curves share from all
    models that have these sizes, so that models that were stopped early stay comparable.

    Args:
        curves: one a model.
        target: training examples, above all sizes.
        method: one of `registry.LIVE`; lensllm is Eq. 10 with F measured.
        level: of the intervals.
        gamma, tau: of ats.

    Raises:
        ValueError: a curve has fewer sizes than the method needs.
    """
    each = _forecasts(curves, target, method, Settings(gamma, tau))
    score = np.array([one.score[0] for one in each])
    columns: dict[str, Array] = {}
    predicted = [one.predicted for one in each if one.predicted is not None]
    if len(predicted) == len(each):
        columns["predicted"] = np.concatenate(predicted)
    predictive = _joint([one.predictive for one in each])
    choosing = _joint([one.choosing for one in each])
    if predictive is not None and choosing is not None:
        with np.errstate(over="ignore"):
            low, high = np.exp(predictive.interval(level))
        columns |= {"low": low, "high": high, "prob_best": choosing.prob_lowest()}
    found = []
    for place in np.argsort(score, kind="stable"):
        figures = {n: float(column[place]) for n, column in columns.items()}
        finite = {n: figure for n, figure in figures.items() if np.isfinite(figure)}
        found.append(Prediction(curves[place].model, float(score[place]), **finite))
    return tuple(found)


def _forecasts(
    curves: Sequence[Curve], target: float, method: str, settings: Settings
) -> list[Forecast]:
    """A forecast of one row for every curve."""
    zero = all(curve.has_zero for curve in curves)
    needed = REGISTRY[method].fewest_sizes(zero=zero)
    for curve in curves:
        trained = int((curve.sizes > 0).sum())
        if trained < needed:
            raise ValueError(
                f"{method} needs {needed} sizes above 0 or more, and {curve.model} has {trained}"
            )
    if method in FEATURES:
        return [_frozen(curve, method) for curve in curves]
    if method == "lensllm":
        return [forecast_of(fit_measured(curve), target, np.zeros(1)) for curve in curves]
    made: dict[tuple[float, ...], tuple[list[str], Forecast]] = {}
    for curve in curves:
        key = tuple(curve.sizes)
        if key not in made:
            table = _table(curves, curve.sizes)
            made[key] = list(table.names), METHODS[method](table, target, settings)
    return [
        _row(found, names.index(curve.model))
        for curve in curves
        for names, found in [made[tuple(curve.sizes)]]
    ]


def _frozen(curve: Curve, method: str) -> Forecast:
    found = curve.records[0].features or {}
    if method not in found:
        raise ValueError(f"{method} reads frozen features, and none were scored: give --screen")
    return Forecast(np.array([-found[method]]), None, None, np.zeros(1))


def _table(curves: Sequence[Curve], sizes: Array) -> LossTable:
    """The losses at these sizes of all models that have them."""
    sharing = [curve for curve in curves if np.isin(sizes, curve.sizes).all()]
    return LossTable(
        tuple(curve.model for curve in sharing),
        sizes,
        np.stack([curve.losses[np.isin(curve.sizes, sizes)] for curve in sharing]),
        np.array([float(curve.records[0].parameters) for curve in sharing]),
    )


def _row(found: Forecast, place: int) -> Forecast:
    one = slice(place, place + 1)
    predictive, cautious = (
        None if of is None else Student(of.location[one], of.scale[one], of.dof[one])
        for of in (found.predictive, found.cautious)
    )
    predicted = None if found.predicted is None else found.predicted[one]
    return Forecast(found.score[one], predicted, predictive, found.trained[one], cautious)


def _joint(each: Sequence[Student | None]) -> Student | None:
    """All in one; None where one is missing."""
    whole = [one for one in each if one is not None]
    if len(whole) < len(each):
        return None
    names = ("location", "scale", "dof")
    return Student(*(np.concatenate([getattr(one, name) for one in whole]) for name in names))
