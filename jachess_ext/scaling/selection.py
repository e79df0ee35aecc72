"""`select`: which model will be best at the target, from losses up to a budget; all its methods.

Importing this imports no torch: the command line's choices come from `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from .._io import axes_or_new, require
from .._text import DASH, number, scientific, share
from .advice import TOLERANCE, Rung, expected_regret, staying
from .baselines import accept_then_stop
from .blend import FEWEST_SIZES, Outlook, forecast_ahead, forecasts
from .fitting import FittedLaw, fit
from .history import History, How, Logs, Tables
from .predictive import Array, Index, Student, Worlds, check_level, width_of_differences
from .runs import LossTable, TableError, Values, from_forecast, guessing, higher_is_better
from .sheets import Source, listed
from .tables import read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

T = TypeVar("T")

DEFAULT = "blend"
"""The method where none is named."""
OPERATIONS = 6.0
"""Per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020)."""
OF_ALL = "of all in full"
"""The unit of costs that are shares of training all models in full."""
_NEAR = 0.02  # of ln L: so near to the level of guessing is at it, where no noise is known
_LATE = 0.15  # of ln L, per doubling and nat of ln C; chosen by benchmarks.live_selection


@dataclass(frozen=True)
class Forecast:
    """A method's scores and forecasts, a row for each model.

    Attributes:
        score: what to choose by, lower is better, [n]; of "blend" not the forecast itself.
        trained: examples every model was trained on for this, over all its runs, [n].
        predictive: the distribution of ln L at the target, or None.
        fall: how far ln L falls to the target by each model's own curve, [n]; None without a
            distribution.
        deviation, trust: of "blend", [n]: the width of what its Gaussian process forecasts, and how
            probable it is that the process describes this table.
        is_loss: whether the score is a loss at the target.
        worlds: the distributions without the errors that all models share, which P(best) is of; set
            once all models are known.
    """

    score: Array
    trained: Array
    predictive: Student | None = None
    fall: Array | None = None
    deviation: Array | None = None
    trust: Array | None = None
    is_loss: bool = True
    worlds: Worlds | None = None

    @property
    def predicted(self) -> Array | None:
        """The loss at the target, [n]; None where the method predicts none."""
        if self.predictive is not None:
            return np.exp(self.predictive.location)
        return self.score if self.is_loss else None

    def rows(self, places: Index) -> Forecast:
        """Return the forecasts of the models at these rows."""
        optional = (self.fall, self.deviation, self.trust)
        fall, deviation, trust = (None if part is None else part[places] for part in optional)
        return replace(
            self,
            score=self.score[places],
            trained=self.trained[places],
            predictive=self.predictive and self.predictive.rows(places),
            fall=fall,
            deviation=deviation,
            trust=trust,
        )


# Methods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to choose among models.

    Attributes:
        forecast: (losses up to the budget, target, Algorithm 1's γ and τ) -> its forecast.
        needs: what it reads: "losses" of fine-tuned models, "zero" (losses before fine-tuning) or
            "parameters" (numbers of them).
        trains: the subsets every model is fine-tuned on for it: "all" up to the budget, the "last"
            alone, those a "walk" down from the budget visits, or "none".
        points: losses of a model it needs, the loss before fine-tuning counted where it
            `reads_zero`.
        reads_zero: whether the loss before fine-tuning is read where it is known.
    """

    forecast: Callable[[LossTable, float, int, float], Forecast]
    needs: Literal["losses", "zero", "parameters"]
    trains: Literal["all", "last", "walk", "none"]
    points: int = 0
    reads_zero: bool = False

    def fewest_sizes(self, *, zero: bool) -> int:
        """Return how many subsets it needs, where the loss before fine-tuning is known (or not)."""
        return self.points - (zero and self.reads_zero)


