"""`history=` of `select` and `Search`: what the same models did on earlier tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from os import PathLike
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from .loss_table import LossTable
from .methods import Forecast, MethodSettings, forecast_up_to
from .metrics import plain_name
from .predictive import Array, Index
from .sheets import Source
from .table_error import TableError
from .tables import read_table

Tables: TypeAlias = "Source | LossTable | History | Mapping[str, Sequence[object]]"

_Key: TypeAlias = tuple[int, float, float, MethodSettings]
_Logs: TypeAlias = tuple[Sequence[str], Array]

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx")
"""Of the files of a folder that are read."""
PRIOR_WEIGHTS = np.array([1.0, 0.0, 0.0, 0.6])
"""Weights of score, forecast, last loss and standing before any table is read.  They and the next
four are from the development halves; see benchmarks.selection."""
PRIOR_TABLES = 5.0  # tables that the prior weights count as
STANDING_TABLES = 5.0  # tables of standing 0 that the prior of a model's mean standing counts as
TOP_DECAY = (
    2.0  # ln of a model's weight falls by this with each deviation of its score from the best
)
NEAR_RATIO = 2.0  # largest ratio of target / budget between tables that learn from each other
_RUN_TOLERANCE = 1e-3  # relative difference of losses of one run, written with fewer digits
_LEAST_SPREAD = 1e-9  # standard deviation of ln scores below which they are equal


@dataclass(frozen=True)
class History:
    """Earlier tables of models, matched by name.

    Attributes:
        tables: losses, by the label of the table in errors.
        forecasts: a cache: (id of the table, budget, target, settings) -> names of the models and
            `_log_forecasts` of the table's first sizes; None where the method forecasts nothing.
    """

    tables: Mapping[str, LossTable]
    forecasts: dict[_Key, _Logs | None] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, sources: Tables | Sequence[Tables], metric: str | None = None) -> History:
        """Read tables; a History is returned as it is.

        Args:
            sources: what `read_table` reads, folders (their files with `SUFFIXES`), LossTables and
                items of `state`; one, or a list.
            metric: of files and DataFrames that do not tell theirs.

        Raises:
            TableError: a table that cannot be read, with its file's name, a folder without any, or
                two tables of the same runs.
        """
        if isinstance(sources, History):
            return sources
        items = sources if isinstance(sources, (list, tuple)) else [cast(Tables, sources)]
        tables: dict[str, LossTable] = {}
        for item in chain.from_iterable(map(_files, items)):
            is_path = isinstance(item, (str, PathLike))
            label = str(item) if is_path else f"table {1 + len(tables)}"
            try:
                table = _read(item, metric)
                tables[label] = table.up_to(table.sizes[-1])  # checks every loss
            except TableError as error:  # its options are not of the table to choose from
                hint = " (give the LossTable of read_table, told so)" if error.options else ""
                raise TableError(f"the history's {label}: {error.args[0]}{hint}") from error
        for (first, one), (second, other) in combinations(tables.items(), 2):
            if same_runs(one, other):
                raise TableError(f"the history's {first} and {second} hold the same runs")
        return cls(tables)

    def state(self) -> list[dict[str, object]]:
        """Return the tables as values that become JSON."""
        names = ("names", "sizes", "losses", "metric")
        return [{name: getattr(t, name) for name in names} for t in self.tables.values()]

    def move(
        self,
        forecast: Forecast,
        read: LossTable,
        table: LossTable,
        target: float,
        settings: MethodSettings,
    ) -> tuple[Forecast, str]:
        """Move scores and forecasts by what the models did on earlier tables.

        A model's standing is its ln loss at a table's last size, standardised over the models that
        both tables have; its mean is over tables, and `STANDING_TABLES` more of standing 0.  The
        standardised true ln loss is taken to be linear in score, forecast, last loss and mean
        standing, the first three in units of the score's deviation, see `_regression`.  The mean
        shift of the models that earlier tables have is 0, and so is that of each other model.

        Args:
            forecast: of the n models of `read`; returned as it is if it predicts no loss.
            read: losses up to the budget.
            table: losses of the same models, also above the budget.
            target: the size predicted for.
            settings: of the method that forecast them.

        Returns:
            The forecasts, and a sentence on what changed, "" without tables.

        Raises:
            TableError: a table of the history holds runs of this one.
        """
        if not self.tables:
            return forecast, ""
        if not forecast.is_loss:
            return forecast, f"History: {settings.method} predicts no loss; nothing moved."
        names, features = read.names, _log_forecasts(read, forecast)
        for label, earlier in self.tables.items():
            if same_runs(earlier, table):
                text = f"the history's {label} holds runs of the table to choose from"
                raise TableError(f"{text}, and may tell the answer: leave it out")
        ends = np.array([_final_standings(earlier, names) for earlier in self.tables.values()])
        metrics = [plain_name(t.metric or "loss") for t in (table, *self.tables.values())]
        ends[[metric != metrics[0] for metric in metrics[1:]], 0] = np.nan  # for no regression
        present = np.isfinite(ends[:, 1:])
        shift, matched = np.zeros(len(names)), np.flatnonzero(present.any(0))
        text = f"History: {present.any(1).sum()} of {len(ends)} earlier tables hold "
        text += f"{len(matched)} of the {len(names)} models"
        if not len(matched):
            return forecast, f"{text}; nothing moved."
        fraction = float(read.sizes[-1]) / target
        weights, count = self._regression(ends, names, fraction, settings)
        x, unit = _regressors(features[matched], _mean_standing(ends[:, 1:])[matched])
        move = unit * (x @ weights - x[:, 0])
        shift[matched] = move - move.mean()
        scores = features[:, 0]
        before, after = (names[int(score.argmin())] for score in (scores, scores + shift))
        first = f"{after} stays first" if after == before else f"{after} is first, not {before}"
        text += f", and {count} tell how well such forecasts do; with them {first}."
        moved = replace(forecast, score=forecast.score * np.exp(shift))
        if forecast.predictive is None or forecast.mixture is None:
            return moved, text
        predictive, *components = (
            replace(student, location=student.location + shift)
            for student in (forecast.predictive, *forecast.mixture.components)
        )
        mixture = replace(forecast.mixture, components=tuple(components))
        return replace(moved, predictive=predictive, mixture=mixture), text

    def _regression(
        self, ends: Array, names: Sequence[str], fraction: float, settings: MethodSettings
    ) -> tuple[Array, int]:
        """Return the weights of `_regressors`, [4], and the number of tables they are fitted to.

        A ridge regression towards `PRIOR_WEIGHTS` of the standings in each table on its forecasts
        and the mean standings in the *others*.  Each table is cut so that the method sees about as
        small a fraction of it as here (`NEAR_RATIO`), or left out, as one of another metric is; it
        counts as one, its first models most (`TOP_DECAY`).
        """
        prior = np.column_stack([np.eye(len(PRIOR_WEIGHTS)), PRIOR_WEIGHTS])
        sums, count = PRIOR_TABLES * prior, 0
        for number, table in enumerate(self.tables.values()):
            size, standing = float(ends[number, 0]), ends[number, 1:]
            smaller = table.trained[table.trained < size]
            distance = abs(np.log(smaller / size / max(fraction, 1e-12)))
            if distance.min(initial=np.inf) > np.log(NEAR_RATIO) + 1e-9:
                continue
            key = id(table), float(smaller[distance.argmin()]), size, settings
            if key not in self.forecasts:
                self.forecasts[key] = None
                with suppress(ValueError):  # too few sizes, or curves it has no number for
                    read, forecast, _ = forecast_up_to(table, *key[1:])
                    self.forecasts[key] = read.names, _log_forecasts(read, forecast)
            ranked, features = self.forecasts[key] or ((), np.empty((0, 3)))
            rows, models = _match_models(ranked, names)
            rows, models = (index[np.isfinite(standing[models])] for index in (rows, models))
            if len(rows) < 2:
                continue
            mean_standing = _mean_standing(np.delete(ends[:, 1:], number, 0))[models]
            x, unit = _regressors(features[rows], mean_standing)
            if unit > _LEAST_SPREAD:
                weight = np.exp(-TOP_DECAY * (x[:, 0] - x[:, 0].min()))
                columns = np.column_stack([x, standing[models]])
                columns -= np.average(columns, 0, weight)
                sums += (weight / weight.sum() * columns[:, :-1].T) @ columns
                count += 1
        return np.linalg.solve(sums[:, :-1], sums[:, -1]), count


def _files(item: Tables) -> Sequence[Tables]:
    """Return the files of a folder, or a list of the item if it is no folder."""
    if not isinstance(item, (str, PathLike)) or not Path(item).is_dir():
        return [item]
    files = sorted(file for file in Path(item).iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise TableError(f"the history {item} has no file {', '.join(SUFFIXES)}")
    return files


def _read(item: Tables, metric: str | None) -> LossTable:
    if isinstance(item, LossTable):
        return item
    if isinstance(item, Mapping):
        names, sizes = tuple(item["names"]), np.array(item["sizes"], dtype=np.float64)
        losses = np.array(item["losses"], dtype=np.float64).reshape(len(names), len(sizes))
        return LossTable(names, sizes, losses, None, cast(str | None, item["metric"]))
    with suppress(TableError):
        if (table := read_table(item)).metric is not None:  # its own, which may be another
            return table
    return read_table(item, metric=metric)


def _log_forecasts(table: LossTable, forecast: Forecast) -> Array:
    """Return ln of scores, forecasts and last losses, [n, 3]."""
    predicted = cast(Array, forecast.predicted)
    return np.log(np.stack([forecast.score, predicted, table.last_losses], -1))


def _match_models(names: Sequence[str], others: Sequence[str]) -> tuple[Index, Index]:
    """Return the indices in each sequence of the names that both have, in the others' order."""
    rows = {name.strip(): row for row, name in enumerate(names)}
    pairs = [(rows[n.strip()], at) for at, n in enumerate(others) if n.strip() in rows]
    first, second = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    return first, second


