"""How far a long run has come: silently, or as a bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from .evaluation.extras import require


class Progress:
    """Receives how far a run has come; this one keeps quiet, `BarProgress` draws bars."""

    def total(self, count: int) -> None:
        """How many times `advance` will be called."""

    def advance(self) -> None:
        """One step is done."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is being done meanwhile."""
        yield


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
