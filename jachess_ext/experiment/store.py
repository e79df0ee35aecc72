"""A grid's folder: a `RunFolder` of its runs, and what was asked for.

<out>/grid.json        what was asked for last
<out>/runs/<name>.json one finished run; written whole or not at all, so a killed grid goes on
<out>/results.jsonl    the records of all finished runs of the grid, in its order; this file alone,
                       put into an empty folder, is enough for a grid to go on; a run
                       is made again once its file and its line here are gone
<out>/report.html      drawn from results.jsonl alone
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..json_data import BadJSON, parse_json
from ..tasks.examples import DataError
from .jobs import Job, Record
from .record_check import check_record, check_together
from .run_folder import RunFolder, read_results_file

RESULTS = "results.jsonl"
_RUN_NAME = re.compile(r"(tuning|final)-[A-Za-z0-9.-]+")  # `Job.name`; never a path


class Store(RunFolder):
    """The files of one grid, below `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RESULTS, "jachess finetune")

    def finished(self, job: Job) -> Record | None:
        """The record of a run, under its name as `run`, or None where it has not been made.

        Warns:
            RuntimeWarning: its file is not whole; it is set aside, to be made again.
        """
        content = self.read_run(job.name)
        if content is None:
            return None
        try:
            check_record(content["record"])
        except BadJSON as error:
            self.set_aside(job.name, str(error))
            return None
        seconds = content.get("seconds") or {}
        return {"run": job.name} | content["record"] | ({"seconds": seconds} if seconds else {})

    def add(self, job: Job, record: Record, seconds: dict[str, float]) -> None:
        """Keeps a finished run."""
        self.write_run(job.name, {"record": record, "seconds": seconds})

    def adopt(self) -> None:
        """Keeps the runs in the results file that have no file of their own.

        Lines that are no whole record are left out: their runs are made.
        """
        for record in _whole_records(self.folder / RESULTS):
            if not self._path(record["run"]).exists():
                seconds = record.pop("seconds", {})
                self.write_run(record["run"], {"record": record, "seconds": seconds})

    def assemble(self, jobs: Iterable[Job]) -> list[Record]:
        """Writes the results file anew from the finished ones among `jobs`; returns its records."""
        records = [record for job in jobs if (record := self.finished(job)) is not None]
        self.write_results(records)
        return records


def read_results(path: Path) -> list[Record]:
    """The records of a results file, or of the one in a folder.

    Raises:
        DataError: there is none, or a line is not a record, or none is of a final run.
    """
    path = path / RESULTS if path.is_dir() else path
    records = read_results_file(path, {"kind", "task", "method", "score"})
    for number, record in enumerate(records, start=1):
        try:
            check_record(record)
        except BadJSON as error:
            raise DataError(f"{path}: line {number}: {error}") from error
    try:
        check_together(records)
    except BadJSON as error:
        raise DataError(f"{path} {error}") from error
    return records


def _whole_records(path: Path) -> Iterator[Record]:
    """Of a results file, if there is one: the lines that are a record with its run's name."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = parse_json(line)
            check_record(record)
        except BadJSON:
            continue
        if _RUN_NAME.fullmatch(record.get("run", "")):
            yield record
