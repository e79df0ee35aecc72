"""The demo on a terminal: the one table at the end."""

from __future__ import annotations

from ..evaluation.extras import require
from .finetune import TITLES
from .results import ARROWS, Outcome, in_short, table


def print_table(outcome: Outcome, width: int | None = None) -> None:
    """Prints the task, the baseline, what was found, and the table.

    `width` replaces the terminal's width; 80 columns suffice.
    """
    console = require("rich.console").Console(width=width)
    rich_table, text = require("rich.table").Table, require("rich.text").Text
    console.print(text(f"\nTask: {outcome.task}."))
    if outcome.naive_bayes is not None:
        console.print(
            text(f"Naive Bayes on words: {outcome.score_name} {outcome.naive_bayes:.3f}.")
        )
    rows = table(outcome)
    for paragraph in in_short(outcome, rows):
        console.print(text(paragraph))
    drawn = rich_table(caption="mean ± spread over seeds; ↑ higher is better, ↓ lower is better")
    drawn.add_column("")
    for method in outcome.methods:
        drawn.add_column(TITLES[method], justify="right")
    for row in rows:
        cells = (row.cell(method) if method in row.values else "" for method in outcome.methods)
        drawn.add_row(text(row.title + ARROWS[row.better]), *map(text, cells))
    console.print(drawn)
