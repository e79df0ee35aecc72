"""`history=` of `select` and `Search`: what the same models did on earlier tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, combinations
from os import PathLike
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from .predictive import Array, Index
from .runs import LossTable, TableError
from .sheets import Source
from .tables import Name, plain_name, read_table

How: TypeAlias = tuple[str, int, float]
"""A method, and Algorithm 1's γ and τ."""
Logs: TypeAlias = tuple[Sequence[str], Array]
"""Models, n, and ln of their scores, forecasts and last losses, [n, 3]."""
Ranker: TypeAlias = Callable[[LossTable, float, float, How], Logs]
"""(table, budget, target, How) -> how the method sees the models that have sizes enough."""
Tables: TypeAlias = "Source | LossTable | History | Mapping[str, Sequence[object]]"

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx")
"""Of the files of a folder that are read."""
PRIOR = np.array([1.0, 0.0, 0.0, 0.6])
"""Weights of score, forecast, last loss and standing before any table is read.  They and the next
four are from the development halves; see benchmarks.selection."""
WORTH = 5.0  # tables that these weights are worth
AVERAGE = 5.0  # tables of standing 0 that every model counts as having been in besides
TOP = 2.0  # fall of a model's ln weight for each deviation that its score is behind the best
NEAR = 2.0  # factor between the target / budget of tables that learn from each other
_EQUAL = 1e-3  # relative difference of losses of one run, as of one written with fewer digits
_ALIKE = 1e-9  # deviation of ln scores that tell nothing apart


@dataclass(frozen=True)
class History:
    """Earlier tables of models, matched by name.

    Attributes:
        tables: the losses of each, by what it is called in errors.
        forecasts: those that were made already, by table, budget, target and method.
    """

    tables: Mapping[str, LossTable]
    forecasts: dict[tuple[int, float, float, How], Logs | None] = field(
        default_factory=dict, repr=False
    )

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

    def shift(
        self, of: Logs, whole: LossTable, share: float, how: How, ranker: Ranker
    ) -> tuple[Array, str]:
        """Return by how much ln scores and forecasts move by what models did on earlier tables.

        A model's standing is its ln loss at a table's last size, standardised over the models that
        both tables have; its mean is over tables, and `AVERAGE` more of standing 0.  The
        standardised true ln loss is taken to be a line in score, forecast, last loss and mean
        standing, the first three in units of the score's deviation, see `_line`.

        Args:
            of: the table's models that are ranked, n.
            whole: their losses, also those above the budget.
            share: the largest size that was read over the target.
            how: what forecast them.
            ranker: what forecasts a table by it.

        Returns:
            The shift, [n], and a sentence on what it moves.  It is 0 for a model that no table has,
            and its mean over the others is.

        Raises:
            TableError: a table of the history holds runs of this one.
        """
        names, logs = of
        for label, table in self.tables.items():
            if same_runs(table, whole):
                text = f"the history's {label} holds runs of the table to choose from"
                raise TableError(f"{text}, and may tell the answer: leave it out")
        ends = np.array([_end(table, names) for table in self.tables.values()])
        metrics = [plain_name(t.metric or "loss") for t in (whole, *self.tables.values())]
        ends[[metric != metrics[0] for metric in metrics[1:]], 0] = np.nan  # not to be cut
        there = np.isfinite(ends[:, 1:])
        shift, matched = np.zeros(len(names)), np.flatnonzero(there.any(0))
        text = (
            f"History: {there.any(1).sum()} of {len(ends)} earlier tables hold {len(matched)} of "
        )
        text += f"the {len(names)} models"
        if not len(matched):
            return shift, f"{text}; nothing moved."
        line, learnt = self._line(ends, names, share, how, ranker)
        x, unit = _features(logs[matched], _mean(ends[:, 1:])[matched])
        move = unit * (x @ line - x[:, 0])
        shift[matched] = move - move.mean()
        before, after = (names[int(score.argmin())] for score in (logs[:, 0], logs[:, 0] + shift))
        first = f"{after} stays first" if after == before else f"{after} is first, not {before}"
        return shift, f"{text}, and {learnt} tell how well such forecasts do; with them {first}."

    def _line(
        self, ends: Array, names: Sequence[str], share: float, how: How, ranker: Ranker
    ) -> tuple[Array, int]:
        """Return the weights of `_features`, [4], and from how many tables they are learnt.

        A ridge regression towards `PRIOR` of the standings in each table on its forecasts and the
        mean standings in the *others*.  Each table is cut so that the method sees about as small a
        share of it as here (`NEAR`), or left out, as one of another metric is; it counts as one,
        its first models most (`TOP`).
        """
        sums, learnt = WORTH * np.column_stack([np.eye(len(PRIOR)), PRIOR]), 0
        for place, table in enumerate(self.tables.values()):
            size, standing = float(ends[place, 0]), ends[place, 1:]
            smaller = table.trained[table.trained < size]
            away = abs(np.log(smaller / size / max(share, 1e-12)))
            if away.min(initial=np.inf) > np.log(NEAR) + 1e-9:
                continue
            key = id(table), float(smaller[away.argmin()]), size, how
            if key not in self.forecasts:
                self.forecasts[key] = None
                with suppress(ValueError):  # too few sizes, or curves it has no number for
                    self.forecasts[key] = ranker(table, *key[1:])
            read, logs = self.forecasts[key] or ((), np.empty((0, 3)))
            rows, places = _matched(read, names)
            rows, places = (at[np.isfinite(standing[places])] for at in (rows, places))
            if len(rows) < 2:
                continue
            x, unit = _features(logs[rows], _mean(np.delete(ends[:, 1:], place, 0))[places])
            if unit > _ALIKE:
                weight = np.exp(-TOP * (x[:, 0] - x[:, 0].min()))
                both = np.column_stack([x, standing[places]])
                both -= np.average(both, 0, weight)
                sums += (weight / weight.sum() * both[:, :-1].T) @ both
                learnt += 1
        return np.linalg.solve(sums[:, :-1], sums[:, -1]), learnt


