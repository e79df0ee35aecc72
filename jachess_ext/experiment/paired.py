"""Each method against the unregularised model seed by seed, which takes the seeds' luck out.

Runs of one seed start from the same weights, see the same rows in the same order and, of the
methods whose steps of task loss are the plain ones, the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..evaluation.report import Table
from ..evaluation.statistics import summarise
from .tables import REFERENCE, Figure, Results


@dataclass(frozen=True)
class _Column:
    """A figure, how it is printed, and whether more (1) or less (-1) of it is better."""

    title: str
    figure: Figure
    scale: float
    digits: int
    better: int

    def cell(self, results: Results, method: str, tasks: Sequence[str]) -> str:
        """Over those of the tasks that have the figure; a dash without seeds to compare."""
        having = [task for task in results.tasks_with(self.figure) if task in tasks]
        found = self.scale * differences(results, method, having, self.figure)
        if not len(found):
            return "–"
        of = summarise(list(found))
        error = "" if of.n < 2 else f" ± {of.spread / of.n**0.5:.{self.digits}f}"
        return f"{of.mean:+.{self.digits}f}{error} ({(self.better * found > 0).sum()}/{of.n})"


_COLUMNS = (
    _Column("score × 100", lambda r: r["score"], 100.0, 2, 1),
    _Column("Brier score", lambda r: r["brier"], 1.0, 4, -1),
    _Column("ECE", lambda r: r["ece"], 1.0, 4, -1),
)


def paired_tables(results: Results) -> list[Table]:
    """Mean difference from the plain runs, and on how many seeds it is to the better.

    On average over the tasks where there are several, then of each task; without plain runs, or
    any other, no table.
    """
    methods = [method for method in results.methods if method != REFERENCE]
    if not methods or REFERENCE not in results.methods:
        return []
    tasks = results.tasks
    each = [(task, [task]) for task in tasks]
    groups = [("average over tasks", tasks), *each] if len(tasks) > 1 else each
    return [_table(results, methods, *group) for group in groups]


def _table(results: Results, methods: Sequence[str], title: str, tasks: Sequence[str]) -> Table:
    rows = [
        [method, *(column.cell(results, method, tasks) for column in _COLUMNS)]
        for method in methods
    ]
    caption = (
        f"{title}: differences from the unregularised model of the same seed, mean ± standard "
        "error (seeds on which it is better / seeds)."
    )
    return Table(caption, ["method", *(column.title for column in _COLUMNS)], rows)


def differences(results: Results, method: str, tasks: Sequence[str], figure: Figure) -> np.ndarray:
    """``[n]``: method minus plain, of the seeds that both have on all of the tasks."""
    own = results.average_by_seed(method, tasks, figure)
    plain = results.average_by_seed(REFERENCE, tasks, figure)
    return np.array([own[seed] - plain[seed] for seed in sorted(own.keys() & plain.keys())])
