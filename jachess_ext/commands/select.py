"""`jachess select`: which model to fine-tune, from a table of losses or by fine-tuning here."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import Any

from ..compare.selection import share
from ..evaluation.extras import require
from ..scaling import LossTable, Selection, TableError, read_table, select, sufficient_budget
from . import live_arguments
from .option_types import out_path
from .records import print_records, write_records

_LIVE_NEEDS = ("transformers", "accelerate", "scipy.stats", "sklearn", "rich")


def run(options: argparse.Namespace) -> None:
    """Ranks, prints, writes.

    Raises:
        ValueError: the table, the models or the options cannot be used; no file is written.
        MissingExtra: an optional library is needed and missing.
    """
    if (options.table is None) == (options.models is None):
        raise ValueError("give either a table of losses or --models with --train and --dev")
    if options.models is not None:
        for library in _LIVE_NEEDS:  # before hours of training, not after
            require(library)
        from .select_live import run as run_live

        run_live(options)
        return
    _check(options)
    _run_on_table(options)


def _check(options: argparse.Namespace) -> None:
    """The options that argparse cannot check, because both kinds of selection share them."""
    live = live_arguments.given(options)
    if live:
        name = "--" + next(iter(live)).replace("_", "-")
        raise ValueError(f"{name} is of a live selection (--models); a table has no use for it")
    if options.target is None:
        raise ValueError("a table needs --target, the size of the full data")
    if options.budget is not None and options.confidence is not None:
        raise ValueError("give either --budget or --confidence; each decides how far to look")
    if options.out is not None:
        try:
            out_path(str(options.out))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--out: {error}") from None
    try:
        options.budget = None if options.budget is None else float(options.budget)
    except ValueError:
        raise ValueError(
            f"--budget {options.budget} is no number of training examples, which a table needs"
        ) from None


def _run_on_table(options: argparse.Namespace) -> None:
    table = read_table(options.table)
    settings = {name: getattr(options, name) for name in ("gamma", "tau", "tokens")}
    settings |= {"references": options.reference, "epochs": options.epochs or 1.0}
    found = _select(options, table, settings)
    records = found.rows(options.level)
    spent, full = None, None
    with suppress(TableError):  # the table does not tell the models' sizes
        spent, full = found.flops, found.full_flops
    if options.report is not None:
        _write_report(options, table, found, settings)
    if options.out is not None:
        write_records(
            options.out,
            records,
            method=found.method,
            budget=found.budget,
            target=found.target,
            level=options.level,
            flops=spent,
            full_flops=full,
        )
    print(
        f"{found.method}, losses up to {found.budget:g} ({100 * found.share:.3g} % of the target "
        f"{found.target:g})"
    )
    print_records(
        [{k: share(v) if k == "prob_best" else v for k, v in one.items()} for one in records]
    )
    if spent is not None and full is not None:
        print(f"cost {spent:.3g} FLOPs, {100 * spent / full:.3g} % of training all models in full")
    for path in filter(None, (options.out, options.report)):
        print(f"written to {path}")


def _write_report(
    options: argparse.Namespace, table: LossTable, found: Selection, settings: dict[str, Any]
) -> None:
    from ..compare.selection import view_of_table, write_selection

    view = view_of_table(table, found, options.table.name, level=options.level, **settings)
    try:
        write_selection(options.report, view)
    except OSError as error:
        raise ValueError(f"{options.report} cannot be written: {error.strerror}") from error


def _select(options: argparse.Namespace, table: LossTable, settings: dict[str, Any]) -> Selection:
    settings = {"method": options.method, **settings}
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
    budget = float(below[-1]) if options.budget is None else options.budget
    return select(table, budget, options.target, **settings)
