"""A live selection's folder.

<out>/runs/<run>.json      one finished run, written whole or not at all
<out>/kernels/<run>.npz    its Θ, residuals, eigenvalues (`Kernel`); written before the record
<out>/records.jsonl        the records of all finished runs, one a line
<out>/selection.json       the result
<out>/winner/              the best model, fine-tuned on the target's rows, where that was asked for
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..evaluation.files import write_atomically
from ..evaluation.report import write_json
from ..experiment.run_folder import RunFolder, read_results_file
from ..json_data import BadJSON, check, parse_json
from ..tasks.examples import DataError
from .records import Kernel, RunRecord
from .result import LiveSelection

RECORDS = "records.jsonl"
RESULT = "selection.json"
RUN = "run.txt"
"""In the winner's folder: the name of its run."""
_KERNELS = "kernels"


class SelectionFolder(RunFolder):
    """The files of one live selection, below `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RECORDS, "jachess select")

    def finished(self, run: str) -> RunRecord | None:
        """The record of a run, or None where it has not been made.

        Warns:
            RuntimeWarning: its record or kernel is not whole; it is set aside, to be made again.
        """
        content = self.read_run(run)
        if content is None:
            return None
        try:
            record = RunRecord.from_dict(content["record"])
            if record.kernel is not None:
                self.kernel(record)
        except (TypeError, ValueError) as error:
            self.set_aside(run, str(error))
            return None
        return record

    def add(self, record: RunRecord, kernel: Kernel | None) -> None:
        """Keeps a finished run; the record last, so that there is none without its kernel.

        A run that was lost is not kept: the next command makes it again.
        """
        if record.lost:
            return
        if kernel is not None:
            assert record.kernel is not None
            write_atomically(self._kernel_path(record.kernel), kernel.to_bytes())
        self.write_run(record.run, {"record": record.to_dict()})

    def kernel(self, record: RunRecord) -> Kernel:
        """The kernel of a run.

        Raises:
            DataError: the run has none, or its file is missing or not whole.
        """
        if record.kernel is None:
            reason = record.error or "none was asked for"
            raise DataError(f"the run {record.run} has no kernel: {reason}")
        path = self._kernel_path(record.kernel)
        try:
            return Kernel.from_bytes(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{path}: {error}; remove it and run the selection again") from error

    def assemble(self, records: Iterable[RunRecord]) -> None:
        """Writes the records file anew."""
        self.write_results(record.to_dict() for record in records)

    def write_selection(self, found: LiveSelection) -> None:
        """Keeps the result."""
        write_json(self.folder / RESULT, found.to_dict())

    def holds_winner(self, record: RunRecord) -> bool:
        """Whether the model of this run is the one saved as the winner."""
        try:
            return (self.winner / RUN).read_text(encoding="utf-8") == record.run
        except OSError:
            return False

    @property
    def winner(self) -> Path:
        """Where the winner is saved."""
        return self.folder / "winner"

    def _kernel_path(self, name: str) -> Path:
        return self.folder / _KERNELS / name


def read_records(folder: Path) -> list[RunRecord]:
    """The records of a live selection's folder, finished or not.

    Raises:
        DataError: there are none, or a line is no record.
    """
    path = folder / RECORDS
    found = read_results_file(path, {"run", "model", "size", "dev_loss"})
    try:
        for record in found:
            check(record, RunRecord, "the record")
        return [RunRecord.from_dict(record) for record in found]
    except (TypeError, BadJSON) as error:
        raise DataError(f"{path} holds a record of another version ({error})") from error


def read_selection(folder: Path) -> LiveSelection:
    """The result in a live selection's folder.

    Raises:
        DataError: it has not finished, or the file is not whole.
    """
    path = folder / RESULT
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        check(content, LiveSelection, "the selection")
        return LiveSelection.from_dict(content)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); the selection may not have finished: run "
            "it again, and it goes on where it was stopped"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not the result of a live selection ({error})") from error
