"""`select`: which model will be best at the target, from losses up to a budget.

Importing this imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .._io import require
from .._text import DASH, number, scientific, share
from .advice import TOLERANCE, NextRuns, expected_regret, survivor_count
from .history import History, Tables
from .loss_table import LossTable, Values
from .methods import DEFAULT, METHODS, Forecast, MethodSettings, forecast_up_to
from .predictive import Array, Index
from .selection_text import (
    advice_text,
    aligned,
    chance_note,
    compares_ratios,
    difference_text,
    measured_note,
    order_note,
    plot_selection,
)
from .sheets import Source, quote_all
from .table_error import TableError
from .tables import read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

T = TypeVar("T")
OPERATIONS = 6.0
"""Per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020)."""
OF_ALL = "of all in full"
"""The unit of costs that are shares of training all models in full."""


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
        metric: of the table's numbers, such as "accuracy"; see `read_table`.
        test_rows: examples that the metric was measured on; see `read_table`.
        classes: number of classes, C: models still at the level of guessing are named, and
            intervals widen, since no subset tells when a curve leaves it; None: no such level.
        history: earlier tables of some of these models (of other data, in any metric): csv paths
            and their like, folders of them, DataFrames or LossTables, one or a list.  Files and
            DataFrames have the metric of `table` unless they name another.  Models are matched by
            name, and scores and forecasts move by their results there; more with more tables.
        gamma, tau: ats (Algorithm 1): points accepted unseen, and the deviation that stops.
        tokens, epochs: tokens an example (1 where sizes are tokens) and passes over every subset,
            for FLOPs; tokens None: costs are shares of training all models in full.
        tolerance: largest expected regret of the shortlist: relative for a loss, absolute for a
            score.
        reading: other arguments of `read_table`.

    Raises:
        TableError: the table cannot be read or lacks what the method needs, or a table of the
            history cannot be read or holds runs of `table`.
        ValueError: an unknown method, a target not above the budget or so far that the method has
            no number for it, or too few sizes of every model.

    Examples:
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
        losses = read_table(table, metric=metric, test_rows=test_rows, **reading)
    except TableError as error:  # whose arguments would be taken for those of `select`
        taken = {"budget", "target", "method", "tokens", "epochs"} & error.options.keys()
        if not taken:
            raise
        text = f"{error.args[0]} (of {quote_all([*taken])} to read_table, and what it returns here)"
        raise TableError(text, **error.options) from None
    if budget is None:
        below = losses.trained[losses.trained < target]
        if not len(below):
            raise TableError(f"the table has no size below the target {target:g}")
        budget = float(below[-1])
    target, settings = float(target), MethodSettings(method, gamma, tau)
    read, forecast, unranked = forecast_up_to(losses, budget, target, settings, classes)
    ranked = losses.rows(np.flatnonzero([name not in unranked for name in losses.names]))
    earlier = History.read(history, losses.metric)
    forecast, history_note = earlier.adjust(forecast, read, ranked, target, settings)
    n = np.full(len(read.names), np.nan) if read.parameters is None else read.parameters
    example = OPERATIONS * np.where(n > 0, n, np.nan) * (tokens or 1) * epochs
    # Shown beside the forecasts, and of no influence on them: `read` ends at the budget.
    measured = ranked.losses[:, losses.sizes == target].reshape(-1)
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
        history_note=history_note,
    )


@dataclass(frozen=True, repr=False)
class Selection:
    """A ranking of candidates by a method, from losses up to a budget.

    Attributes:
        method: its name.
        budget: the largest size used.
        target: the size predicted for.
        table: the losses that were read.
        forecast: the method's scores and forecasts of them.
        costs: operations spent on each candidate (6 N D an epoch), [n], with one token an example
            where `tokens` is None; NaN where the number of parameters is unknown.
        full_costs: operations of training each on the target's data once (FullTuning), [n].
        unranked: the models that have too few sizes for the method, each with a sentence.
        unit: of the costs as they are shown; "" where it is unknown; `OF_ALL`: as shares.
        measured: losses at the target that the table holds, [n], NaN where it has none, or None;
            they were not read.
        classes: number of classes, or None; see `select`.
        tolerance: of `shortlist`, see `select`.
        history_note: a sentence on what the earlier tables changed; "" without any.

    Examples:
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
    history_note: str = ""

    def __repr__(self) -> str:
        return self.text()

    def text(self, level: float = 0.9) -> str:
        """Return the ranking with intervals of a level, the advice, the notes, and the unranked."""
        head = (
            f"{self.method}: {len(self.names)} models, sizes up to {self.budget:,.0f}, "
            f"{100 * self.share:.3g} % of the target {self.target:,.0f}"
        )
        lines = [head, *aligned(self.cells(level)), self.advice, *self.notes]
        return "\n".join([*lines, *self.unranked.values()])

    def cells(self, level: float = 0.9) -> list[list[str]]:
        """Return the ranking as text: a row of column names, then a row a model, best first."""
        order, ranks = self._order, range(1, 1 + len(self.names))
        columns = [["", *map(str, ranks)], ["model", *self.ranking]]
        if self.has_intervals:
            columns.append(["P(best)", *map(share, self.best_probabilities[order])])
        if self.forecast.predicted is not None:
            predicted = self.table.to_metric(self.predicted_losses[order])
            columns.append([self.table.label, *map(number, predicted)])
        else:
            columns.append(["score", *map(number, self.scores[order])])
        if self.has_intervals:
            ends = zip(*(end[order] for end in self._metric_interval(level)), strict=True)
            intervals = [" … ".join(map(number, pair)) for pair in ends]
            columns.append([f"{100 * level:g} % interval", *intervals])
        if self.measured is not None:
            measured = self.table.to_metric(self.measured[order])
            columns.append(["measured", *map(number, measured)])
        if np.isfinite(self.costs).any():
            columns.append([self.unit or "cost", *map(self._cost_number, self.costs[order])])
        return list(map(list, zip(*columns, strict=True)))

    @property
    def notes(self) -> list[str]:
        """Sentences on a history, an order that is not the forecasts', losses at the target."""
        predicted, measured = self.forecast.predicted, self.measured
        notes = [
            self.history_note,
            "" if predicted is None else order_note(self.table, self.scores, predicted),
            chance_note(self.table, self.classes),
            "" if measured is None else measured_note(self.table, measured),
        ]
        return list(filter(None, notes))

    @property
    def advice(self) -> str:
        """The fewest models to train in full, the expected regret, and the next runs, in words."""
        if not self.has_intervals:
            return f"{self.method} gives no probabilities here; it says nothing of what is out."
        *regrets, tolerance = (
            difference_text(self.table.metric, x) for x in (*self.expected_regret, self.tolerance)
        )
        shortlist, price = self.shortlist, self._price(self.shortlist)
        return advice_text(shortlist, len(self.names), regrets, tolerance, price, self.next_runs)

    def _price(self, names: Sequence[str], size: float | None = None) -> float:
        """Return what runs of models on a size (the target) cost, as a share of all in full."""
        total = float(self.full_costs.sum())
        costs = sum(float(self.full_costs[self.names.index(name)]) for name in names)
        return costs / total * (size or self.target) / self.target if total > 0 else math.nan

    @cached_property
    def expected_regret(self) -> Array:
        """Expected excess loss of the best of the ranking's first k over the best of all, [n].

        For k = 1 … n: the expected difference of ln L; of L for a score (L is 1 − score) and for a
        perplexity (L is its logarithm).

        Raises:
            ValueError: the method gives no distribution.
        """
        mixture = self._distribution(self.forecast.mixture)
        ratio = compares_ratios(self.table.metric)
        regret = expected_regret(mixture, self._order, ratio=ratio)
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
    def survivors(self) -> list[str]:
        """The first models of the ranking, which are worth a further run: see `survivor_count`.

        The better half of it, where the method gives no probabilities.
        """
        count = (len(self.names) + 1) // 2
        if self.has_intervals:
            count = survivor_count(self.best_probabilities[self._order])
        return self.ranking[:count]

    @property
    def next_runs(self) -> NextRuns | None:
        """The models worth a run on twice the largest size; None: it is above half the target."""
        size = 2 * self.budget
        if size > self.target / 2:
            return None
        names = self.survivors
        return NextRuns(tuple(names), size, self._price(names, size))

    def in_unit(self, flops: Values) -> Values:
        """Return costs in `unit`."""
        return flops / self.full_costs.sum() if self.unit == OF_ALL else flops

    def _cost_number(self, flops: float) -> str:
        """Return a cost in `unit` without it: 1.23 × 10¹⁵, 17 %."""
        cost = self.in_unit(flops)
        if not math.isfinite(cost):
            return DASH
        return share(cost) if self.unit == OF_ALL else scientific(cost)

    def cost_text(self, flops: float) -> str:
        """Return a cost in words: 1.23 × 10¹⁵ FLOPs, 17 % of all."""
        cost = self._cost_number(flops)
        return cost if cost == DASH else f"{cost} {self.unit}".rstrip()

    @property
    def names(self) -> tuple[str, ...]:
        """The models in the table's order, [n]."""
        return self.table.names

    @property
    def scores(self) -> Array:
        """Ranking scores, lower is better, [n] in the table's order.

        These are the predicted losses of a method that predicts any, except "blend", which shrinks
        the differences between its forecasts towards those between the last losses, as far as that
        would have helped at the table's smaller sizes.
        """
        return self.forecast.score

    @property
    def ranking(self) -> list[str]:
        """Names, best first; ties in the table's order."""
        return [self.names[row] for row in self._order]

    @property
    def _order(self) -> Index:
        return np.argsort(self.scores, kind="stable")

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
        """Return the prediction intervals of the losses measured at the target size.

        Returns:
            Lower and upper ends, [n] in the table's order; an upper end may be infinite.

        Raises:
            ValueError: a bad level, or a method without a distribution (see `has_intervals`).
        """
        return self._distribution(self.forecast.predictive).exp_interval(level)

    @property
    def has_intervals(self) -> bool:
        """Whether there is a distribution; if not, intervals and probabilities raise ValueError."""
        return self.forecast.predictive is not None

    @cached_property
    def best_probabilities(self) -> Array:
        """Probability of having the lowest loss at the target, [n] in the table's order.

        Errors that all models share widen `interval_ends` and do not count here; the idiosyncratic
        errors have one standard deviation for all (`predictive.Mixture`), so that the first of the
        ranking has the largest probability.

        Raises:
            ValueError: the method gives no distribution.
        """
        chances = self._distribution(self.forecast.mixture).prob_best()
        chances.setflags(write=False)
        return chances

    @property
    def flops(self) -> float:
        """Operations spent on all candidates for this ranking.

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

    def _metric_interval(self, level: float) -> tuple[Array, Array]:
        """Return `interval_ends` as values of the metric, the lower first."""
        ends = [self.table.to_metric(end) for end in self.interval_ends(level)]
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
        low, high = self._metric_interval(level) if self.has_intervals else (missing, missing)
        pandas = require("pandas")
        frame = pandas.DataFrame(
            {
                "name": self.names,
                "score": self.scores,
                "predicted": missing if predicted is None else self.table.to_metric(predicted),
                "low": low,
                "high": high,
                "prob_best": self.best_probabilities if self.has_intervals else missing,
                **(
                    {}
                    if self.measured is None
                    else {"measured": self.table.to_metric(self.measured)}
                ),
                "cost": self.in_unit(self.costs),
                "full_cost": self.in_unit(self.full_costs),
            }
        ).iloc[self._order]
        frame.insert(0, "rank", np.arange(1, len(frame) + 1))
        if self.unranked:
            unranked = pandas.DataFrame(self.unranked.items(), columns=["name", "reason"])
            frame = pandas.concat([frame, unranked]).astype({"rank": "Int64"})
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
        _ = self.predicted_losses  # raises where there are none
        title = f"{self.method}, best first"
        return plot_selection(ax, self.table, self.to_frame(level), self.target, title)

    def _distribution(self, distribution: T | None) -> T:
        if distribution is None:
            text = f"{self.method} gives no distribution here, of intervals and probabilities"
            raise ValueError(f"{text}; {DEFAULT} does, and laws with more sizes than parameters")
        return distribution