def same_runs(table: LossTable, other: LossTable) -> bool:
    """Return whether half or more of the losses of the same models at the same sizes are equal."""
    rows, other_rows = _match_models(table.names, other.names)
    _, sizes, other_sizes = np.intersect1d(table.trained, other.trained, return_indices=True)
    first, second = (
        table.trained_losses[rows][:, sizes],
        other.trained_losses[other_rows][:, other_sizes],
    )
    both = np.isfinite(first) & np.isfinite(second)
    return bool(both.any() and np.isclose(first, second, _RUN_TOLERANCE, 0.0)[both].mean() >= 0.5)


def _final_standings(table: LossTable, names: Sequence[str]) -> Array:
    """Return a table's last size, then the standings of the n models there, [1 + n], or NaN.

    The last size is the largest that at least half of the matched models, and two, were run on.
    """
    end = np.full(1 + len(names), np.nan)
    rows, models = _match_models(table.names, names)
    losses = np.log(table.trained_losses[rows])
    counts = np.isfinite(losses).sum(0)
    ends = np.flatnonzero(counts >= max(2, len(rows) / 2))
    if len(ends) and (spread := np.nanstd(last := losses[:, ends[-1]])) > _LEAST_SPREAD:
        end[0], end[1 + models] = table.trained[ends[-1]], (last - np.nanmean(last)) / spread
    return end


def _mean_standing(standings: Array) -> Array:
    """Return mean standings over tables, [n], `STANDING_TABLES` tables of standing 0 added."""
    return np.nansum(standings, 0) / (np.isfinite(standings).sum(0) + STANDING_TABLES)


def _regressors(features: Array, standing: Array) -> tuple[Array, float]:
    """Return (score, forecast, last loss, standing), [n, 4], and the unit of the first three."""
    unit = max(float(features[:, 0].std()), _LEAST_SPREAD)
    return np.column_stack([(features - features.mean(0)) / unit, standing]), unit
