"""`jachess demo`: runs, prints the table, writes the report."""

from __future__ import annotations

import argparse

from ..progress import BarProgress
from .arguments import from_namespace
from .run import run
from .terminal import print_table
from .write import check_folder, write_outcome


def show(given: argparse.Namespace) -> None:
    """The whole demo, on a terminal and in the folder --out.

    Raises:
        DataError: the data, the model or the output folder cannot be used.
        MissingExtra: a library the demo needs is not installed.
    """
    options = from_namespace(given)
    check_folder(options.out)
    with BarProgress() as progress:
        outcome = run(options, progress)
    print_table(outcome)
    written = write_outcome(outcome, options.out)
    print(f"Report: {written[0]} (figures and results.json beside it)")
