"""`select`: forecast which model will be best at a target size, from losses up to a budget.

This module must not import torch, so that the command line starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .._io import require
from .._text import number_text, percent
from .advice import TOLERANCE, expected_regret, survivor_count
from .constants import CONSTANTS
from .history import History, Tables
from .loss_table import LossTable
from .methods import DEFAULT, METHODS, Forecast, MethodSettings, forecast_up_to
from .predictive import Array, Index
from .selection_text import (
    align_rows,
    chance_note,
    compares_ratios,
    count_text,
    difference_text,
    measured_note,
    names_text,
    plot_selection,
)
from .sheets import Source, parse_size, quote_all
from .table_error import TableError
from .tables import read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

T = TypeVar("T")
_LARGEST_REGRET = 0.1
"""Expected regret above which it is not printed, as it says no more than that nothing is known."""
OPERATIONS = 6.0
"""FLOPs of training per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020)."""


def select(
    table: Source | LossTable,
    budget: float | str | None = None,
    target: float | str | None = None,
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
    """Rank models by their forecast loss at the target size.

    Only losses at sizes up to the budget are used.  A model is forecast from its own sizes; one
    with fewer sizes than the method needs is not ranked but listed in `unranked`.

    Args:
        table: csv path, pandas DataFrame or `LossTable` of losses or scores; see `read_table`.
        budget: largest number of training examples whose losses are used; None for the largest
            size below the target.
        target: number of training examples to predict for, above the budget; a text such as "1.6M"
            is read as in a table.
        method: a name in `METHODS`.  lensllm and rectified use the column 0 if there is one, and
            zeroshot needs it; modelsize needs numbers of parameters.
        metric: name of the metric of the table's values, such as "accuracy"; see `read_table`.
        test_rows: number of test examples of the metric; see `read_table`.
        classes: number of classes of a classification task: models still at the level of guessing
            are listed, and intervals are wider, as it is not known when a curve leaves that level.
            None for other tasks.
        history: earlier tables of some of the models, with other data and any metric: a table, a
            folder, a pair (table, metric) or a list of these, see `History.read`.  Models match
            by name, and forecasts are adjusted by their earlier results, see `History.adjust`.
        gamma, tau: settings of the method ats, see `fit`.
        tokens: tokens per example (1 if sizes are tokens), for `Selection.flops`; None for 1.
        epochs: passes over the training examples of every run.
        tolerance: largest expected regret of the shortlist: relative for a loss, absolute for a
            score.
        reading: other arguments of `read_table`.

    Raises:
        TableError: the table cannot be read or lacks data that the method needs, or a table of the
            history cannot be read or holds runs of `table`.
        ValueError: an unknown method, a missing target or one that is not above the budget, a
            target for which the forecast overflows, or no model with enough sizes.

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
    target = parse_size(target) if isinstance(target, str) else target
    budget = parse_size(budget) if isinstance(budget, str) else budget
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
        loss_table = read_table(table, metric=metric, test_rows=test_rows, **reading)
    except TableError as error:  # some suggested arguments have the name of one of `select`
        ambiguous = {"budget", "target", "method", "tokens", "epochs"} & error.options.keys()
        if not ambiguous:
            raise
        text = f"{error.args[0]} (pass {quote_all([*ambiguous])} to read_table, and its table here)"
        raise TableError(text, **error.options) from None
    if budget is None:
        sizes_below = loss_table.trained[loss_table.trained < target]
        if not len(sizes_below):
            raise TableError(f"the table has no size below the target {target:g}")
        budget = float(sizes_below[-1])
    target, settings = float(target), MethodSettings(method, gamma, tau)
    used, forecast, unranked = forecast_up_to(loss_table, budget, target, settings, classes)
    ranked = loss_table.rows(np.flatnonzero([name not in unranked for name in loss_table.names]))
    earlier_tables = History.read(history)
    forecast, history_note = earlier_tables.adjust(forecast, used.names, ranked)
    n = np.full(len(used.names), np.nan) if used.parameters is None else used.parameters
    flops_per_example = OPERATIONS * np.where(n > 0, n, np.nan) * (tokens or 1) * epochs
    # Losses at the target are printed beside the forecasts but not used: `used` ends at the budget.
    measured = ranked.losses[:, loss_table.sizes == target].reshape(-1)
    return Selection(
        method=method,
        budget=float(used.sizes[-1]),
        target=target,
        table=used,
        forecast=forecast,
        costs=flops_per_example * forecast.trained,
        full_costs=flops_per_example * target,
        unranked=unranked,
        measured=measured if np.isfinite(measured).any() else None,
        classes=classes,
        tolerance=tolerance,
        history_note=history_note,
    )


