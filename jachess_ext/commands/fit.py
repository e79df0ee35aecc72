"""`jachess fit`: a scaling law through every row of a table of losses."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..scaling import FittedLaw, LossTable, fit, read_table
from ..scaling.laws import LAWS
from .records import print_records, write_records


def run(options: argparse.Namespace) -> None:
    """Fits, prints, writes.

    Raises:
        ValueError: the table or the options cannot be used; no file is written.
    """
    table = read_table(options.table, fewest=1)
    table = table.up_to(options.budget or float(table.sizes[-1]))
    records = _records(table, options)
    if options.out is not None:
        write_records(options.out, records, law=options.law, level=options.level)
    print(f"{options.law} law, {len(table.trained)} sizes up to {table.sizes[-1]:g}")
    print_records(records)
    if options.out is not None:
        print(f"written to {options.out}")


def _records(table: LossTable, options: argparse.Namespace) -> list[dict[str, Any]]:
    zero = options.law in LAWS and LAWS[options.law].reads_zero and not options.no_zero
    sizes, losses = (table.sizes, table.losses) if zero else (table.trained, table.trained_losses)
    if options.law == "kaplan":
        fitted: Any = fit(sizes, losses, "kaplan", parameters=table.known_parameters())
        models = zip(table.names, table.known_parameters(), strict=True)
        return [
            {"name": name} | fitted.params | _targets(fitted.for_model(n), options)
            for name, n in models
        ]
    fitted = fit(sizes, losses, options.law, gamma=options.gamma, tau=options.tau)
    columns = fitted.params | _targets(fitted, options)
    if fitted.has_width and (found := fitted.transition_at(options.level)) is not None:
        columns |= {"D*": found.size, "D* low": found.low, "D* high": found.high}
    arrays = {key: np.broadcast_to(values, len(losses)) for key, values in columns.items()}
    return [
        {"name": name} | {key: float(values[row]) for key, values in arrays.items()}
        for row, name in enumerate(table.names)
    ]


def _targets(fitted: FittedLaw, options: argparse.Namespace) -> dict[str, Any]:
    """Predictions with their intervals, a column each."""
    result: dict[str, Any] = {}
    for size in options.target:
        result[f"at {size:g}"] = fitted.predict(size)
        if fitted.has_width:
            result[f"low {size:g}"], result[f"high {size:g}"] = fitted.interval(size, options.level)
    return result
