"""Choosing among the models of a table of losses: every method at budgets of 1/8 … 1/512.

    python -m benchmarks.selection --table flan.csv

For each budget and method: PearCorr of the predicted losses with the true ones (modelsize, which
predicts none: of its scores) and RelAcc of the choice (per cent), root mean square of log loss at
the target, coverage of 90 % intervals (per cent), FLOPs as a share of training every model on the
full data, and seconds.  blend has two more coverages, both on models left out of what was used:

- ``left out``: a fifth of the models is removed in turn; mean over the five runs of the coverage
  on the models that stay.  How much the figure leans on single models.
- ``referenced``: a fifth of the models is held out in turn; the others' losses at the target
  calibrate (`references=`), and only the held-out fifth is judged.

Rows go to results/selection.csv.  Another table of the same kind: --table, --target.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import RESULTS, commit, write_rows
from jachess_ext.scaling import (
    LossTable,
    Selection,
    coverage,
    log_rmse,
    pear_corr,
    read_table,
    rel_acc,
    select,
)

FOLDS = 5
METHODS: dict[str, dict[str, Any]] = {
    "blend": {"method": "blend"},
    "ats": {"method": "ats"},
    "ats tau=1": {"method": "ats", "tau": 1.0},
    "rectified": {"method": "rectified"},
    "power": {"method": "power"},
    "subtuning": {"method": "subtuning"},
    "zeroshot": {"method": "zeroshot"},
    "modelsize": {"method": "modelsize"},
}


@dataclass
class Judged:
    """One method at one budget; None where the method has no such figure."""

    table: str
    fraction: int
    method: str
    pear_corr: float
    rel_acc: float
    log_rmse: float | None
    coverage: float | None
    coverage_left_out: float | None
    coverage_referenced: float | None
    flops_share: float | None
    seconds: float
    date: str = ""
    commit: str = ""


def judge(table: LossTable, fraction: int, target: float, name: str) -> Judged | None:
    """A method at a budget of target / fraction; None where the table is too small for it."""
    budget, truth = target / fraction, table.losses_at(target)
    start = time.perf_counter()
    try:
        found = select(table, budget, target, **METHODS[name])
    except ValueError as error:
        print(f"{name} at 1/{fraction}: {error}", file=sys.stderr)
        return None
    seconds = time.perf_counter() - start
    rows = name == "blend"
    return Judged(
        "",
        fraction,
        name,
        pear_corr(found.forecasts, truth),
        rel_acc(found.scores, truth),
        None if name in ("modelsize", "zeroshot") else log_rmse(found.predicted_losses, truth),
        _coverage(found, truth),
        _left_out(table, budget, target) if rows else None,
        _referenced(table, budget, target) if rows else None,
        None if table.parameters is None else found.flops / found.full_flops,
        seconds,
    )


def _coverage(found: Selection, truth: np.ndarray) -> float | None:
    return coverage(*found.interval_ends(0.9), truth) if found.has_intervals else None


def _folds(table: LossTable) -> list[np.ndarray]:
    order = np.random.default_rng(0).permutation(len(table.names))
    return [np.sort(order[place::FOLDS]) for place in range(FOLDS)]


def _left_out(table: LossTable, budget: float, target: float) -> float:
    shares = []
    for fold in _folds(table):
        kept = table.rows(np.setdiff1d(np.arange(len(table.names)), fold))
        shares.append(_coverage(select(kept, budget, target), kept.losses_at(target)))
    return float(np.mean(shares))


def _referenced(table: LossTable, budget: float, target: float) -> float:
    truth, inside = table.losses_at(target), np.zeros(len(table.names), dtype=bool)
    for fold in _folds(table):
        others = [name for place, name in enumerate(table.names) if place not in fold]
        low, high = select(table, budget, target, references=others).interval_ends(0.9)
        inside[fold] = ((low <= truth) & (truth <= high))[fold]
    return float(100 * inside.mean())


def show(rows: list[Judged]) -> None:
    """One block a figure: methods down, budgets across, their mean last."""
    fractions = sorted({row.fraction for row in rows})
    names = [name for name in METHODS if any(row.method == name for row in rows)]
    figures = {
        "pear_corr": "PearCorr (%)",
        "rel_acc": "RelAcc (%)",
        "log_rmse": "RMSE of ln loss",
        "coverage": "coverage of 90 % intervals (%)",
        "coverage_left_out": "… a fifth of the models removed",
        "coverage_referenced": "… calibrated on four fifths",
        "flops_share": "FLOPs / FullTuning",
        "seconds": "seconds",
    }
    for figure, title in figures.items():
        head = "".join(f"{f'1/{fraction}':>9s}" for fraction in fractions)
        print(f"\n{title:30s}{head}     mean")
        for name in names:
            found = {row.fraction: getattr(row, figure) for row in rows if row.method == name}
            values = [found.get(fraction) for fraction in fractions]
            known = [value for value in values if value is not None]
            if not known:
                continue
            digits = 1 if figure in ("pear_corr", "rel_acc") or "cover" in figure else 3
            cells = ["" if value is None else f"{value:.{digits}f}" for value in values]
            mean = f"{np.mean(known):.{digits}f}"
            print(f"  {name:28s}" + "".join(f"{cell:>9s}" for cell in [*cells, mean]))


def table_parser(description: str) -> argparse.ArgumentParser:
    """What all scripts that judge selections on a table are told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", type=Path, required=True, help="config name,0,200,…: losses by training size"
    )
    parser.add_argument("--target", type=float, help="default: the table's largest size")
    parser.add_argument("--fractions", type=int, nargs="+", default=[2**k for k in range(3, 10)])
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def main(argv: list[str] | None = None) -> list[Judged]:
    """Judge, print, write the CSV."""
    assert __doc__ is not None
    parser = table_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args(argv)
    table = read_table(options.table)
    target = options.target or float(table.sizes[-1])
    stamp = datetime.now(timezone.utc).isoformat(timespec="seconds"), commit()
    rows = []
    for fraction in options.fractions:
        for name in options.methods:
            row = judge(table, fraction, target, name)
            if row is not None:
                row.table, (row.date, row.commit) = options.table.name, stamp
                rows.append(row)
    write_rows(rows, options.results / "selection.csv")
    show(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
