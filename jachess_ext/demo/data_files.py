"""Tasks from the user's own files: csv, tsv or jsonl with named columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..evaluation.metrics import ACCURACY
from .data import DataError, Examples, Task

_PAIR = "text_pair"


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns; without `pair`, the training file's `text_pair` if it has one."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"


def file_task(train: Path, dev: Path, columns: Columns) -> Task:
    """A task from two files of one of the formats csv, tsv, jsonl; classes are those of `train`.

    Raises:
        DataError: a file is missing, empty, of another format, without the named columns, with an
            unreadable label, or with one class only.
    """
    records = {path: list(_records(path)) for path in (train, dev)}
    if columns.pair is None and records[train] and _PAIR in records[train][0]:
        columns = replace(columns, pair=_PAIR)
    rows = {path: list(_rows(path, found, columns)) for path, found in records.items()}
    names = sorted({label for _, _, label in rows[train]}, key=_natural)
    if len(names) < 2:
        raise DataError(
            f"{train}: every label is {names[0]!r}; a classifier needs at least two classes"
        )
    index = {name: i for i, name in enumerate(names)}
    for number, (_, _, label) in enumerate(rows[dev], start=1):
        if label not in index:
            raise DataError(
                f"{dev}: record {number} has the label {label!r}, which {train} does not have; "
                f"known labels are {', '.join(names[:10])}"
            )
    examples = {path: _examples(found, index) for path, found in rows.items()}
    return Task(
        name=train.stem,
        description=f"{len(names)} classes from {train.name}, judged on {dev.name}",
        classes=tuple(names),
        train=examples[train],
        unlabelled=examples[train],
        dev=examples[dev],
        metric=ACCURACY,
    )


Row = tuple[str, str | None, str]


def _rows(path: Path, records: Iterable[dict[str, Any]], columns: Columns) -> Iterator[Row]:
    """(text, pair, label) of each record, checked."""
    wanted = [name for name in (columns.text, columns.pair, columns.label) if name is not None]
    number = 0
    for number, record in enumerate(records, start=1):
        for column in wanted:
            if column not in record:
                raise DataError(
                    f"{path}: record {number} has no column {column!r}; it has "
                    f"{', '.join(map(repr, filter(None, record))) or 'none'} "
                    "(choose with --text-column, --pair-column, --label-column)"
                )
        text = record[columns.text]
        pair = None if columns.pair is None else record[columns.pair]
        for cell, value in ((columns.text, text), (columns.pair, pair)):
            if cell is not None and not isinstance(value, str):
                raise DataError(f"{path}: record {number} has no text in column {cell!r}")
        yield text, pair, _label(path, number, columns.label, record[columns.label])
    if number == 0:
        raise DataError(f"{path} is empty: it has no records; a task needs some in train and dev")


def _label(path: Path, number: int, column: str, value: Any) -> str:
    if isinstance(value, (str, int)) and str(value).strip():
        return str(value).strip()
    raise DataError(
        f"{path}: record {number} has an unreadable label in column {column!r}: {value!r}; "
        "expected a word or a whole number"
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    readers = {".csv": _delimited, ".tsv": _delimited, ".jsonl": _json_lines}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: the name must end in .csv, .tsv or .jsonl, which says its format")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from reader(path, file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except csv.Error as error:
        raise DataError(f"{path} is not well-formed: {error}") from error


def _delimited(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    tabs = path.suffix.lower() == ".tsv"
    yield from csv.DictReader(file, dialect="excel-tab" if tabs else "excel")


def _json_lines(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error.msg})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number} is not a JSON object with named columns")
        yield record


def _natural(label: str) -> tuple[int, int, str]:
    """Sort key: whole numbers by value, before words."""
    try:
        return (0, int(label), label)
    except ValueError:
        return (1, 0, label)


def _examples(rows: list[Row], index: dict[str, int]) -> Examples:
    pairs = [pair for _, pair, _ in rows if pair is not None]
    return Examples(
        [text for text, _, _ in rows], pairs or None, [index[label] for _, _, label in rows]
    )
