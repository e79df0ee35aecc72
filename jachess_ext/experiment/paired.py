"""Each method against the unregularised model seed by seed, which takes the seeds' luck out.

Runs of one seed start from the same weights, see the same rows in the same order and, of the
methods whose steps of task loss are the plain ones, the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..evaluation.report import Table
from ..evaluation.statistics import summarise
from .tables import REFERENCE, Figure, Results


def paired_table(results: Results) -> Table | None:
    """Mean difference from the plain runs, and on how many seeds it is to the better."""
    methods = [m for m in results.methods if m != REFERENCE]
    if not methods or REFERENCE not in results.methods:
        return None
    columns: list[tuple[str, Figure, float, int, int]] = [
        ("score × 100", lambda r: r["score"], 100.0, 2, 1),
        ("Brier score", lambda r: r["brier"], 1.0, 4, -1),
        ("ECE", lambda r: r["ece"], 1.0, 4, -1),
    ]
    rows = []
    for method in methods:
        cells = []
        for _, figure, scale, digits, better in columns:
            found = differences(results, method, results.tasks_with(figure), figure)
            cells.append(_cell(scale * found, digits, better))
        rows.append([method, *cells])
    caption = (
        "Differences from the unregularised model, seed by seed, averaged over tasks: mean ± "
        "standard error (seeds on which it is better / seeds)."
    )
    return Table(caption, ["method", *(title for title, *_ in columns)], rows)


def differences(results: Results, method: str, tasks: Sequence[str], figure: Figure) -> np.ndarray:
    """``[n]``: method minus plain, of the seeds that both have on all of the tasks."""
    own = results.average_by_seed(method, tasks, figure)
    plain = results.average_by_seed(REFERENCE, tasks, figure)
    return np.array([own[seed] - plain[seed] for seed in sorted(own.keys() & plain.keys())])


def _cell(found: np.ndarray, digits: int, better: int) -> str:
    if not len(found):
        return "–"
    of = summarise(list(found))
    error = "" if of.n < 2 else f" ± {of.spread / of.n**0.5:.{digits}f}"
    return f"{of.mean:+.{digits}f}{error} ({(better * found > 0).sum()}/{of.n})"
