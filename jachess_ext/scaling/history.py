"""`History`: earlier tables of the same models, which adjust the forecasts for a new table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations
from os import PathLike
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from .loss_table import LossTable
from .methods import Forecast
from .predictive import Array, Index
from .sheets import Source
from .table_error import TableError
from .tables import read_table

Table: TypeAlias = "Source | LossTable | History | Mapping[str, Sequence[object]]"
Tables: TypeAlias = "Table | tuple[Table, str | None]"
"""A table, or a pair of it and its metric."""

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx")
"""Suffixes of the files that are read from a folder."""
STANDING_WEIGHT = 0.6
"""Shift of ln L per unit of mean standing, in standard deviations of the forecasts.  It and the
next constant were chosen on the development halves; see benchmarks.selection."""
STANDING_TABLE_COUNT = 5.0  # tables of standing 0 that are added to each mean standing (shrinkage)
_RUN_TOLERANCE = 1e-3  # relative difference of two losses of one run, rounded differently
_LEVEL_SHARE = 0.1  # of a table's losses, of which more are equal at the level of guessing alone
_LEAST_SPREAD = 1e-9  # standard deviation of ln scores below which they are equal


@dataclass(frozen=True)
class History:
    """Earlier tables of models, matched by name.

    Attributes:
        tables: label used in error messages -> table.
    """

    tables: Mapping[str, LossTable]

    @classmethod
    def read(cls, sources: Tables | Sequence[Tables]) -> History:
        """Read tables; a History is returned as it is.

        Args:
            sources: a table or a list of tables: anything that `read_table` reads, a folder (its
                files with `SUFFIXES`), a LossTable or an item of `state`.  In a list, a pair
                (table, metric) gives the metric of a table that does not name its own.

        Raises:
            TableError: a table that cannot be read, a folder without tables, or two tables that
                hold the same runs.
        """
        if isinstance(sources, History):
            return sources
        items = sources if isinstance(sources, (list, tuple)) else [cast(Tables, sources)]
        tables: dict[str, LossTable] = {}
        for item, item_metric in chain.from_iterable(map(_expand_folder, items)):
            label = str(item) if isinstance(item, (str, PathLike)) else f"table {1 + len(tables)}"
            try:
                table = _read_item(item, item_metric)
                tables[label] = table.up_to(table.sizes[-1])  # checks every loss
            except TableError as error:  # its options concern an earlier table, not the new one
                hint = " (give the LossTable of read_table, told so)" if error.options else ""
                if "metric" in error.options:
                    hint = " (by a pair in a list, (table, metric), or --history-metric)"
                raise TableError(f"the history's {label}: {error.args[0]}{hint}") from error
        for (label, table), (other_label, other) in combinations(tables.items(), 2):
            if same_runs(table, other):
                raise TableError(f"the history's {label} and {other_label} hold the same runs")
        return cls(tables)

    def state(self) -> list[dict[str, object]]:
        """Return the tables as a list of dicts, which `read` accepts.

        `finite` makes their values serialisable as JSON.
        """
        names = ("names", "sizes", "losses", "metric")
        return [{name: getattr(t, name) for name in names} for t in self.tables.values()]

    def adjust(
        self, forecast: Forecast, names: Sequence[str], full_table: LossTable
    ) -> tuple[Forecast, str]:
        """Adjust forecasts by the standings of the models on earlier tables.

        A model's standing on a table is its ln loss at the table's last size, standardised over the
        models that both tables have.  Its mean over tables is shrunk towards 0 by adding
        `STANDING_TABLE_COUNT` tables of standing 0.  It shifts ln L by `STANDING_WEIGHT` standard
        deviations of the forecasts; the shifts have mean 0 over the models with a standing and are
        0 for the others.

        Args:
            forecast: forecast of the n models; returned unchanged if it predicts no loss.
            names: names of the n models.
            full_table: losses of the same models at all sizes.

        Returns:
            The adjusted forecast, and a note on what changed ("" without earlier tables).

        Raises:
            TableError: an earlier table holds runs of `full_table`.
        """
        if not self.tables:
            return forecast, ""
        if not forecast.is_loss:
            return forecast, "History: the method predicts no loss; nothing moved."
        for label, earlier in self.tables.items():
            if same_runs(earlier, full_table):
                note = f"the history's {label} holds runs of the table to choose from"
                raise TableError(f"{note}, and may tell the answer: leave it out")
        standings = np.array([_final_standings(earlier, names) for earlier in self.tables.values()])
        has_standing = np.isfinite(standings)
        log_shift, matched = np.zeros(len(names)), np.flatnonzero(has_standing.any(0))
        note = f"History: {has_standing.any(1).sum()} of {len(standings)} earlier tables hold "
        note += f"{len(matched)} of the {len(names)} models"
        if not len(matched):
            return forecast, f"{note}; nothing moved."
        mean = np.nansum(standings, 0) / (has_standing.sum(0) + STANDING_TABLE_COUNT)
        scores = np.log(forecast.score)
        log_shift[matched] = STANDING_WEIGHT * scores.std() * (mean - mean[matched].mean())[matched]
        old_best, new_best = (names[int(score.argmin())] for score in (scores, scores + log_shift))
        change_text = "stays first" if new_best == old_best else f"is first, not {old_best}"
        note += f"; with them {new_best} {change_text}."
        adjusted = replace(forecast, score=forecast.score * np.exp(log_shift))
        if forecast.predictive is None or forecast.mixture is None:
            return adjusted, note
        predictive, *components = (
            replace(student, location=student.location + log_shift)
            for student in (forecast.predictive, *forecast.mixture.components)
        )
        mixture = replace(forecast.mixture, components=tuple(components))
        return replace(adjusted, predictive=predictive, mixture=mixture), note


def _expand_folder(item: Tables) -> list[tuple[Table, str | None]]:
    """Return each file of a folder, or any other item of a list, with its metric or None."""
    source, metric = item if isinstance(item, tuple) else (item, None)
    if not isinstance(source, (str, PathLike)) or not Path(source).is_dir():
        return [(source, metric)]
    files = sorted(file for file in Path(source).iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise TableError(f"the history {source} has no file {', '.join(SUFFIXES)}")
    return [(file, metric) for file in files]


def _read_item(item: Table, metric: str | None) -> LossTable:
    if isinstance(item, Mapping):
        names, sizes = tuple(item["names"]), np.array(item["sizes"], dtype=np.float64)
        losses = np.array(item["losses"], dtype=np.float64).reshape(len(names), len(sizes))
        return LossTable(names, sizes, losses, None, cast(str | None, item["metric"]))
    with suppress(TableError):
        if (table := read_table(item)).metric is not None:  # its own goes before `metric`
            return table
    return read_table(item, metric=metric)


def _match_models(names: Sequence[str], other_names: Sequence[str]) -> tuple[Index, Index]:
    """Return the indices in each sequence of the common names, in the second sequence's order."""
    rows = {name.strip(): row for row, name in enumerate(names)}
    pairs = [(rows[n.strip()], row) for row, n in enumerate(other_names) if n.strip() in rows]
    matched, other_matched = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    return matched, other_matched