@dataclass(frozen=True, repr=False)
class Selection:
    r"""A ranking of n candidates, from losses up to a budget.

    Attributes:
        method: name of the method.
        budget: the largest size used.
        target: the size of the forecasts.
        table: the losses up to the budget.
        forecast: scores and forecasts of the method.
        costs: cost of the runs used of each candidate, [n]: FLOPs from `select`, 6 N D per epoch;
            NaN where it is unknown.
        full_costs: cost of training each candidate on the target size (FullTuning), [n].
        unranked: model -> reason, of the models that have too few sizes for the method.
        measured: losses of the table at the target, [n], NaN where there is none; None if there
            are none.  They are not used.
        classes: number of classes, or None; see `select`.
        tolerance: largest expected regret of `shortlist`, see `select`.
        history_note: what the earlier tables changed, a sentence; "" without a history.

    Examples:
        >>> import pandas as pd
        >>> import jachess_ext as jx
        >>> losses = {"a": [2.0, 1.6, 1.3, 1.1], "b": [1.9, 1.7, 1.55, 1.45]}
        >>> frame = pd.DataFrame.from_dict(losses, orient="index", columns=[100, 200, 400, 800])
        >>> selection = jx.scaling.select(frame, budget=800, target=12_800)
        >>> selection.ranking, selection.is_decided
        (['a', 'b'], False)
        >>> print(*selection.text().splitlines()[1:4], sep="\n")
           model  P(best)    loss   90 % interval
        1  a         89 %  0.7667  0.4779 … 1.230
        2  b         11 %   1.116  0.6959 … 1.791
    """

    method: str
    budget: float
    target: float
    table: LossTable
    forecast: Forecast
    costs: Array
    full_costs: Array
    unranked: Mapping[str, str] = field(default_factory=dict)
    measured: Array | None = None
    classes: int | None = None
    tolerance: float = TOLERANCE
    history_note: str = ""

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the ranking, the advice and the notes as text."""
        heading = (
            f"{self.method}: {len(self.names)} models, sizes up to {count_text(self.budget)}, "
            f"{100 * self.share:.3g} % of the target {count_text(self.target)}"
        )
        lines = [heading, *align_rows(self.cells()), self.advice, *self.notes]
        return "\n".join([*lines, *self.unranked.values()])

    def cells(self) -> list[list[str]]:
        """Return the ranking as a table of texts: a header, then a row for each model, best
        first."""
        order, ranks = self._order, range(1, 1 + len(self.names))
        columns = [["", *map(str, ranks)], ["model", *self.ranking]]
        if self.has_intervals:
            columns.append(["P(best)", *map(percent, self.best_probabilities[order])])
        if self.forecast.predicted is not None:
            predicted = self.table.to_metric(self.predicted_losses[order])
            columns.append([self.table.label, *map(number_text, predicted)])
        else:
            columns.append(["score", *map(number_text, self.scores[order])])
        if self.has_intervals:
            interval_rows = zip(*(end[order] for end in self._metric_interval()), strict=True)
            intervals = [" … ".join(map(number_text, pair)) for pair in interval_rows]
            columns.append(["90 % interval", *intervals])
        if self.measured is not None:
            measured = self.table.to_metric(self.measured[order])
            columns.append(["measured", *map(number_text, measured)])
        shares = self._divide_by_total(self.costs)
        if np.isfinite(shares).any():
            columns.append(["of all in full", *map(percent, shares[order])])
        return list(map(list, zip(*columns, strict=True)))

    @property
    def notes(self) -> list[str]:
        """Sentences on the history, the rows that were left out, models still at the level of
        guessing, and losses measured at the target."""
        notes = [
            self.history_note,
            self.table.left_out and f"Left out: {self.table.left_out}.",
            chance_note(self.table, self.classes),
            "" if self.measured is None else measured_note(self.table, self.measured),
        ]
        return list(filter(None, notes))

    @property
    def advice(self) -> str:
        """Sentences on the models to train in full, their expected regret, and the next runs."""
        if not self.has_intervals:
            return f"{self.method} gives no probabilities here; it says nothing of what is out."
        names, shortlist = self.ranking, self.shortlist
        count, length = len(names), len(shortlist)
        if not self.has_signal:
            text = f"Nothing tells these {count} models apart yet"
            return f"{text}: train longer, at a higher learning rate, or on more rows."
        regret, regret_of_list = self.expected_regret[[0, length - 1]]
        difference = partial(difference_text, self.table.metric)
        text = f"{names[0]} is the best with probability {percent(self.best_probabilities.max())}, "
        text += f"and is expected within {difference(regret)} of the best"
        if self.is_decided:
            return f"{text}: no further run is needed."
        if length == count > 1:
            text = f"Not decided yet: any of the {count} may be the best"
        elif length > 1:
            cost = f" costs {percent(self.price)} of all {count}"
            cost = " would tell" if math.isnan(self.price) else cost
            text = f"The best of {names_text(shortlist, count)} is expected within "
            text += f"{difference(regret_of_list)} of the best; training these {length} in "
            text += f"full{cost}"
        if length > 1 and regret <= _LARGEST_REGRET:
            text += f". Choosing {names[0]} now is expected to cost {difference(regret)}"
        size, next_names = 2 * self.budget, names[: max(2, len(self.survivors))]
        if size > self.target / 2:
            return f"{text}."
        price = self._price(len(next_names)) * size / self.target
        cost = "" if math.isnan(price) else f" ({percent(price)} of training all in full)"
        num_out = count - len(next_names)
        dropped = f"; the other {num_out} {'is' if num_out == 1 else 'are'} out" if num_out else ""
        text += f". Next, run {names_text(next_names, count)} on {count_text(size)}{cost}{dropped}."
        last = dict(zip(self.names, self.table.last_losses, strict=True))
        if len(next_names) > 2 and sorted(next_names, key=last.__getitem__) == next_names:
            text += " Their order is not forecast to change: halve them at each doubling."
        return text

    def _divide_by_total(self, costs: Array) -> Array:
        """Return costs divided by the cost of training all models in full; NaN if it is unknown."""
        total = self.full_costs.sum()
        return costs / total if total > 0 else np.full(len(costs), math.nan)

    @property
    def price(self) -> float:
        """Cost of training the shortlist in full, divided by the cost of training all models.

        NaN if a cost is unknown.
        """
        return self._price(len(self.shortlist))

    def _price(self, count: int) -> float:
        """Return `price` for the first `count` models of the ranking in place of the shortlist."""
        return float(self._divide_by_total(self.full_costs)[self._order[:count]].sum())

    @property
    def is_decided(self) -> bool:
        """Whether no further run is needed: the first model alone is the shortlist, and its P(best)
        is `Constants.confidence` or more."""
        if not self.has_intervals or len(self.shortlist) > 1:
            return False
        return bool(self.best_probabilities.max() >= CONSTANTS.confidence)

    @property
    def has_signal(self) -> bool:
        """Whether the differences between the models are probably more than noise."""
        return self.forecast.no_signal is None or self.forecast.no_signal.max() < 1

    @cached_property
    def expected_regret(self) -> Array:
        """Expected excess loss of the best of the first k models over the best of all, [n].

        Entry k − 1 is for k models.  The excess is a difference of ln L; for a score (L is
        1 − score) and a perplexity (L is its logarithm) a difference of L.

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
        """The shortest prefix of the ranking whose expected regret is within `tolerance`.

        Raises:
            ValueError: the method gives no distribution.
        """
        is_sufficient = self.expected_regret <= self.tolerance
        is_sufficient[-1] = True  # all models have no regret, even if the distribution has no mean
        return self.ranking[: 1 + int(is_sufficient.argmax())]

    @property
    def survivors(self) -> list[str]:
        """The first models of the ranking, which are worth a further run, see `survivor_count`.

        If the method gives no probabilities, they are the better half of the ranking.
        """
        count = (len(self.names) + 1) // 2
        if self.has_intervals:
            count = survivor_count(self._distribution(self.forecast.mixture), self._order)
        return self.ranking[:count]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models in the table's order, [n]."""
        return self.table.names

    @property
    def scores(self) -> Array:
        """The scores that the models are ranked by, lower is better, [n] in the table's order.

        They are the predicted losses if the method predicts losses.
        """
        return self.forecast.score

    @property
    def ranking(self) -> list[str]:
        """The names of the models, best first; models with equal scores in the table's order."""
        return [self.names[row] for row in self._order]

    @property
    def _order(self) -> Index:
        """Rows of the models, best first."""
        return np.argsort(self.scores, kind="stable")

    @property
    def predicted_losses(self) -> Array:
        """The forecast losses at the target, [n] in the table's order; see `to_frame`.

        The method subtuning forecasts the last loss, and zeroshot the loss before fine-tuning.

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
            ValueError: `level` is not between 0 and 1, or the method gives no distribution (see
                `has_intervals`).
        """
        return self._distribution(self.forecast.predictive).exp_interval(level)

    @property
    def has_intervals(self) -> bool:
        """Whether the method gives a distribution, for intervals and probabilities."""
        return self.forecast.predictive is not None

    @cached_property
    def best_probabilities(self) -> Array:
        """Each model's probability of having the lowest loss at the target, [n], in table order.

        The error common to all models widens `interval_ends` but does not count here.

        Raises:
            ValueError: the method gives no distribution.
        """
        chances = self._distribution(self.forecast.mixture).prob_best()
        chances.setflags(write=False)
        return chances

    @property
    def flops(self) -> float:
        """FLOPs of all runs used for this ranking.

        Raises:
            TableError: the number of parameters of a model is unknown.
        """
        return self._sum(np.where(self.forecast.trained == 0, 0.0, self.costs))

    @property
    def full_flops(self) -> float:
        """FLOPs of training every candidate on the target size once (FullTuning).

        Raises:
            TableError: as `flops`.
        """
        return self._sum(self.full_costs)

    def _sum(self, costs: Array) -> float:
        """Return the sum of costs; raise TableError if one is unknown."""
        if np.isnan(costs).any():
            self.table.known_parameters()  # raises for the model without parameters
        return float(costs.sum())

    @property
    def share(self) -> float:
        """The largest size used, divided by the target."""
        return self.budget / self.target

    def _metric_interval(self) -> tuple[Array, Array]:
        """Return `interval_ends` as values of the metric, the lower ends first."""
        ends = [self.table.to_metric(end) for end in self.interval_ends()]
        return np.minimum(*ends), np.maximum(*ends)

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame with a row for each candidate, best first.

        Columns: rank, name, score, predicted, low, high (ends of the 90 % interval), prob_best,
        cost, full_cost (divided by the cost of training all in full); NaN where unknown.
        predicted, low and high are values of the table's metric.  A column `measured` holds the
        table's values at the target, if there are any.  Models that are not ranked come last, with
        a column `reason`.

        Raises:
            MissingExtra: pandas is not installed.
        """
        missing = np.full(len(self.names), np.nan)
        predicted = self.forecast.predicted
        low, high = self._metric_interval() if self.has_intervals else (missing, missing)
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
                "cost": self._divide_by_total(self.costs),
                "full_cost": self._divide_by_total(self.full_costs),
            }
        ).iloc[self._order]
        frame.insert(0, "rank", np.arange(1, len(frame) + 1))
        if self.unranked:
            unranked = pandas.DataFrame(self.unranked.items(), columns=["name", "reason"])
            frame = pandas.concat([frame, unranked]).astype({"rank": "Int64"})
        return frame.reset_index(drop=True)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot every candidate's losses over sizes, and its predicted loss with its interval.

        All are values of the table's metric.  The predictions are side by side around the target;
        crosses are values measured there.

        Args:
            ax: matplotlib axes to draw on; None creates new ones.

        Returns:
            The axes.

        Raises:
            ValueError: the method predicts no loss.
            MissingExtra: matplotlib or pandas is not installed.
        """
        _ = self.predicted_losses  # raises where there are none
        title = f"{self.method}, best first"
        return plot_selection(ax, self.table, self.to_frame(), self.target, title)

    def _distribution(self, distribution: T | None) -> T:
        """Return the distribution; raise ValueError if it is None."""
        if distribution is None:
            text = f"{self.method} gives no distribution here, of intervals and probabilities"
            raise ValueError(f"{text}; {DEFAULT} does, and laws with more sizes than parameters")
        return distribution
