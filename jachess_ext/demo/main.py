"""`jachess demo`: runs, prints the table, writes the report."""

from __future__ import annotations

import argparse
import shutil

from ..compare.report import to_text, wrap
from .arguments import from_namespace
from .results import Outcome, table
from .run import run
from .write import check_folder, main_table, paragraphs, write_outcome


def show(given: argparse.Namespace) -> None:
    """The whole demo, on a terminal and in the folder --out.

    Raises:
        DataError: the data, the model or the output folder cannot be used.
        MissingExtra: a library the demo needs is not installed.
    """
    options = from_namespace(given)
    check_folder(options.out)
    outcome = run(options, progress=True)
    print_table(outcome)
    written = write_outcome(outcome, options.out)
    print(f"Report: {written[0]} (figures and results.json beside it)")


def print_table(outcome: Outcome, width: int | None = None) -> None:
    """Prints the task, the baseline, what was found, and the table.

    `width` replaces the terminal's width; 80 columns suffice.
    """
    width = width or shutil.get_terminal_size().columns
    rows = table(outcome)
    print()
    for paragraph in paragraphs(outcome, rows):
        print(wrap(paragraph, width))
    caption = "mean ± spread over seeds; ↑ higher is better, ↓ lower is better"
    print(to_text(main_table(outcome, rows, caption), width))