def same_runs(table: LossTable, other: LossTable) -> bool:
    """Return whether two tables hold the same runs.

    They do if at least half of the losses of common models at common sizes are equal.  Losses at a
    level that many losses of the table have, such as the level of guessing, are not counted.
    """
    rows, other_rows = _match_models(table.names, other.names)
    _, size_indices, other_sizes = np.intersect1d(table.trained, other.trained, return_indices=True)
    losses = table.trained_losses[rows][:, size_indices]
    other_losses = other.trained_losses[other_rows][:, other_sizes]
    is_common = np.isfinite(losses) & np.isfinite(other_losses)
    values = np.sort(table.trained_losses, axis=None)
    ends = [np.searchsorted(values, losses * (1 + x)) for x in (-_RUN_TOLERANCE, _RUN_TOLERANCE)]
    is_common &= ends[1] - ends[0] <= max(1, _LEVEL_SHARE * np.isfinite(values).sum())
    is_equal = np.isclose(losses, other_losses, _RUN_TOLERANCE, 0.0)[is_common]
    return bool(is_equal.sum() >= max(0.5 * len(is_equal), 1))


def _final_standings(table: LossTable, names: Sequence[str]) -> Array:
    """Return the standings of the n models at the last size of a table, [n].

    The last size is the largest that at least half of the matched models, and at least two, were
    run on.  A standing is the standardised ln loss; NaN for models that the table does not have.
    """
    standings = np.full(len(names), np.nan)
    rows, models = _match_models(table.names, names)
    log_losses = np.log(table.trained_losses[rows])
    counts = np.isfinite(log_losses).sum(0)
    cols = np.flatnonzero(counts >= max(2, len(rows) / 2))
    if len(cols) and (spread := np.nanstd(last := log_losses[:, cols[-1]])) > _LEAST_SPREAD:
        standings[models] = (last - np.nanmean(last)) / spread
    return standings
