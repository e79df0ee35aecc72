"""`jachess select`: which model to fine-tune, from a table of losses on small subsets."""

from __future__ import annotations

import argparse
import sys

from ..scaling import Selection, TableError, read_table, select, sufficient_budget
from .records import print_records, write_records


def run(options: argparse.Namespace) -> None:
    """Ranks, prints, writes.

    Raises:
        ValueError: the table or the options cannot be used; no file is written.
    """
    found = _select(options)
    records = found.rows(options.level)
    flops = _flops(found)
    if options.out is not None:
        write_records(
            options.out,
            records,
            method=found.method,
            budget=found.budget,
            target=found.target,
            level=options.level,
            flops=flops[0] if flops else None,
            full_flops=flops[1] if flops else None,
        )
    print(
        f"{found.method}, losses up to {found.budget:g} ({100 * found.share:.3g} % of the target "
        f"{found.target:g})"
    )
    print_records(records)
    if flops:
        spent, full = flops
        print(f"cost {spent:.3g} FLOPs, {100 * spent / full:.3g} % of training all models in full")
    if options.out is not None:
        print(f"written to {options.out}")


def _select(options: argparse.Namespace) -> Selection:
    table = read_table(options.table)
    settings = {
        "method": options.method,
        "gamma": options.gamma,
        "tau": options.tau,
        "references": options.reference,
        "tokens": options.tokens,
        "epochs": options.epochs,
    }
    if options.confidence is not None:
        found = sufficient_budget(table, options.target, options.confidence, **settings)
        if found is not None:
            return found
        print(
            f"no size of the table decides with probability {options.confidence:g}; the largest "
            "is used",
            file=sys.stderr,
        )
    below = table.trained[table.trained < options.target]
    if not len(below):
        raise TableError(f"{options.table} has no size below the target {options.target:g}")
    return select(table, options.budget or float(below[-1]), options.target, **settings)


def _flops(found: Selection) -> tuple[float, float] | None:
    """Spent and in full, where the table tells the models' sizes."""
    try:
        return found.flops, found.full_flops
    except TableError:
        return None
