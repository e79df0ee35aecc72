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
        models = [fitted.for_model(n) for n in table.known_parameters()]
        rows = [_targets(model, options) for model in models]
        found = [dict(fitted.params) for _ in models]
    else:
        fitted = fit(sizes, losses, options.law, gamma=options.gamma, tau=options.tau)
        found = [
            {key: float(values[row]) for key, values in fitted.params.items()}
            for row in range(len(losses))
        ]
        rows = _columns(_targets(fitted, options) | _transition(fitted, options), len(losses))
    return [
        {"name": name} | parameters | row
        for name, parameters, row in zip(table.names, found, rows, strict=True)
    ]


def _targets(fitted: FittedLaw, options: argparse.Namespace) -> dict[str, Any]:
    """Predictions with their intervals, a column each."""
    result: dict[str, Any] = {}
    for size in options.target:
        result[f"at {size:g}"] = fitted.predict(size)
        if fitted.has_width:
            result[f"low {size:g}"], result[f"high {size:g}"] = fitted.interval(size, options.level)
    return result


def _transition(fitted: FittedLaw, options: argparse.Namespace) -> dict[str, Any]:
    if not fitted.has_width:
        return {}
    found = fitted.transition_at(options.level)
    if found is None:
        return {}
    return {"D*": found.size, "D* low": found.low, "D* high": found.high}


def _columns(columns: dict[str, Any], count: int) -> list[dict[str, float]]:
    """One record a row."""
    arrays = {key: np.broadcast_to(values, count) for key, values in columns.items()}
    return [{key: float(values[row]) for key, values in arrays.items()} for row in range(count)]