def _files(item: Tables) -> Sequence[Tables]:
    """Return the files of a folder, and of anything else itself."""
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
        return LossTable(names, sizes, losses, None, cast(Name, item["metric"]))
    with suppress(TableError):
        if (table := read_table(item)).metric is not None:  # its own, which may be another
            return table
    return read_table(item, metric=metric)


def _matched(names: Sequence[str], others: Sequence[str]) -> tuple[Index, Index]:
    """Return the places of the names that both have, in each, in the order of the others."""
    rows = {name.strip(): row for row, name in enumerate(names)}
    pairs = [(rows[n.strip()], at) for at, n in enumerate(others) if n.strip() in rows]
    first, second = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    return first, second


def same_runs(one: LossTable, other: LossTable) -> bool:
    """Return whether half or more of the losses of the same models at the same sizes are equal."""
    rows, places = _matched(one.names, other.names)
    _, here, there = np.intersect1d(one.trained, other.trained, return_indices=True)
    first, second = one.trained_losses[rows][:, here], other.trained_losses[places][:, there]
    both = np.isfinite(first) & np.isfinite(second)
    return bool(both.any() and np.isclose(first, second, _EQUAL, 0.0)[both].mean() >= 0.5)


def _end(table: LossTable, names: Sequence[str]) -> Array:
    """Return a table's last size, then the standings of models there, [1 + n], NaN for none.

    The last size is the largest that at least half of the matched models, and two, were run on.
    """
    end = np.full(1 + len(names), np.nan)
    rows, places = _matched(table.names, names)
    losses = np.log(table.trained_losses[rows])
    counts = np.isfinite(losses).sum(0)
    ends = np.flatnonzero(counts >= max(2, len(rows) / 2))
    if len(ends) and (spread := np.nanstd(last := losses[:, ends[-1]])) > _ALIKE:
        end[0], end[1 + places] = table.trained[ends[-1]], (last - np.nanmean(last)) / spread
    return end


def _mean(standings: Array) -> Array:
    """Return mean standings over tables, [n], `AVERAGE` tables of standing 0 among them."""
    return np.nansum(standings, 0) / (np.isfinite(standings).sum(0) + AVERAGE)


def _features(logs: Array, standing: Array) -> tuple[Array, float]:
    """Return (score, forecast, last loss, standing), [n, 4], and the unit of the first three."""
    unit = max(float(logs[:, 0].std()), _ALIKE)
    return np.column_stack([(logs - logs.mean(0)) / unit, standing]), unit
