"""How far the laws are from FLAN's curves, beside LensLLM's Table 2.

    python -m benchmarks.law_errors --table flan.csv

Root mean square of (fitted − measured) loss, × 10, per model: of `rectified` fitted to all sizes
and judged on the same, with and without the loss before fine-tuning, and fitted up to 1/8 of the
data and judged on the three larger sizes, which it did not see; and the same of `power`.  `lensllm`
without a measured F is `rectified`.  The published figures are those of the README of the paper's
repository (github.com/Susan571/LENSLLM); it does not say which sizes were fitted and which judged.
Rows go to results/law_errors.csv.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks.common.report import RESULTS, commit, write_rows
from jachess_ext.scaling import LossTable, fit, read_table

PUBLISHED = {
    "facebook/opt-350m": (0.32, 1.50),
    "facebook/opt-1.3b": (0.32, 1.20),
    "facebook/opt-6.7b": (0.26, 1.31),
    "t5-small": (0.28, 1.30),
    "t5-base": (0.26, 1.26),
    "cerebras/Cerebras-GPT-256M": (0.22, 1.10),
    "cerebras/Cerebras-GPT-1.3B": (0.32, 1.00),
    "google/mt5-base": (0.32, 1.22),
    "google/mt5-large": (0.32, 1.07),
    "facebook/bart-base": (0.30, 0.96),
    "facebook/bart-large": (0.28, 0.87),
    "gpt2": (0.30, 1.23),
    "MBZUAI/LaMini-GPT-124M": (0.35, 1.00),
    "MBZUAI/LaMini-GPT-774M": (0.28, 1.13),
}
"""LensLLM's and the rectified law's RMSE × 10 on FLAN, by the models' names in the table."""


@dataclass
class Row:
    """One model, or the mean of those that the paper has; None: the paper has it not."""

    model: str
    published_lensllm: float | None
    published_rectified: float | None
    rectified: float
    rectified_without_zero: float
    rectified_ahead: float
    power: float
    power_ahead: float
    commit: str


def errors(table: LossTable, law: str, zero: bool, budget: float | None = None) -> np.ndarray:
    """Ten times the RMSE of every model, [n]: on the sizes fitted, or on those above the budget."""
    sizes, losses = (table.sizes, table.losses) if zero else (table.trained, table.trained_losses)
    fitted = sizes <= (np.inf if budget is None else budget)
    judged = fitted if budget is None else ~fitted
    found = fit(sizes[fitted], losses[:, fitted], law)
    predicted = np.asarray(found.predict(sizes[judged]))
    return 10 * np.sqrt(np.mean((predicted - losses[:, judged]) ** 2, -1))


def main(argv: list[str] | None = None) -> list[Row]:
    """Fit, judge, print, write; the mean last."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    table = read_table(options.table)
    budget = float(table.sizes[-1]) / 8
    columns = [
        errors(table, "rectified", True),
        errors(table, "rectified", False),
        errors(table, "rectified", True, budget),
        errors(table, "power", False),
        errors(table, "power", False, budget),
    ]
    rows = []
    for name, *values in zip(table.names, *columns, strict=True):
        published = PUBLISHED.get(name, (None, None))
        rows.append(Row(name, *published, *map(float, values), commit()))
    shared = [row for row in rows if row.published_lensllm is not None]
    if shared:
        means = np.mean([astuple(row)[1:-1] for row in shared], 0)
        rows.append(Row(f"mean of {len(shared)}", *map(float, means), commit()))
    print("  ".join(field.name for field in fields(Row)[:-1]))
    for row in rows:
        cells = ["" if x is None else f"{x:.2f}" for x in astuple(row)[1:-1]]
        print(f"{row.model:24s}" + "  ".join(cells))
    write_rows(rows, options.results / "law_errors.csv")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
