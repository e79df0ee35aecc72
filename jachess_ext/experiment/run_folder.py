"""A folder of finished runs: a file each, a results file made of them, and a lock.

<out>/runs/<name>.json one finished run; written whole or not at all
<out>/<results>        the records of the runs asked for, one JSON object a line
<out>/.lock            held while a process works here
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..evaluation.files import write_atomically
from ..evaluation.report import finite, write_json
from ..json_data import BadJSON, parse_json, read_json
from ..tasks.examples import DataError
from ..tasks.files import open_text

Content = dict[str, Any]


class RunFolder:
    """The files below `folder`.

    Args:
        results: name of the results file.
        command: who works here, for the message to a second one.
    """

    def __init__(self, folder: Path, results: str, command: str) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._results = results
        self._command = command

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
                f"{self.folder} is in use by another {self._command}; wait for it, or choose "
                "another --out"
            ) from None
        try:
            yield
        finally:
            os.close(descriptor)

    def read_run(self, name: str) -> Content | None:
        """What was kept of a run, or None where it has not been made.

        Warns:
            RuntimeWarning: its file is not whole; see `set_aside`.
        """
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            content = read_json(path)
            if not isinstance(content, dict) or "record" not in content:
                raise BadJSON("has no record")
        except BadJSON as error:
            self.set_aside(name, str(error))
            return None
        return content

    def write_run(self, name: str, content: Content) -> None:
        """Keeps a finished run."""
        write_json(self._path(name), content)

    def set_aside(self, name: str, reason: str) -> None:
        """Renames the file of a run that cannot be used, so that the run is made again.

        Warns:
            RuntimeWarning: always, with the reason.
        """
        path = self._path(name)
        aside = path.with_suffix(".broken")
        os.replace(path, aside)
        warnings.warn(
            f"{path} is not a whole record of a run ({reason}); it was renamed to {aside.name}, "
            "and only this run is made again",
            RuntimeWarning,
            stacklevel=4,
        )

    def write_results(self, records: Iterable[Content]) -> None:
        """Writes the results file anew."""
        lines = [json.dumps(finite(record), ensure_ascii=False) for record in records]
        write_atomically(self.folder / self._results, "".join(line + "\n" for line in lines))

    def _path(self, name: str) -> Path:
        return self.runs / f"{name}.json"


def read_results_file(path: Path, fields: Iterable[str]) -> list[Content]:
    """The records of a results file, each with at least `fields`.

    Raises:
        DataError: there is none, a line is no record, or there are no lines.
    """
    needed = set(fields)
    with open_text(path) as file:
        # not splitlines: a text may hold U+2028, which breaks a line there and none in JSON
        lines = "".join(file).removesuffix("\n").split("\n")
    if lines == [""]:
        raise DataError(f"{path} is empty: no run has finished yet")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except BadJSON as error:
            raise DataError(f"{path}: line {number} {error}") from error
        if not isinstance(record, dict) or not needed <= set(record):
            raise DataError(f"{path}: line {number} is no record of a run")
        records.append(record)
    return records
