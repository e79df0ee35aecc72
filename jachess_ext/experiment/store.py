"""A grid's folder: a file per finished run, the results file made of them, and a lock.

<out>/grid.json        what was asked for last
<out>/runs/<name>.json one finished run; written whole or not at all, so a killed grid goes on
<out>/results.jsonl    the records of all finished runs of the grid, in its order
<out>/report.html      drawn from results.jsonl alone
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..evaluation.files import write_atomically
from ..evaluation.report import finite, write_json
from ..tasks.examples import DataError
from .jobs import Job, Record

RESULTS = "results.jsonl"


class Store:
    """The files of one grid, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other process writes here; a killed process holds nothing.

        Raises:
            DataError: another process does, or the folder cannot be made or written to.
        """
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(f"{self.folder} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise DataError(
                f"{self.folder} is in use by another jachess finetune; wait for it, or choose "
                "another --out"
            ) from None
        try:
            yield
        finally:
            os.close(descriptor)

    def write_grid(self, content: Any) -> None:
        """Keeps what was asked for."""
        write_json(self.folder / "grid.json", content)

    def finished(self, job: Job) -> Record | None:
        """The record of a run, or None where it has not been made."""
        path = self._path(job)
        if not path.is_file():
            return None
        return json.loads(path.read_text(encoding="utf-8"))["record"]

    def add(self, job: Job, record: Record, seconds: dict[str, float]) -> None:
        """Keeps a finished run."""
        write_json(self._path(job), {"record": record, "seconds": seconds})

    def assemble(self, jobs: Iterable[Job]) -> list[Record]:
        """Writes the results file anew from the finished ones among `jobs`; returns its records."""
        records = [record for job in jobs if (record := self.finished(job)) is not None]
        lines = [json.dumps(finite(record), ensure_ascii=False) for record in records]
        write_atomically(self.folder / RESULTS, "".join(line + "\n" for line in lines))
        return records

    def _path(self, job: Job) -> Path:
        return self.runs / f"{job.name}.json"


def read_results(path: Path) -> list[Record]:
    """The records of a results file, or of the one in a folder.

    Raises:
        DataError: there is none, or a line is not a record.
    """
    path = path / RESULTS if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(record, dict) or not {"kind", "task", "method", "score"} <= set(record):
            raise DataError(f"{path}: line {number} is no record of a run")
        records.append(record)
    if not records:
        raise DataError(f"{path} is empty: no run has finished yet")
    return records
