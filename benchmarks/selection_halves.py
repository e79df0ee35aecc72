"""Does blend stay ahead of AtS when half of the models are taken away? Random halves of a table.

    python -m benchmarks.selection_halves --table flan.csv

For every budget, shares of the halves (per cent) in which blend has the higher PearCorr than AtS
and than AtS with τ = 1, the higher and the lower RelAcc than AtS, the lower RMSE of log loss; and
the mean coverage of its 90 % intervals.  Rows go to results/selection_halves.csv.
"""

from __future__ import annotations

import csv
import io
import sys

import numpy as np

from benchmarks.common.report import commit
from benchmarks.selection import table_parser
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

FIGURES = (
    "PearCorr above AtS",
    "PearCorr above AtS tau=1",
    "RelAcc above AtS",
    "RelAcc below AtS",
    "RMSE below AtS",
    "coverage",
)


def compare(half: LossTable, budget: float, target: float) -> list[float]:
    """The figures of one half at one budget, 0 or 100 each but the last."""
    truth = half.losses_at(target)
    ours = select(half, budget, target)
    ats = select(half, budget, target, "ats")
    steep = select(half, budget, target, "ats", tau=1.0)
    corr, steep_corr, ats_corr = (pear_corr(found.forecasts, truth) for found in (ours, steep, ats))
    chosen, ats_chosen = (rel_acc(found.scores, truth) for found in (ours, ats))
    error, ats_error = (log_rmse(found.predicted_losses, truth) for found in (ours, ats))
    won = (
        corr > ats_corr,
        corr > steep_corr,
        chosen > ats_chosen,
        chosen < ats_chosen,
        error < ats_error,
    )
    return [*(100.0 * x for x in won), coverage(*ours.interval_ends(0.9), truth)]


def main(argv: list[str] | None = None) -> list[list[float]]:
    """Compare, print, write the CSV; the rows, one a budget and their mean last."""
    assert __doc__ is not None
    parser = table_parser(__doc__)
    parser.add_argument("--halves", type=int, default=20)
    options = parser.parse_args(argv)
    table = read_table(options.table)
    target = options.target or float(table.sizes[-1])
    generator = np.random.default_rng(0)
    count = len(table.names)
    found = []
    for _ in range(options.halves):
        half = table.rows(np.sort(generator.permutation(count)[: count // 2]))
        found.append([compare(half, target / fraction, target) for fraction in options.fractions])
    means = np.mean(found, axis=0)
    rows = [*means.tolist(), means.mean(0).tolist()]
    names = [*(f"1/{fraction}" for fraction in options.fractions), "mean"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "halves", "commit", "budget", *FIGURES])
    for name, row in zip(names, rows, strict=True):
        cells = [f"{value:.4g}" for value in row]
        writer.writerow([options.table.name, options.halves, commit(), name, *cells])
        print(f"{name:8s}" + "  ".join(f"{f}: {c}" for f, c in zip(FIGURES, cells, strict=True)))
    write_atomically(options.results / "selection_halves.csv", text.getvalue())
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
