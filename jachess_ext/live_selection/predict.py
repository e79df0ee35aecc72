"""From the records of runs to every method's predictions; F(Θ, t) measured where Eq. 10 asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..scaling.arrays import Array
from ..scaling.bayes.forecast import SMALLEST
from ..scaling.fitted import FittedLaw
from ..scaling.fitting import fit
from ..scaling.laws import Law, MeasuredLens, Power, Rectified
from ..scaling.method_names import FROM_LOSSES
from ..scaling.methods import METHODS as TABLE_METHODS
from ..scaling.methods import Forecast, Settings
from ..scaling.predictive import Student
from ..scaling.table import LossTable
from .measure import flow_rate
from .records import Kernel, RunRecord
from .result import Prediction

METHODS = FROM_LOSSES
"""lensllm is Eq. 10 with F measured; with F free it is the rectified law."""

_LAWS: dict[str, Law | type[Law]] = {
    "lensllm": MeasuredLens,
    "rectified": Rectified(),
    "power": Power,
}
_FEWEST = {"bayes": SMALLEST, "ats": 2}  # of the others; 1 where a single loss is enough
_FEWEST_FOR_WIDTH = {"bayes": SMALLEST, "ats": 3}


def fewest_sizes(method: str, distribution: bool = False) -> int:
    """Subsets a method needs to predict, or for the distribution of its prediction.

    A law needs a point for every parameter, and one more for its noise; the size 0, which is always
    there, is a point of some.
    """
    if method in _LAWS:
        law = _LAWS[method]
        return len(law.parameters) - law.reads_zero + distribution
    return (_FEWEST_FOR_WIDTH if distribution else _FEWEST).get(method, 1)


def has_probabilities(method: str) -> bool:
    """Whether a method can give probabilities of being the best."""
    return method in _LAWS or method in _FEWEST_FOR_WIDTH


@dataclass(frozen=True)
class Curve:
    """The finished runs of one model.

    Attributes:
        records: with losses, sizes ascending, 0 first.
        kernels: one a record.
    """

    records: tuple[RunRecord, ...]
    kernels: tuple[Kernel, ...]

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
        """Dev losses, [m]."""
        return np.array([record.dev_loss for record in self.records], dtype=np.float64)


def make_curve(records: Sequence[RunRecord], kernel: Callable[[RunRecord], Kernel]) -> Curve:
    """The curve of one model's runs, those that failed left out; `kernel` reads a run's kernel."""
    whole = sorted((r for r in records if r.error is None), key=lambda record: record.size)
    return Curve(tuple(whole), tuple(kernel(record) for record in whole))


def fit_measured(curve: Curve) -> FittedLaw:
    """Eq. 10 in its two phases, with F(Θ, t) of every size as measured, the size 0 included.

    r is that of the model before fine-tuning, Θ that of the model each run left, t its own.

    Raises:
        ValueError: fewer than three sizes above 0.
    """
    return fit(
        curve.sizes,
        curve.losses,
        "lensllm",
        theta=[kernel.spectrum() for kernel in curve.kernels],
        residual=[torch.from_numpy(kernel.residual) for kernel in curve.kernels],
        t=[record.time for record in curve.records],
        lr=flow_rate(curve.records[-1], len(curve.kernels[-1].labels)),
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

    A model's prediction comes from all its own sizes.  bayes learns what curves share from all
    models that have these sizes, so that models that were stopped early stay comparable.

    Args:
        curves: one a model.
        target: training examples, above all sizes.
        method: one of `METHODS`.
        level: of the intervals.
        gamma, tau: of ats.

    Raises:
        ValueError: a curve has fewer sizes than the method needs.
    """
    each = _forecasts(curves, target, method, Settings(gamma, tau))
    score = np.array([found.score[0] for found in each])
    columns: dict[str, Array] = {}
    predicted = [found.predicted for found in each if found.predicted is not None]
    if len(predicted) == len(each):
        columns["predicted"] = np.concatenate(predicted)
    widths = [found.predictive for found in each if found.predictive is not None]
    if len(widths) == len(each):
        joint = _joint(widths)
        with np.errstate(over="ignore"):
            low, high = np.exp(joint.interval(level))
        columns |= {"low": low, "high": high, "prob_best": joint.prob_lowest()}
    return tuple(
        Prediction(
            curves[place].model,
            float(score[place]),
            **{
                name: float(column[place])
                for name, column in columns.items()
                if np.isfinite(column[place])
            },
        )
        for place in np.argsort(score, kind="stable")
    )


def _forecasts(
    curves: Sequence[Curve], target: float, method: str, settings: Settings
) -> list[Forecast]:
    """A forecast of one row for every curve."""
    needed = fewest_sizes(method)
    for curve in curves:
        trained = int((curve.sizes > 0).sum())
        if trained < needed:
            raise ValueError(
                f"{method} needs {needed} sizes above 0 or more, and {curve.model} has {trained}"
            )
    if method == "lensllm":
        return [_measured(curve, target) for curve in curves]
    made: dict[tuple[float, ...], tuple[list[str], Forecast]] = {}
    for curve in curves:
        key = tuple(curve.sizes)
        if key not in made:
            table = _table(curves, curve.sizes)
            made[key] = list(table.names), TABLE_METHODS[method](table, target, settings)
    return [
        _row(found, names.index(curve.model))
        for curve in curves
        for names, found in [made[tuple(curve.sizes)]]
    ]


def _measured(curve: Curve, target: float) -> Forecast:
    fitted = fit_measured(curve)
    predicted = np.atleast_1d(np.asarray(fitted.predict(target)))
    predictive = fitted.predictive(target) if fitted.has_width else None
    return Forecast(predicted, predicted, predictive, np.zeros(1))


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
    predictive = found.predictive
    if predictive is not None:
        predictive = Student(predictive.location[one], predictive.scale[one], predictive.dof[one])
    predicted = None if found.predicted is None else found.predicted[one]
    return Forecast(found.score[one], predicted, predictive, found.trained[one])


def _joint(each: Sequence[Student]) -> Student:
    return Student(
        np.concatenate([one.location for one in each]),
        np.concatenate([one.scale for one in each]),
        np.concatenate([one.dof for one in each]),
    )
