"""What the matrix found: docs/compatibility.csv, and docs/compatibility.md drawn from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .prepare import write_atomically

NEWEST, OLDEST = "newest", "oldest"


@dataclass(frozen=True)
class Result:
    """One cell of the matrix, or one library under a torch that it was not built against.

    Attributes:
        torch, python: as asked for, such as "2.10" and "3.12".
        transformers: "newest" or "oldest" (the oldest that pyproject.toml allows).
        built_with: the torch that the operators were built against, such as "2.10".
        tests: "full" or "quick": which choice of them.
        outcome: "passed", or the step that failed: "torch", "build", "transformers", "tests".
        versions: what was there: Python, torch, numpy, transformers.
        passed, failed, skipped: counts of tests.
        first_failure: the first line that says what went wrong, empty where nothing did.
        minutes: wall time of the cell.
        commit, date: what was tested, when.
    """

    torch: str
    python: str
    transformers: str
    built_with: str
    tests: str
    outcome: str
    versions: str
    passed: int
    failed: int
    skipped: int
    first_failure: str
    minutes: float
    commit: str
    date: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the result is of."""
        return self.torch, self.python, self.transformers, self.built_with


def read(path: Path) -> list[Result]:
    """The results of a file; none where there is no file.

    Raises:
        SystemExit: the file has other columns.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = [field.name for field in fields(Result)]
        if reader.fieldnames != names:
            raise SystemExit(f"{path} has columns other than {', '.join(names)}: move it away.")
        return [_result(row) for row in reader]


def _result(row: dict[str, str]) -> Result:
    counts = {name: int(row[name]) for name in ("passed", "failed", "skipped")}
    return Result(**{**row, **counts, "minutes": float(row["minutes"])})  # type: ignore[arg-type]


def add(path: Path, found: Iterable[Result]) -> list[Result]:
    """Writes the file anew with `found` in it, each in place of an older one of the same key."""
    results = {result.key: result for result in [*read(path), *found]}
    ordered = sorted(results.values(), key=_order)
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in ordered)
    write_atomically(path, text.getvalue())
    return ordered


def _order(result: Result) -> tuple[object, ...]:
    return _numbers(result.torch), _numbers(result.python), result.transformers, result.built_with


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


_HEAD = """# Which torch, Python and transformers it works with

Drawn from `compatibility.csv` by `make compatibility`, which makes a fresh virtual environment for
each cell, installs that torch, then the package with `pip install .` from a clean clone, and runs a
chosen part of the tests (operators against their references and `opcheck`, every jet rule,
`torch.compile`, the model families, the regulariser, the Trainer) on the installed package; where
the table of what was there says "quick", less: random calls of the operators, `torch.compile` of
one block, each family's derivatives, the Trainer's logs and resuming. A cell is passed/failed tests
with the newest transformers that this Python and torch get, then with the oldest that
pyproject.toml allowed. "not run" means just that. CI runs the whole suite, with torch 2.13 and
Python 3.11.

"""


def to_markdown(results: Sequence[Result], torches: Sequence[str], pythons: Sequence[str]) -> str:
    """The page: the matrix, operators under another torch, what was there, what failed."""
    own = [r for r in results if r.built_with == r.torch]
    by_key = {r.key: r for r in own}
    matrix = [["torch", *(f"Python {python}" for python in pythons)]]
    for torch in torches:
        cells = [
            " · ".join(_cell(by_key.get((torch, python, kind, torch))) for kind in (NEWEST, OLDEST))
            for python in pythons
        ]
        matrix.append([torch, *("not run" if c == "not run · not run" else c for c in cells)])
    parts = [_HEAD, _table(matrix), _others(results), _versions(own), _failures(results)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _cell(result: Result | None) -> str:
    if result is None:
        return "not run"
    if result.outcome in ("passed", "tests"):
        return f"{result.passed}/{result.failed}"
    return f"no {result.outcome}"


def _others(results: Sequence[Result]) -> str:
    """Operators built against one torch, loaded by another."""
    rows = [
        [r.built_with, f"{r.torch}, Python {r.python}", r.tests, f"{r.passed}/{r.failed}"]
        for r in results
        if r.built_with != r.torch
    ]
    if not rows:
        return ""
    head = ["operators built with torch", "tested with torch", "tests", "passed/failed"]
    return (
        "\n## A torch changed under a built package\n\nThe operators use torch's stable ABI, so "
        "that one binary serves every torch from 2.10 on:\n\n" + _table([head, *rows])
    )


def _versions(results: Sequence[Result]) -> str:
    head = ["torch", "Python", "transformers", "what was there", "tests"]
    head += ["skipped", "minutes", "commit"]
    rows = [
        [
            *(r.torch, r.python, r.transformers, r.versions, r.tests),
            *(str(r.skipped), f"{r.minutes:.1f}", r.commit),
        ]
        for r in results
    ]
    return "\n## What was there\n\n" + _table([head, *rows])


def _failures(results: Sequence[Result]) -> str:
    rows = [
        f"- torch {r.torch}, Python {r.python}, {r.transformers} transformers, operators built "
        f"with torch {r.built_with}: `{r.first_failure}`"
        for r in results
        if r.outcome != "passed"
    ]
    return "\n## What failed first\n\n" + "\n".join(rows) + "\n" if rows else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