def _blend(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
    (outlook,) = forecasts(table.trained, table.trained_losses, [target])
    return _of_outlook(outlook, _all_sizes(table))


def _of_outlook(outlook: Outlook, trained: Array) -> Forecast:
    parts = (outlook.predictive, outlook.fall, outlook.deviation, outlook.trust)
    return Forecast(np.exp(outlook.choice), trained, *parts)


def _rectified(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
    return _of_law(table, target, fit(table.sizes, table.losses, "rectified"))


def _power(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
    return _of_law(table, target, fit(table.trained, table.trained_losses, "power"))


def _of_law(table: LossTable, target: float, fitted: FittedLaw) -> Forecast:
    """Forecast by a fitted law; without a width where it has as many parameters as sizes."""
    predicted = np.atleast_1d(fitted.predict(target))
    predictive = fitted.predictive(target) if fitted.has_width else None
    fall = np.log(table.trained_losses[:, -1] / predicted)
    return Forecast(predicted, _all_sizes(table), predictive, fall)


def _ats(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
    """Halve the budget until a point leaves the line (Algorithm 1); continue the line."""
    sizes, losses = table.trained, table.trained_losses
    forecast = _of_law(table, target, fit(sizes, losses, "ats", gamma=gamma, tau=tau))
    visited = accept_then_stop(np.log(sizes), np.log(losses), gamma, tau).visited
    last = np.arange(len(sizes)) >= len(sizes) - visited[:, None]
    return replace(forecast, trained=(last * sizes).sum(-1))


def _subtuning(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
    loss = table.trained_losses[:, -1]
    return Forecast(loss, np.full(len(loss), table.trained[-1]))


def _zeroshot(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
    if table.sizes[0] != 0:
        raise TableError("zeroshot needs a column 0, the losses before fine-tuning")
    return Forecast(table.losses[:, 0], np.zeros(len(table.names)))


def _modelsize(table: LossTable, target: float, gamma: int, tau: float) -> Forecast:
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


def too_few(table: LossTable, method: str) -> dict[str, str]:
    """Return the models that have fewer sizes than a method needs, each with a sentence."""
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


def forecast_each(
    table: LossTable,
    target: float,
    method: str,
    gamma: int = 3,
    tau: float = 5.0,
    classes: int | None = None,
) -> Forecast:
    """Forecast every model from its own sizes, where losses of some are missing (NaN).

    blend learns what curves share from all models that have a model's sizes, so that models that
    were stopped early stay comparable.  With `classes`, C, intervals widen: a classifier stays at
    ln C until it learns anything, then falls fast, and when that is no subset tells.

    Raises:
        ValueError: a model has fewer sizes than the method needs.
    """
    present = np.isfinite(table.losses)
    if reasons := too_few(table, method):
        raise ValueError(next(iter(reasons.values())))
    # One forecast for each set of sizes.  The models with just these sizes are forecast together
    # with those that have them and more, cut to the same sizes, and only the former are kept.
    parts, places = [], []
    for pattern in np.unique(present, axis=0):
        rows = np.flatnonzero((present == pattern).all(1))
        group = np.flatnonzero(present[:, pattern].all(1))
        chosen = table.rows(group)
        shared = replace(chosen, sizes=table.sizes[pattern], losses=chosen.losses[:, pattern])
        alone = method == "blend" and len(group) == 1
        ahead = _blend_ahead(table, int(rows[0]), target) if alone else None
        forecast = ahead or METHODS[method].forecast(shared, target, gamma, tau)
        parts.append(forecast.rows(np.searchsorted(group, rows)))
        places.append(rows)
    forecast = joined(parts).rows(np.argsort(np.concatenate(places)))
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
    predictive = forecast.predictive.widened(table.last_noise)
    last = np.where(present, table.sizes, 0.0).max(1)
    doublings = np.log2(target / last) if last.all() else np.ones(len(last))
    widths, weights = [width_of_differences(predictive.scale, forecast.fall)], [1.0]
    if forecast.deviation is not None and forecast.trust is not None:
        trust = float(forecast.trust.mean())
        widths.append(float(np.median(np.hypot(forecast.deviation, table.last_noise))))
        weights = [1 - trust, trust]
    location = np.log(forecast.score)
    worlds = Worlds.around(location, np.array(widths), np.array(weights), doublings)
    if classes is not None:
        predictive = predictive.widened(_LATE * math.log(classes) * doublings)
    return replace(forecast, predictive=predictive, worlds=worlds)


def _blend_ahead(table: LossTable, row: int, target: float) -> Forecast | None:
    """Forecast a model that was run on larger sizes than all others; None: it was not.

    Only the largest of them is read: those below the smallest number of sizes that must be left
    out for another model to have the rest.
    """
    present = np.isfinite(table.losses) & (table.sizes > 0)
    places = np.flatnonzero(present[row])
    for count in range(len(places) - 1, FEWEST_SIZES - 1, -1):
        shared = places[:count]
        group = np.flatnonzero(present[:, shared].all(1))
        if len(group) > 1:
            break
    else:
        return None
    size, loss = table.sizes[places[-1]], table.losses[row, places[-1]]
    losses, place = table.losses[np.ix_(group, shared)], int(np.searchsorted(group, row))
    outlook = forecast_ahead(table.sizes[shared], losses, place, (size, loss), target)
    return _of_outlook(outlook, np.array([table.sizes[places].sum()]))


def joined(parts: Sequence[Forecast]) -> Forecast:
    """Return the forecasts of several groups of models as one; what a group lacks, all lack."""
    students = [part.predictive for part in parts if part.predictive is not None]
    fields = zip(*((part.location, part.scale, part.dof) for part in students), strict=True)
    return Forecast(
        score=np.concatenate([part.score for part in parts]),
        trained=np.concatenate([part.trained for part in parts]),
        predictive=Student(*map(np.concatenate, fields)) if len(students) == len(parts) else None,
        fall=_together([part.fall for part in parts]),
        deviation=_together([part.deviation for part in parts]),
        trust=_together([part.trust for part in parts]),
        is_loss=parts[0].is_loss,
    )


def _together(columns: Sequence[Array | None]) -> Array | None:
    arrays = [column for column in columns if column is not None]
    return np.concatenate(arrays) if len(arrays) == len(columns) else None


def ranked_up_to(
    whole: LossTable, budget: float, target: float, how: How, classes: int | None = None
) -> tuple[LossTable, Forecast, dict[str, str]]:
    """Forecast the models that have sizes enough up to a budget.

    Args:
        whole: losses.
        budget, target: the largest size read, and the one predicted for.
        how: a method, and Algorithm 1's γ and τ.
        classes: see `forecast_each`.

    Returns:
        The losses that were read, the forecasts, and who has too few sizes, see `too_few`.

    Raises:
        ValueError: too few sizes of every model, or as `forecast_each`.
    """
    read = whole.up_to(budget)
    unranked = too_few(read, how[0])
    if len(unranked) == len(read.names):
        raise ValueError(next(iter(unranked.values())))
    read = read.rows(np.flatnonzero([name not in unranked for name in read.names]))
    return read, forecast_each(read, target, *how, classes), unranked


def with_history(
    forecast: Forecast, read: LossTable, whole: LossTable, target: float, how: How, history: History
) -> tuple[Forecast, str]:
    """Move forecasts by what the models did on earlier tables, see `History.shift`.

    Args:
        forecast: of the models of `read`; one that predicts no loss stays what it is.
        read: losses up to the budget.
        whole: of the same models, also above it.
        target: the size predicted for.
        how: what forecast them.
        history: the earlier tables.

    Returns:
        The forecasts, and a sentence on what moved, "" without tables.

    Raises:
        TableError: a table of the history holds runs of this one.
    """
    if not history.tables:
        return forecast, ""
    if not forecast.is_loss:
        return forecast, f"History: {how[0]} predicts no loss; nothing moved."
    share = float(read.sizes[-1]) / target
    shift, text = history.shift(
        (read.names, _logs(read, forecast)), whole, share, how, _ranked_logs
    )
    moved = replace(forecast, score=forecast.score * np.exp(shift))
    if forecast.predictive is None or forecast.worlds is None:
        return moved, text
    predictive, *accounts = (
        replace(student, location=student.location + shift)
        for student in (forecast.predictive, *forecast.worlds.accounts)
    )
    worlds = replace(forecast.worlds, accounts=tuple(accounts))
    return replace(moved, predictive=predictive, worlds=worlds), text


def _logs(read: LossTable, forecast: Forecast) -> Array:
    predicted = cast(Array, forecast.predicted)
    return np.log(np.stack([forecast.score, predicted, read.last_losses], -1))


def _ranked_logs(table: LossTable, budget: float, target: float, how: How) -> Logs:
    read, forecast, _ = ranked_up_to(table, budget, target, how)
    return read.names, _logs(read, forecast)


# The choice -------------------------------------------------------------------------------------


def select(
    table: Source | LossTable,
    budget: float | None = None,
    target: float | None = None,
    method: str = DEFAULT,
    *,
    metric: str | None = None,
    test_rows: int | None = None,
    classes: int | None = None,
    history: Tables | Sequence[Tables] = (),
    gamma: int = 3,
    tau: float = 5.0,
    tokens: float | None = None,
    epochs: float = 1.0,
    tolerance: float = TOLERANCE,
    **reading: Any,
) -> Selection:
    """Rank models by the loss they will have at the target.

    Only losses at sizes up to the budget are read.  A model is forecast from its own sizes; one
    that has too few for the method is not ranked but listed in `unranked`.

    Args:
        table: csv path, pandas DataFrame or `LossTable` of losses or scores; see `read_table`.
        budget: training examples a model may be trained on, up to the table's largest size; None:
            the largest size below the target.
        target: training examples to predict for, above the budget.
        method: a name of `METHODS`.  lensllm and rectified read a column 0 where there is one, and
            zeroshot needs it; modelsize needs the column `size`.
        metric, test_rows: what the table's numbers are, such as "accuracy", and the examples it was
            measured on; see `read_table`.
        classes: that are told apart, C: models still at the level of guessing are named, and
            intervals widen, since no subset tells when a curve leaves it; None: no such level.
        history: earlier tables of some of these models (of other data, in any metric): csv paths
            and their like, folders of them, DataFrames or LossTables, one or a list.  Files and
            DataFrames are read as the metric of `table` unless they tell theirs.  Models are
            matched by name, and scores and forecasts move by what they did there: the more, the
            more tables there are.
        gamma, tau: ats (Algorithm 1): points accepted unseen, and the deviation that stops.
        tokens, epochs: tokens an example (1 where sizes are tokens) and passes over every subset,
            for FLOPs; tokens None: costs are shares of training all models in full.
        tolerance: how far from the best the advice may be expected to end: a share of a loss, and
            of a score's best, 1.
        reading: other arguments of `read_table`.

    Raises:
        TableError: the table, or what of it the method needs, cannot be used; so of the history,
            or it holds runs of `table`.
        ValueError: an unknown method, a target not above the budget or so far that the method has
            no number for it, or too few sizes of every model.

    Example:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> sizes = [100, 200, 400, 800]
        >>> losses = {"a": [2.0, 1.6, 1.3, 1.1], "b": [1.9, 1.7, 1.55, 1.45]}
        >>> frame = pd.DataFrame.from_dict(losses, orient="index", columns=sizes)
        >>> jx.scaling.select(frame, budget=800, target=12_800).ranking
        ['a', 'b']
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
    if target is None:
        raise ValueError("target is missing; expected the training examples to predict for")
    numbers = {"budget": budget, "target": target, "tokens": tokens, "epochs": epochs}
    numbers["tolerance"] = tolerance
    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}; expected a positive number")
    if classes is not None and classes < 2:
        raise ValueError(f"classes is {classes}; expected 2 or more")
    if budget is not None and target <= budget:
        raise ValueError(f"the target {target:g} is not above the budget {budget:g}")
    try:
        whole = read_table(table, metric=metric, test_rows=test_rows, **reading)
    except TableError as error:  # of columns with the names of arguments that mean others here
        taken = {"budget", "target", "method", "tokens", "epochs"} & error.options.keys()
        if not taken:
            raise
        text = f"{error.args[0]} (of {listed([*taken])} to read_table, and what it returns here)"
        raise TableError(text, **error.options) from None
    if budget is None:
        below = whole.trained[whole.trained < target]
        if not len(below):
            raise TableError(f"the table has no size below the target {target:g}")
        budget = float(below[-1])
    target, how = float(target), (method, gamma, tau)
    read, forecast, unranked = ranked_up_to(whole, budget, target, how, classes)
    ranked = whole.rows(np.flatnonzero([name not in unranked for name in whole.names]))
    earlier = History.read(history, whole.metric)
    forecast, moved = with_history(forecast, read, ranked, target, how, earlier)
    n = np.full(len(read.names), np.nan) if read.parameters is None else read.parameters
    example = OPERATIONS * np.where(n > 0, n, np.nan) * (tokens or 1) * epochs
    # Shown beside the forecasts, and of no influence on them: `read` ends at the budget.
    measured = ranked.losses[:, whole.sizes == target].reshape(-1)
    return Selection(
        method=method,
        budget=float(read.sizes[-1]),
        target=target,
        table=read,
        forecast=forecast,
        costs=example * forecast.trained,
        full_costs=example * target,
        unranked=unranked,
        unit=OF_ALL if tokens is None else "FLOPs",
        measured=measured if np.isfinite(measured).any() else None,
        classes=classes,
        tolerance=tolerance,
        moved=moved,
    )


@dataclass(frozen=True, repr=False)
class Selection:
    """Candidates as a method sees them from losses up to a budget.

    Attributes:
        method: its name.
        budget: the largest size used.
        target: the size predicted for.
        table: the losses that were read.
        forecast: the method's scores and forecasts of them.
        costs: operations spent on each candidate for this (6 N D an epoch), [n]; of one token an
            example where tokens were not told; NaN where the number of parameters is not known.
        full_costs: operations of training each on the target's data once (FullTuning), [n].
        unranked: the models that have too few sizes for the method, each with a sentence.
        unit: what `costs` are told in; "" where that is not known; `OF_ALL`: they are shown as
            shares.
        measured: losses at the target that the table holds, [n], NaN where it has none, or None;
            they were not read.
        classes: that are told apart, or None; see `select`.
        tolerance: of `shortlist`, see `select`.
        moved: what a history moved, a sentence; "" without one.

    Example:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> losses = {"a": [2.0, 1.6, 1.3, 1.1], "b": [1.9, 1.7, 1.55, 1.45]}
        >>> frame = pd.DataFrame.from_dict(losses, orient="index", columns=[100, 200, 400, 800])
        >>> selection = jx.scaling.select(frame, budget=800, target=12_800)
        >>> selection
        blend: 2 models, sizes up to 800, 6.25 % of the target 12,800
           model  P(best)    loss    90 % interval
        1  a         95 %  0.6686  0.4573 … 0.9776
        2  b          5 %   1.072   0.7798 … 1.475
        a is expected within 0.1 % of the best: no further run is needed.
        >>> selection.names, [float(score) for score in selection.scores.round(2)]
        (('a', 'b'), [0.64, 1.12])
    """

    method: str
    budget: float
    target: float
    table: LossTable
    forecast: Forecast
    costs: Array
    full_costs: Array
    unranked: Mapping[str, str] = field(default_factory=dict)
    unit: str = "FLOPs"
    measured: Array | None = None
    classes: int | None = None
    tolerance: float = TOLERANCE
    moved: str = ""

    def __repr__(self) -> str:
        return self.text()

    def text(self, level: float = 0.9) -> str:
        """Return the ranking as a table with intervals of a level, the advice, who is unranked."""
        rows = ranking_rows(self, level)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        align = [str.rjust, str.ljust, *[str.rjust] * (len(widths) - 2)]  # models to the left
        lines = []
        for row in rows:
            cells = [f(cell, width) for f, cell, width in zip(align, row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        head = (
            f"{self.method}: {len(self.names)} models, sizes up to {self.budget:,.0f}, "
            f"{100 * self.share:.3g} % of the target {self.target:,.0f}"
        )
        return "\n".join([head, *lines, self.advice, *self.notes, *self.unranked.values()])

    @property
    def notes(self) -> list[str]:
        """Sentences on a history, an order that is not the forecasts', losses at the target."""
        notes, measured = [self.moved] if self.moved else [], self.measured
        if self.forecast.predicted is not None:
            places = np.argsort(self.scores, kind="stable")
            forecasts = self.forecast.predicted[places]
            lowest = np.minimum.accumulate(forecasts[::-1])[::-1]
            if (late := forecasts > 1.001 * lowest).any():  # by what can be seen
                first = int(late.argmax())
                rows = places[[first, first + int(forecasts[first:].argmin())]]
                notes.append(self._why_ahead(rows))
        if self.classes is not None and (level := guessing(self.table.metric, self.classes)):
            near = level * np.exp(-np.maximum(2 * self.table.last_noise, _NEAR))
            names = [self.names[place] for place in np.flatnonzero(self.table.last_losses >= near)]
            if names:
                text = f"Still at the level of guessing, {number(float(self.table.shown(level)))}"
                notes.append(f"{text}: {listed(names)}. Leads among such models may be noise.")
        if measured is not None:
            place = int(np.nanargmin(measured))
            notes.append(
                f"The table holds losses at the target, which were not read: {self.names[place]} "
                f"has the best, {number(float(self.table.shown(measured[place])))}."
            )
        return notes

    def _why_ahead(self, rows: Index) -> str:
        """Return why the first of two models comes before one whose forecast is better."""
        losses = self.table.losses[rows]
        common = np.flatnonzero(np.isfinite(losses).all(0) & (self.table.sizes > 0))
        ahead, behind = (self.names[row] for row in rows)
        worse = self._distance(*self.predicted_losses[rows])
        text = f"{ahead} is ahead of {behind} though its forecast is {self.stake_text(worse)} worse"
        if not len(common) or (lead := self._distance(*losses[::-1, common[-1]])) <= 0:
            return f"{text}."
        text = f"{text}: it leads by {self.stake_text(lead)} at {self.table.sizes[common[-1]]:,.0f}"
        return f"{text}, and last losses count as far as this table's own past speaks for them."

    def _distance(self, high: float, low: float) -> float:
        """Return how far a loss is above another, as `stake_text` takes it."""
        return math.log(high / low) if self._by_ratio else float(high - low)

    @property
    def _by_ratio(self) -> bool:
        """Whether losses are compared by their ratio: neither scores nor logarithms are."""
        metric = self.table.metric
        return metric is None or from_forecast(metric, 1.0) == 1.0

    def stake_text(self, stake: float) -> str:
        """Return a difference, as of `expected_regret`, in the metric's terms: 3 %, 2 points."""
        metric = self.table.metric
        is_score = metric is not None and higher_is_better(metric)
        with np.errstate(over="ignore"):
            text = share(max(stake if is_score else float(np.expm1(stake)), 0.001))
        points = "point" if text == "1 %" else "points"
        return text.replace("%", points) if is_score else text

    @property
    def advice(self) -> str:
        """The fewest models to train in full, what is at stake, and the next run, in words."""
        if not self.has_intervals:
            return f"{self.method} gives no probabilities here; it says nothing of what is out."
        names, n, rung = self.shortlist, len(self.names), self.next_rung
        within = [f"within {self.stake_text(stake)}" for stake in self.expected_regret]
        price = self._price(names)
        cost = "" if math.isnan(price) else f" costs {share(price)} of all {n}"
        if len(names) == 1:
            cost = cost and f" (training it{cost})"
            text = f"{names[0]} is expected {within[0]} of the best{cost}"
            return f"{text}: no further run is needed."
        text = f"The best of {_listed(names, n)} is expected {within[len(names) - 1]} of the best"
        text += f"; training these {len(names)} in full{cost or ' would tell'}"
        if len(names) == n:
            near = self.stake_text(self.tolerance)
            text = f"Only training all {n} in full is expected within {near} of the best"
        text += f". {names[0]} alone: {within[0]}."
        if rung is None:
            return text
        out = n - len(rung.names)
        others = f"; the other {out} {'is' if out == 1 else 'are'} out" if out else ""
        cost = "" if math.isnan(rung.price) else f" ({share(rung.price)} of training all in full)"
        return (
            f"{text} Before that, run {_listed(rung.names, n)} on {rung.size:,.0f}{cost}{others}."
        )

    def _price(self, names: Sequence[str], size: float | None = None) -> float:
        """Return what runs of models on a size (the target) cost, as a share of all in full."""
        total = float(self.full_costs.sum())
        part = sum(float(self.full_costs[self.names.index(name)]) for name in names)
        return part / total * (size or self.target) / self.target if total > 0 else math.nan

    @cached_property
    def expected_regret(self) -> Array:
        """What the best of the ranking's first k is expected to lose on the best of all, [n].

        For k = 1 … n: the expected difference of ln L; of L for a score (what is missing of 1) and
        for a perplexity (L is its logarithm).

        Raises:
            ValueError: the method gives no distribution.
        """
        order = np.argsort(self.scores, kind="stable")
        worlds = self._distribution(self.forecast.worlds)
        regret = expected_regret(worlds, order, ratio=self._by_ratio)
        regret.setflags(write=False)
        return regret

    @property
    def shortlist(self) -> list[str]:
        """The fewest first models whose best is expected within `tolerance` of the best of all.

        Raises:
            ValueError: the method gives no distribution.
        """
        near = self.expected_regret <= self.tolerance
        near[-1] = True  # nothing is lost by all, also where the distribution has no such mean
        return self.ranking[: 1 + int(near.argmax())]

    @property
    def going_on(self) -> list[str]:
        """The first of the ranking that are worth a further run, see `advice.staying`.

        The better half of it, where the method gives no probabilities.
        """
        count = (len(self.names) + 1) // 2
        if self.has_intervals:
            count = staying(self.best_probabilities[np.argsort(self.scores, kind="stable")])
        return self.ranking[:count]

    @property
    def next_rung(self) -> Rung | None:
        """The models worth a run on twice the largest size; None: it is above half the target."""
        size = 2 * self.budget
        if size > self.target / 2:
            return None
        names = self.going_on
        return Rung(tuple(names), size, self._price(names, size))

    def in_unit(self, flops: Values) -> Values:
        """Return costs in `unit`."""
        return flops / self.full_costs.sum() if self.unit == OF_ALL else flops

    def cost_number(self, flops: float) -> str:
        """Return a cost in `unit` without it: 1.23 × 10¹⁵, 17 %."""
        cost = self.in_unit(flops)
        if not math.isfinite(cost):
            return DASH
        return share(cost) if self.unit == OF_ALL else scientific(cost)

    def cost_text(self, flops: float) -> str:
        """Return a cost in words: 1.23 × 10¹⁵ FLOPs, 17 % of all."""
        cost = self.cost_number(flops)
        return cost if cost == DASH else f"{cost} {self.unit}".rstrip()

    @property
    def names(self) -> tuple[str, ...]:
        """The models in the table's order, [n]."""
        return self.table.names

    @property
    def scores(self) -> Array:
        """What the method ranks by, lower is better, [n] in the table's order.

        The predicted losses where it predicts any, but of "blend": between its forecasts the choice
        is made as far as the table's own past says that they are better than the last losses.
        """
        return self.forecast.score

    @property
    def ranking(self) -> list[str]:
        """Names, best first; ties in the table's order."""
        return [self.names[place] for place in np.argsort(self.scores, kind="stable")]

    @property
    def predicted_losses(self) -> Array:
        """Losses at the target, [n] in the table's order; see `to_frame`.

        subtuning and zeroshot predict that the loss stays what it is.

        Raises:
            ValueError: the method ranks without predicting a loss (modelsize).
        """
        if self.forecast.predicted is None:
            raise ValueError(f"{self.method} ranks models and predicts no loss; see .scores")
        return self.forecast.predicted

    def interval_ends(self, level: float = 0.9) -> tuple[Array, Array]:
        """Return where the loss measured at the target lies with probability `level`.

        Returns:
            Lower and upper ends, [n] in the table's order; an upper end may be infinite.

        Raises:
            ValueError: a bad level, or a method without a distribution (see `has_intervals`).
        """
        check_level(level)
        low, high = self._distribution(self.forecast.predictive).interval(level)
        with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
            return np.exp(low), np.exp(high)

    @property
    def has_intervals(self) -> bool:
        """Whether the method gives a distribution here; if not, the two below raise."""
        return self.forecast.predictive is not None

    @cached_property
    def best_probabilities(self) -> Array:
        """Probability of having the lowest loss at the target, [n] in the table's order.

        Of the differences between the forecasts: the errors that all models share count in
        `interval_ends` alone, and what is left has one width for all (`predictive.Worlds`), so
        that the first of the ranking has the largest probability.

        Raises:
            ValueError: the method gives no distribution.
        """
        chances = self._distribution(self.forecast.worlds).prob_best()
        chances.setflags(write=False)
        return chances

    @property
    def flops(self) -> float:
        """Operations spent on all candidates for this.

        Raises:
            TableError: the table does not tell the models' sizes.
        """
        return self._sum(np.where(self.forecast.trained == 0, 0.0, self.costs))

    @property
    def full_flops(self) -> float:
        """Operations of training every candidate on the target's data once (FullTuning).

        Raises:
            TableError: as `flops`.
        """
        return self._sum(self.full_costs)

    def _sum(self, costs: Array) -> float:
        if np.isnan(costs).any():
            self.table.known_parameters()  # says what is missing
        return float(costs.sum())

    @property
    def share(self) -> float:
        """Largest subset used, as a share of the target."""
        return self.budget / self.target

    def _shown_ends(self, level: float) -> tuple[Array, Array]:
        """Return `interval_ends` as the table was; what is the upper loss is the lower score."""
        ends = [self.table.shown(end) for end in self.interval_ends(level)]
        return np.minimum(*ends), np.maximum(*ends)

    def to_frame(self, level: float = 0.9) -> DataFrame:
        """Return a pandas DataFrame with a row for each candidate, best first.

        Columns: rank, name, score, predicted, low, high (of the interval with probability `level`),
        prob_best, cost, full_cost (in `unit`); NaN where there is none.  predicted, low and
        high are in the metric's own terms where the table has one; `measured`, what the table holds
        at the target, is there where it holds any.  Models that are not ranked come
        last, and a column `reason` says why.

        Raises:
            MissingExtra: pandas is not installed.
        """
        missing = np.full(len(self.names), np.nan)
        predicted = self.forecast.predicted
        low, high = self._shown_ends(level) if self.has_intervals else (missing, missing)
        pandas = require("pandas")
        frame = pandas.DataFrame(
            {
                "name": self.names,
                "score": self.scores,
                "predicted": missing if predicted is None else self.table.shown(predicted),
                "low": low,
                "high": high,
                "prob_best": self.best_probabilities if self.has_intervals else missing,
                **({} if self.measured is None else {"measured": self.table.shown(self.measured)}),
                "cost": self.in_unit(self.costs),
                "full_cost": self.in_unit(self.full_costs),
            }
        ).iloc[np.argsort(self.scores, kind="stable")]
        frame.insert(0, "rank", np.arange(1, len(frame) + 1))
        if self.unranked:
            others = pandas.DataFrame(self.unranked.items(), columns=["name", "reason"])
            frame = pandas.concat([frame, others]).astype({"rank": "Int64"})
        return frame.reset_index(drop=True)

    def plot(self, ax: Axes | None = None, level: float = 0.9) -> Axes:
        """Draw every candidate's losses over sizes, and its predicted loss with its interval.

        A score, whose best is 1, is drawn as such.  The predictions stand side by side around the
        target, and what was measured there as crosses.

        Args:
            ax: matplotlib axes to draw on; None: new axes.
            level: of the intervals.

        Returns:
            The axes.

        Raises:
            ValueError: the method predicts no loss.
            MissingExtra: matplotlib or pandas is not installed.
        """
        ax = axes_or_new(ax)
        table = self.table
        losses = dict(zip(self.names, table.shown(table.trained_losses), strict=True))
        predicted = dict(zip(self.names, table.shown(self.predicted_losses), strict=True))
        count = len(self.names)
        apart = min(1.06, 1.6 ** (1 / count))
        for place, row in enumerate(self.to_frame(level).head(count).itertuples()):
            (line,) = ax.plot(table.trained, losses[row.name], "o-", label=row.name)
            ends = [[predicted[row.name] - row.low], [row.high - predicted[row.name]]]
            drawn = ends if np.isfinite(ends).all() else None
            at, color = self.target * apart ** (place - (count - 1) / 2), line.get_color()
            ax.errorbar(at, predicted[row.name], drawn, fmt="D", color=color)
            if self.measured is not None:
                ax.plot(at, row.measured, "x", color=color)
        ax.set_xscale("log")
        if table.metric is None or not higher_is_better(table.metric):
            ax.set_yscale("log")
        ax.set_xlabel("training examples")
        ax.set_ylabel(table.label)
        ax.legend(title=f"{self.method}, best first")
        return ax

    def _distribution(self, distribution: T | None) -> T:
        if distribution is None:
            text = f"{self.method} gives no distribution here, of intervals and probabilities"
            raise ValueError(f"{text}; {DEFAULT} does, and laws with more sizes than parameters")
        return distribution


# ---- in words ----------------------------------------------------------

_NAMED = 4  # models, at most


def _listed(names: Sequence[str], models: int) -> str:
    """Return names in words: "A, B and C", of many how far they go in the ranking."""
    if len(names) > _NAMED:
        return f"all {models}" if len(names) == models else f"the first {len(names)}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def ranking_rows(selection: Selection, level: float = 0.9) -> list[list[str]]:
    """Return the cells of the ranking as text: a header, then the models, best first.

    Args:
        selection: by any method.
        level: of the intervals.
    """
    table = selection.table
    columns = [["", *map(str, range(1, 1 + len(selection.names)))], ["model", *selection.ranking]]
    order = np.argsort(selection.scores, kind="stable")
    if selection.has_intervals:
        columns.append(["P(best)", *map(share, selection.best_probabilities[order])])
    if selection.forecast.predicted is not None:
        shown = table.shown(selection.predicted_losses[order])
        columns.append([table.label, *map(number, shown)])
    else:
        columns.append(["score", *map(number, selection.scores[order])])
    if selection.has_intervals:
        ends = zip(*(end[order] for end in selection._shown_ends(level)), strict=True)
        intervals = [" … ".join(map(number, pair)) for pair in ends]
        columns.append([f"{100 * level:g} % interval", *intervals])
    if selection.measured is not None:
        columns.append(["measured", *map(number, table.shown(selection.measured[order]))])
    if np.isfinite(selection.costs).any():
        costs = map(selection.cost_number, selection.costs[order])
        columns.append([selection.unit or "cost", *costs])
    return list(map(list, zip(*columns, strict=True)))
