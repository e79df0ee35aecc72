"""The demo on a terminal: progress bars, and the one table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ..evaluation.extras import require
from .finetune import TITLES
from .results import ARROWS, Outcome, table
from .run import Progress


class BarProgress(Progress):
    """A bar over all steps with the time left, on stderr; a context manager."""

    def __init__(self) -> None:
        rich = require("rich.progress")
        console = require("rich.console").Console(stderr=True)
        columns = [
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
        ]
        self._bar: Any = rich.Progress(*columns, console=console)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def total(self, count: int) -> None:
        """See `Progress`."""
        self._bar.update(self._task, total=count)

    def advance(self) -> None:
        """See `Progress`."""
        self._bar.advance(self._task)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See `Progress`."""
        self._bar.update(self._task, description=name)
        if not self._bar.console.is_terminal:
            self._bar.console.print(name)
        yield


def print_table(outcome: Outcome, width: int | None = None) -> None:
    """Prints the task, the baseline, the table, and a sentence for each of its rows.

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
    drawn = rich_table(caption="mean ± spread over seeds; ↑ higher is better, ↓ lower is better")
    drawn.add_column("")
    for method in outcome.methods:
        drawn.add_column(TITLES[method], justify="right")
    for row in rows:
        cells = (row.cell(method) if method in row.values else "" for method in outcome.methods)
        drawn.add_row(text(row.title + ARROWS[row.better]), *map(text, cells))
    console.print(drawn)
    for row in rows:
        if row.sentence:
            console.print(text.assemble((f"{row.title}: ", "bold"), row.sentence))
