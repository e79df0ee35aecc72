"""Choosing on tables of several kinds: forecast, choice and probabilities, each judged apart.

    pip download --no-deps lcdb==0.1.0 && tar xf lcdb-0.1.0.tar.gz
    python -m benchmarks.selection_families --flan flan.csv --llm llm_finetuning.csv \
        --lcdb lcdb-0.1.0/lcdb

- ``flan``: 30 language models, budgets of 1/8 to 1/512; ``flan, few``: three to six of them.
- ``lcdb log-loss``, ``accuracy``, ``AUC``: scikit-learn learners on OpenML data sets with even
  numbers (PyPI's lcdb 0.1.0, unpacked), means over its splits, budgets of 1/8 and 1/32.  The target
  is the largest size that eight learners or more were trained up to, 1,024 rows at least.
- ``llm``: accuracies of three 7 to 8B models on 15 tasks, from 500 and 1,000 rows.

Scores count as losses 1 − score, 0.001 at least.  Settings of "blend" were chosen on half A: the
even rows of FLAN for the few and FLAN as a whole, LCDB numbers that 4 divides, every other task of
llm; half B judges.  Printed and written, per family and half: means over tables and budgets of
PearCorr and RMSE of ln loss of the predicted losses, coverage of 50 and 90 % intervals, RelAcc of
the choice; for five bins of P(best) what was said and how often it was true; and where "blend" is
behind what is asked of it.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.common.report import RESULTS, commit
from jachess_ext.evaluation.files import write_atomically
from jachess_ext.scaling import (
    LossTable,
    coverage,
    log_rmse,
    pear_corr,
    read_table,
    rel_acc,
    select,
)

METHODS: dict[str, dict[str, Any]] = {
    "blend": {"method": "blend"},
    "ats": {"method": "ats"},
    "ats tau=1": {"method": "ats", "tau": 1.0},
    "rectified": {"method": "rectified"},
    "subtuning": {"method": "subtuning"},
}
LOWEST = 1e-3  # a score of 1 has no logarithm of its loss
BINS = np.linspace(0, 1, 6)
BEHIND, OFF = 0.3, 0.1
COVERED = ((42.0, 58.0), (85.0, 95.0))
"""Asked of "blend": points of RelAcc behind the best of the others and distance of P(best) from its
frequency in a bin, at most; per cent of the truths in its 50 and in its 90 % intervals."""
FEW_TABLES = 24


@dataclass(frozen=True)
class Case:
    """One table and its budgets; the target is its largest size."""

    family: str
    half: str
    table: LossTable
    budgets: tuple[float, ...]


@dataclass
class Figures:
    """What one method did on all cases of a family and half."""

    pear_corr: list[float] = field(default_factory=list)
    rel_acc: list[float] = field(default_factory=list)
    log_rmse: list[float] = field(default_factory=list)
    cover_50: list[float] = field(default_factory=list)
    cover_90: list[float] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    true: list[float] = field(default_factory=list)


def flan_cases(path: Path) -> Iterator[Case]:
    """The whole table, and random few of its even (A) and odd (B) rows."""
    table = read_table(path)
    target = float(table.sizes[-1])
    yield Case("flan", "A", table, tuple(target / 2**k for k in range(3, 10)))
    generator = np.random.default_rng(0)
    for half, first in (("A", 0), ("B", 1)):
        rows = np.arange(first, len(table.names), 2)
        for number in range(FEW_TABLES):
            chosen = np.sort(generator.permutation(rows)[: 3 + number % 4])
            budgets = tuple(target / fraction for fraction in (8, 32, 128, 512))
            yield Case("flan, few", half, table.rows(chosen), budgets)


MEASURES = ("logloss", "accuracy", "auc")


def lcdb_cases(
    folder: Path, most: int | None, measures: Sequence[str] = MEASURES
) -> Iterator[Case]:
    """Every even data set that has eight learners up to 1,024 rows or more."""
    columns = ["openmlid", "learner", "size_train", "score_test"]
    for measure in measures:
        frame = pd.read_csv(folder / f"database-{measure}.csv", usecols=columns)
        frame = frame[frame.openmlid % 2 == 0]
        means = frame.groupby(["openmlid", "learner", "size_train"]).score_test.mean().reset_index()
        count = {"A": 0, "B": 0}
        for number, rows in means.groupby("openmlid"):
            half = "A" if number % 4 == 0 else "B"
            table = _lcdb_table(rows, measure)
            if table is None or (most is not None and count[half] >= most):
                continue
            count[half] += 1
            target = float(table.sizes[-1])
            yield Case(f"lcdb {measure}", half, table, (target / 8, target / 32))


def _lcdb_table(rows: pd.DataFrame, measure: str) -> LossTable | None:
    wide = rows.pivot(index="learner", columns="size_train", values="score_test")
    whole = wide.dropna(axis=0)
    while len(whole) < 8 and len(wide.columns) > 1:
        wide = wide.iloc[:, :-1]
        whole = wide.dropna(axis=0)
    values = whole.to_numpy(float)
    if len(whole) < 8 or whole.columns[-1] < 1024:
        return None
    losses = values if measure == "logloss" else 1 - values
    if np.ptp(losses[:, -1]) == 0 or (losses <= 0).mean() > 0.3:
        return None  # nothing to choose between, or solved by most learners
    sizes = np.array(whole.columns, dtype=float)
    return LossTable(tuple(whole.index), sizes, np.maximum(losses, LOWEST), None)


def llm_cases(path: Path) -> Iterator[Case]:
    """One table a task, of the sizes that all three models were trained on."""
    frame = pd.read_csv(path)
    numbers = [name for name in frame.columns if name.isdigit()]
    for place, (_, rows) in enumerate(frame.groupby("task")):
        known = rows[numbers].dropna(axis=1)
        losses = np.maximum(1 - known.to_numpy(float), LOWEST)
        sizes = np.array(known.columns, dtype=float)
        table = LossTable(tuple(rows.model), sizes, losses, None)
        yield Case("llm", "AB"[place % 2], table, (500.0, 1000.0))


def judge(case: Case, method: str, figures: Figures) -> None:
    """Adds what the method does at every budget that leaves it sizes enough."""
    target = float(case.table.sizes[-1])
    truth = case.table.losses_at(target)
    for budget in case.budgets:
        try:
            found = select(case.table, budget, target, **METHODS[method])
        except ValueError:
            continue  # fewer sizes than parameters
        figures.pear_corr.append(pear_corr(found.forecasts, truth))  # NaN: all alike
        figures.rel_acc.append(rel_acc(found.scores, truth))
        figures.log_rmse.append(log_rmse(found.predicted_losses, truth))
        if not found.has_intervals:
            continue
        figures.cover_50.append(coverage(*found.interval_ends(0.5), truth))
        figures.cover_90.append(coverage(*found.interval_ends(0.9), truth))
        best = truth == truth.min()
        figures.said += found.best_probabilities.tolist()
        figures.true += (best / best.sum()).tolist()


def table_of(found: dict[tuple[str, str, str], Figures]) -> list[list[str]]:
    """Rows of family, half, method and its figures; the head first."""
    rows = [
        ["family", "half", "method", "cases", "PearCorr", "RelAcc", "RMSE ln L", "50 %", "90 %"]
    ]
    for (family, half, method), one in found.items():
        figures = [one.pear_corr, one.rel_acc, one.log_rmse, one.cover_50, one.cover_90]
        digits = (1, 1, 3, 0, 0)
        cells = [
            "" if np.isnan(values).all() else f"{np.nanmean(values):.{places}f}"
            for values, places in zip(figures, digits, strict=True)
        ]
        rows.append([family, half, method, str(len(one.rel_acc)), *cells])
    return rows


def verdicts_of(found: dict[tuple[str, str, str], Figures]) -> list[list[str]]:
    """Of every family and half what "blend" is asked for, what it misses in bold; the head first.

    The best of the other methods is taken after the fact.  PearCorr: cases in which it is above
    that of "ats".
    """
    rows = [["family", "half", "RelAcc less the best", "PearCorr above ats", "50 %", "90 %"]]
    for (family, half, method), ours in found.items():
        others = {
            name: float(np.mean(one.rel_acc))
            for (*of, name), one in found.items()
            if of == [family, half] and name != "blend" and one.rel_acc
        }
        if method != "blend" or not others:
            continue
        best = max(others, key=others.__getitem__)
        less = round(float(np.mean(ours.rel_acc)) - others[best], 1)
        ats = found.get((family, half, "ats"), Figures())
        pairs = list(zip(ours.pear_corr, ats.pear_corr, strict=False))
        cells = [
            _bold(f"{less:+.1f} ({best})", less < -BEHIND),
            f"{sum(one > other for one, other in pairs)} of {len(pairs)}",
        ]
        for (low, high), shares in zip(COVERED, (ours.cover_50, ours.cover_90), strict=True):
            mean = round(float(np.mean(shares)), 1)
            cells.append(_bold(f"{mean:.1f}", not low <= mean <= high))
        rows.append([family, half, *cells])
    return rows


def _bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def bins_of(found: dict[tuple[str, str, str], Figures]) -> list[list[str]]:
    """P(best) said and true in five bins, per family and of all; the head first."""
    heads = [f"{low:.1f} to {high:.1f}" for low, high in pairwise(BINS)]
    rows = [["method", "half", "family", *heads]]
    groups: dict[tuple[str, str, str], list[Figures]] = {}
    for (family, half, method), one in found.items():
        if one.said:
            groups.setdefault((method, half, family), []).append(one)
            groups.setdefault((method, half, "all"), []).append(one)
    for (method, half, family), ones in sorted(groups.items()):
        said = np.concatenate([one.said for one in ones])
        true = np.concatenate([one.true for one in ones])
        place = np.clip(np.digitize(said, BINS) - 1, 0, 4)
        cells = []
        for number in range(5):
            inside = place == number
            mean = (said[inside].mean(), true[inside].mean()) if inside.any() else None
            text = "" if mean is None else f"{mean[0]:.2f} {mean[1]:.2f} ({inside.sum()})"
            off = mean is not None and abs(mean[0] - mean[1]) > OFF
            cells.append(_bold(text, off and (method, family) == ("blend", "all")))
        rows.append([method, half, family, *cells])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Rows, the first a head, as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def main(argv: list[str] | None = None) -> dict[tuple[str, str, str], Figures]:
    """Judge, print, write selection_families.md and .csv."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flan", type=Path, help="losses of 30 language models (Lin et al. 2024)")
    parser.add_argument("--llm", type=Path, help="model,task,metric,50,…: accuracies by rows")
    parser.add_argument("--lcdb", type=Path, help="folder with database-logloss.csv and others")
    parser.add_argument("--most", type=int, help="LCDB data sets a measure and half; default all")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    cases: list[Case] = []
    if options.flan is not None:
        cases += flan_cases(options.flan)
    if options.llm is not None:
        cases += llm_cases(options.llm)
    if options.lcdb is not None:
        cases += lcdb_cases(options.lcdb, options.most)
    if not cases:
        parser.error("no tables: give --flan, --llm or --lcdb")
    families = dict.fromkeys((case.family, case.half) for case in cases)
    found = {(*group, name): Figures() for group in families for name in options.methods}
    for case in cases:
        for name in options.methods:
            judge(case, name, found[(case.family, case.half, name)])
    table, bins = table_of(found), bins_of(found)
    verdicts = verdicts_of(found)
    said = "P(best) said, how often true, and of how many, by bin of what was said:"
    most = "all" if options.most is None else f"at most {options.most} a measure and half"
    asked = "blend, what it is asked for; missed in bold:"
    text = (
        f"Commit {commit()}; LCDB data sets: {most}.\n\n{asked}\n\n{markdown(verdicts)}\n"
        f"All figures:\n\n{markdown(table)}\n{said}\n\n{markdown(bins)}"
    )
    print(text)
    write_atomically(options.results / "selection_families.md", text)
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows(table)
    write_atomically(options.results / "selection_families.csv", rows.getvalue())
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
