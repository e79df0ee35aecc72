"""`jachess select`: which model to fine-tune, from a table of losses."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .option_types import ending_in, out_path, positive, probability
from .records import print_records, write_records

if TYPE_CHECKING:
    from ..scaling import LossTable, Selection

# named here and not read from `scaling.selection`, since help imports no numpy
OF_TABLES = (
    "blend",
    "lensllm",
    "rectified",
    "power",
    "ats",
    "subtuning",
    "zeroshot",
    "modelsize",
)
_DEFAULT = "default %(default)s"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jachess select`."""
    parser.add_argument(
        "table",
        type=Path,
        metavar="FILE",
        help="csv: a row a model, columns named by sizes, `size` for numbers of parameters",
    )
    parser.add_argument(
        "--target", type=positive, required=True, metavar="D", help="size of the full data"
    )
    parser.add_argument("--method", choices=OF_TABLES, default="blend", help=_DEFAULT)
    how_far = parser.add_mutually_exclusive_group()
    how_far.add_argument(
        "--budget",
        type=positive,
        metavar="D",
        help="largest size used (default: the largest below --target)",
    )
    how_far.add_argument(
        "--confidence",
        type=probability,
        metavar="P",
        help="the smallest budget at which one model is best with this probability",
    )
    parser.add_argument(
        "--reference",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="models whose loss at --target is in the table: intervals are calibrated on them",
    )
    parser.add_argument(
        "--tokens", type=positive, default=1.0, help=f"an example, for the FLOPs; {_DEFAULT}"
    )
    parser.add_argument(
        "--epochs", type=positive, default=1.0, metavar="N", help=f"over every subset; {_DEFAULT}"
    )
    parser.add_argument(
        "--gamma", type=int, default=3, help=f"ats: points accepted unseen; {_DEFAULT}"
    )
    parser.add_argument(
        "--tau", type=positive, default=5.0, help=f"ats: deviations that stop it; {_DEFAULT}"
    )
    parser.add_argument(
        "--level", type=probability, default=0.9, help=f"of the intervals; {_DEFAULT}"
    )
    parser.add_argument("--out", type=out_path, metavar="FILE", help=".csv or .json")
    parser.add_argument(
        "--report",
        type=ending_in(".html", ".htm"),
        metavar="FILE.html",
        help="one page of curves, predictions, ranking, cost",
    )


def run(options: argparse.Namespace) -> None:
    """Rank, print, write.

    Raises:
        ValueError: the table or the options cannot be used; no file is written.
        MissingExtra: an optional library is needed and missing.
    """
    from ..compare.selection import share
    from ..scaling import TableError, read_table

    table = read_table(options.table)
    settings = {name: getattr(options, name) for name in ("gamma", "tau", "tokens", "epochs")}
    settings |= {"references": options.reference}
    selection = _select(options, table, settings)
    spent, full = None, None
    with suppress(TableError):  # the table does not tell the models' sizes
        spent, full = selection.flops, selection.full_flops
    if options.report is not None:
        _write_report(options, table, selection, settings)
    rows = selection.to_frame(options.level).drop(columns=["cost", "full_cost"])
    if selection.forecast.predicted is not None:
        rows = rows.drop(columns="score")
    records = rows.dropna(axis=1, how="all").to_dict("records")
    if options.out is not None:
        write_records(
            options.out,
            records,
            method=selection.method,
            budget=selection.budget,
            target=selection.target,
            level=options.level,
            flops=spent,
            full_flops=full,
        )
    print(
        f"{selection.method}, losses up to {selection.budget:g} ({100 * selection.share:.3g} % of "
        f"the target {selection.target:g})"
    )
    print_records([{k: v if k != "prob_best" else share(v) for k, v in r.items()} for r in records])
    if spent is not None and full is not None:
        print(f"cost {spent:.3g} FLOPs, {100 * spent / full:.3g} % of training all models in full")
    for path in filter(None, (options.out, options.report)):
        print(f"written to {path}")


def _write_report(
    options: argparse.Namespace, table: LossTable, selection: Selection, settings: dict[str, Any]
) -> None:
    from ..compare.selection import view_of_table, write_selection

    view = view_of_table(table, selection, options.table.name, level=options.level, **settings)
    try:
        write_selection(options.report, view)
    except OSError as error:
        raise ValueError(f"{options.report} cannot be written: {error.strerror}") from error


def _select(options: argparse.Namespace, table: LossTable, settings: dict[str, Any]) -> Selection:
    from ..scaling import TableError, select, sufficient_budget

    settings = {"method": options.method, **settings}
    if options.confidence is not None:
        selection = sufficient_budget(table, options.target, options.confidence, **settings)
        if selection is not None:
            return selection
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
