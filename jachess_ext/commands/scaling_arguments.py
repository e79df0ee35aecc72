"""The options of `jachess fit` and `jachess select`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..scaling.registry import DEFAULT, LIVE, canonical
from . import live_arguments
from .option_types import ending_in, out_path, positive, probability

_DEFAULT = "default %(default)s"
LAWS = ("lensllm", "rectified", "power", "ats", "kaplan")


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jachess fit`."""
    parser.add_argument("table", type=Path, metavar="FILE", help=_TABLE)
    parser.add_argument("--law", choices=LAWS, default="lensllm", help=_DEFAULT)
    parser.add_argument(
        "--budget", type=positive, metavar="D", help="largest size to fit to (default: all)"
    )
    parser.add_argument(
        "--target", type=positive, nargs="+", default=[], metavar="D", help="sizes to predict"
    )
    parser.add_argument(
        "--no-zero", action="store_true", help="leave a column 0 out (losses before fine-tuning)"
    )
    _add_rest(parser, ".csv or .json", out_path)


def add_select_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jachess select`: those of both kinds, of tables, of live selections."""
    parser.add_argument(
        "table", type=Path, nargs="?", metavar="FILE", help=_TABLE + "; or give --models"
    )
    parser.add_argument(
        "--target",
        type=positive,
        metavar="D",
        help="size of the full data; live: default all training rows",
    )
    parser.add_argument("--method", type=canonical, choices=LIVE, default=DEFAULT, help=_DEFAULT)
    parser.add_argument(
        "--budget",
        metavar="D",
        help="largest size used (default: the largest below --target); live: a share of the "
        "training rows such as 1/8 (default), or an amount such as 3e15flops or 20min",
    )
    parser.add_argument(
        "--confidence",
        type=probability,
        metavar="P",
        help="the smallest budget at which one model is best with this probability; live: stop "
        "there",
    )
    parser.add_argument(
        "--epochs", type=positive, metavar="N", help="over every subset; default: table 1, live 5"
    )
    table = parser.add_argument_group("from a table")
    table.add_argument(
        "--reference",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="models whose loss at --target is in the table: intervals are calibrated on them",
    )
    table.add_argument(
        "--tokens", type=positive, default=1.0, help="an example, for the FLOPs; default 1"
    )
    _add_rest(parser, "table: .csv or .json; live: a folder (default jachess-select)", Path)
    parser.add_argument(
        "--report",
        type=ending_in(".html", ".htm"),
        metavar="FILE.html",
        help="one page of curves, predictions, ranking, cost; live: default report.html in --out",
    )
    live_arguments.add_options(parser)


_TABLE = "csv: a row a model, columns named by sizes, `size` for numbers of parameters"


def _add_rest(parser: argparse.ArgumentParser, out: str, kind: Callable[[str], Path]) -> None:
    parser.add_argument(
        "--gamma", type=int, default=3, help=f"ats: points accepted unseen, {_DEFAULT}"
    )
    parser.add_argument(
        "--tau", type=positive, default=5.0, help=f"ats: deviations that stop it, {_DEFAULT}"
    )
    parser.add_argument(
        "--level", type=probability, default=0.9, help=f"of the intervals, {_DEFAULT}"
    )
    parser.add_argument("--out", type=kind, metavar="FILE", help=out)
