"""Each method against the unregularised model seed by seed, which takes the seeds' luck out.

Runs of one seed start from the same weights, see the same rows in the same order and, of the
methods whose steps of task loss are the plain ones, the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..evaluation.report import Table
from ..evaluation.statistics import cluster_flip_test, interval, sign_test
from ..training import METHODS
from ..compare.runs import Record
from .tables import REFERENCE, Figure, Results, at, groups


@dataclass(frozen=True)
class Compared:
    """A figure, how it is printed, and whether more (1) or less (-1) of it is better."""

    title: str
    figure: Figure
    scale: float
    digits: int
    better: int

    def cell(self, results: Results, method: str, tasks: Sequence[str]) -> str:
        """Over those of the tasks that have the figure; a dash without seeds to compare."""
        having = [task for task in results.tasks_with(self.figure) if task in tasks]
        return self.shown(differences(results, method, having, self.figure))

    def shown(self, found: np.ndarray) -> str:
        """Mean ± half the 95 % interval, and how many are to the better."""
        if not len(found):
            return "–"
        found = self.scale * found
        half = "" if len(found) < 2 else f" ± {interval(found):.{self.digits}f}"
        wins = (self.better * found > 0).sum()
        return f"{found.mean():+.{self.digits}f}{half} ({wins}/{len(found)})"


def _largest_corruption(record: Record) -> float | None:
    """Accuracy (of old records, the score) at the largest share of unknown tokens."""
    shares = record.get("corrupted") or {}
    if not shares:
        return None
    last = max(shares, key=float)
    return (record.get("accuracies") or {}).get(f"corrupted {last}", shares[last])


PAIRED_NOTE = (
    "Differences from the unregularised model of the same seed, mean ± half of the 95 % interval "
    "by Student's t (seeds on which it is better / seeds). Brier: summed over classes. Scaled: at "
    "a temperature fitted on validation rows. Corrupted: accuracy at the largest share of unknown "
    "tokens."
)
OVERALL_NOTE = (
    "Differences from the unregularised model over all pairs of task and seed. p, two-sided, not "
    "adjusted for the number of methods: sign test over pairs; permutation of the mean's sign, all "
    "tasks of a seed together (n seeds give no p below 2/2^n), and all seeds of a task together "
    "(tasks as the sample)."
)
_COLUMNS = (
    Compared("score × 100", at("score"), 100.0, 2, 1),
    Compared("accuracy × 100", at("accuracy"), 100.0, 2, 1),
    Compared("AUC × 100", at("auc"), 100.0, 2, 1),
    Compared("Brier score", at("brier"), 1.0, 4, -1),
    Compared("Brier, scaled", at("scaled", "brier"), 1.0, 4, -1),
    Compared("NLL", at("nll"), 1.0, 3, -1),
    Compared("NLL, scaled", at("scaled", "nll"), 1.0, 4, -1),
    Compared("ECE", at("ece"), 1.0, 4, -1),
    Compared("ECE, scaled", at("scaled", "ece"), 1.0, 4, -1),
    Compared("corrupted × 100", _largest_corruption, 100.0, 2, 1),
)


def paired_tables(results: Results) -> list[Table]:
    """Mean difference from the plain runs, and on how many seeds it is to the better.

    On average over the tasks where there are several, then of each task; without plain runs, or
    any other, no table.
    """
    if not results.compared:
        return []
    columns = [column for column in _COLUMNS if results.tasks_with(column.figure)]
    header = ["method", *(column.title for column in columns)]
    *each, average = groups(results.tasks)
    return [
        Table(
            f"{title}: differences from the plain model",
            header,
            [
                [m, *(column.cell(results, m, tasks) for column in columns)]
                for m in results.compared
            ],
        )
        for title, tasks in (average, *each)
    ]


def differences(
    results: Results,
    method: str,
    tasks: Sequence[str],
    figure: Figure,
    reference: str = REFERENCE,
) -> np.ndarray:
    """``[n]``: method minus reference, of the seeds that both have on all of the tasks."""
    own = results.average_by_seed(method, tasks, figure)
    other = results.average_by_seed(reference, tasks, figure)
    return np.array([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())])


def _pairs(
    results: Results, method: str, figure: Figure
) -> dict[tuple[str, int], tuple[float, float]]:
    """(task, seed) → the method's figure and the plain run's, of all that both have."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for task in results.tasks:
        own, plain = (results.by_seed(m, task, figure) for m in (method, REFERENCE))
        found |= {(task, seed): (own[seed], plain[seed]) for seed in own if seed in plain}
    return found


