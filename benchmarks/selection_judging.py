"""What fewer dev rows, and a smaller largest subset, cost the choice of a short live selection.

    python -m benchmarks.selection_judging --lcdb lcdb-0.1.0/lcdb

LCDB's accuracies (half A, see `selection_families`) of scikit-learn learners at 16 to 128 rows
stand for the true ones; what a selection sees is drawn anew, right or wrong on so many dev
rows, the same for all learners and sizes.  A row is hard for all learners alike (half of the
variance), for one learner (0.3), for one learner at one size (0.2).  The target is 1,024 rows.
Printed and written to results/selection_judging.csv: means over data sets and draws of RelAcc and
of the points of accuracy lost, and what it would cost live with 3 epochs, as a share of full
tuning, judging counted.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.common.report import RESULTS, commit, write_rows
from benchmarks.selection_families import Case, lcdb_cases
from jachess_ext.evaluation.extras import require
from jachess_ext.scaling import LossTable, rel_acc, select

TARGET, EPOCHS = 1024, 3
LADDERS = ((16, 45, 128), (16, 45, 91), (16, 32, 64))
JUDGED = (200, 120, 80)
DESIGNS = (
    ("blend", LADDERS[0], None),
    *(("blend", sizes, judged) for sizes in LADDERS for judged in JUDGED),
    *(("subtuning", sizes[-1:], judged) for sizes in LADDERS for judged in JUDGED),
)


@dataclass
class Row:
    """A design; `judged` None: the true accuracies. `error`: of `lost`, the standard error."""

    method: str
    sizes: str
    judged: int | None
    rel_acc: float
    lost: float
    error: float
    cost: float
    tables: int
    commit: str


def seen(errors: np.ndarray, judged: int, draw: np.random.Generator) -> np.ndarray:
    """Shares of so many rows that are wrong, half a row at least, [n, m]: of true ones [n, m]."""
    models, sizes = errors.shape
    row, learner = draw.standard_normal(judged), draw.standard_normal((models, 1, judged))
    own = draw.standard_normal((models, sizes, judged))
    ease = np.sqrt(0.5) * row + np.sqrt(0.3) * learner + np.sqrt(0.2) * own
    limit = require("scipy.stats").norm.ppf(np.clip(errors, 1e-9, 1 - 1e-9))
    return np.maximum((ease < limit[..., None]).mean(-1), 0.5 / judged)


def judge(case: Case, number: int) -> list[tuple[float, float]]:
    """RelAcc and points lost of every design; the same rows are drawn for all."""
    table = case.table
    truth = table.losses_at(TARGET)
    found = []
    for method, sizes, judged in DESIGNS:
        errors = np.stack([table.losses_at(size) for size in sizes], -1)
        if judged is not None:
            errors = seen(errors, judged, np.random.default_rng(number))
        known = LossTable(table.names, np.array(sizes, float), errors, None)
        scores = select(known, sizes[-1], TARGET, method).scores
        found.append((rel_acc(scores, truth), 100 * (truth[scores.argmin()] - truth.min())))
    return found


def main(argv: list[str] | None = None) -> list[Row]:
    """Judge all designs, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lcdb", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--most", type=int, help="data sets; default all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    cases = [
        case
        for case in lcdb_cases(options.lcdb, options.most, ("accuracy",))
        if case.half == "A"
        and {TARGET, *chain(*LADDERS)} <= set(case.table.sizes)
        and np.ptp(case.table.losses_at(TARGET)) > 0
    ]
    found = np.array([[judge(case, number) for number in range(options.draws)] for case in cases])
    rows = []
    for place, (method, sizes, judged) in enumerate(DESIGNS):
        accuracy, lost = found[:, :, place].mean((0, 1))
        error = found[:, :, place, 1].mean(1).std() / np.sqrt(len(cases))
        judging = (judged or 0) / (3 * EPOCHS)  # a forward pass, in rows trained on
        cost = (sum(sizes) + len(sizes) * judging) / (TARGET + judging)
        text = " ".join(map(str, sizes))
        rows.append(Row(method, text, judged, accuracy, lost, error, cost, len(cases), commit()))
        print(
            f"{method:10s}{text:12s}{judged or 'true':>5} rows: RelAcc {accuracy:.1f}, lost "
            f"{lost:.2f} ± {error:.2f} points, cost {cost:.3f}"
        )
    write_rows(rows, options.results / "selection_judging.csv")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