def _clusters(pairs: dict[tuple[str, int], float], by: int) -> list[list[float]]:
    groups: dict[object, list[float]] = {}
    for key, value in pairs.items():
        groups.setdefault(key[by], []).append(value)
    return list(groups.values())


_TESTED = tuple(_COLUMNS[i] for i in (0, 3, 4, 9))


def overall_tables(results: Results) -> list[Table]:
    """One test per method and figure over all pairs of task and seed."""
    found = []
    for column in _TESTED:
        rows = []
        for method in results.compared:
            figures = _pairs(results, method, column.figure)
            pairs = {key: own - plain for key, (own, plain) in figures.items()}
            if len(pairs) > 1:
                values = np.array(list(pairs.values()))
                wins = (column.better * values > 0).sum()
                tests = [sign_test(list(values))]
                tests += [cluster_flip_test(_clusters(pairs, by)) for by in (1, 0)]
                mean = f"{column.scale * values.mean():+.{column.digits}f}"
                rows.append([method, mean, f"{wins}/{len(values)}", *(f"{p:.3g}" for p in tests)])
        if rows:
            caption = f"{column.title}: difference from the plain model"
            header = ["method", "mean", "better", "p, sign", "p, seeds", "p, tasks"]
            found.append(Table(caption, header, rows))
    return found


def cost_of(results: Results, method: str) -> float | None:
    """Processor seconds of training over the plain run's of the same task and seed, mean ratio."""
    seconds = _pairs(results, method, at("seconds", "processor")).values()
    ratios = [own / plain for own, plain in seconds if plain]
    return float(np.mean(ratios)) if ratios else None


def cost_table(results: Results) -> Table | None:
    """What training costs."""
    costs = {method: cost_of(results, method) for method in results.methods}
    rows = [[method, f"{cost:.2f}"] for method, cost in costs.items() if cost is not None]
    if len(rows) < 2:
        return None
    caption = (
        "Training: processor seconds over the plain run's of the same task and seed, mean ratio."
    )
    return Table(caption, ["method", "times plain"], rows)


def is_control(results: Results, method: str) -> bool:
    """Whether a method is one that others have to beat; placebos are."""
    settings = next(r["settings"] for r in results.records if r["method"] == method)
    entry = METHODS.get(settings["method"])
    return bool(settings.get("placebo")) or (entry is not None and entry.control)


def best_control_table(results: Results) -> Table | None:
    """Each method that is no control against the best control of its cost or less."""
    controls = [m for m in results.methods if m != REFERENCE and is_control(results, m)]
    rows = []
    for method in results.methods:
        if method == REFERENCE or is_control(results, method) or not controls:
            continue
        cost = cost_of(results, method)
        for column in _TESTED:
            tasks = results.tasks_with(column.figure)
            means = {}
            for control in controls:
                other = cost_of(results, control)
                values = differences(results, control, tasks, column.figure)
                if len(values) and (cost is None or other is None or other <= 1.05 * cost):
                    means[control] = column.better * values.mean()
            if means:
                best = max(means, key=lambda name: means[name])
                apart = differences(results, method, tasks, column.figure, best)
                rows.append([method, column.title, best, column.shown(apart)])
    if not rows:
        return None
    caption = (
        "Against the control with the best mean of that figure among those whose training costs "
        "no more (up to 5 %): difference, mean ± half of the 95 % interval over seeds (better / "
        "seeds). The best of several is chosen after the fact, which favours the controls."
    )
    return Table(caption, ["method", "figure", "best control", "difference"], rows)
