"""Tasks from the user's own files: csv, tsv or jsonl (also .gz) with named columns."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..evaluation.metrics import ACCURACY, GLUE, SPEARMAN
from ..json_data import BadJSON, parse_json, read_json, shown
from .columns import Columns
from .examples import DataError, Examples, Task
from .positive_class import positive_second, reordered

_PAIR = "text_pair"
_LONGEST_RECORD = 1000  # lines; beyond that a string without an end is a fault


def folder_task(folder: Path, columns: Columns) -> Task:
    """A task from a folder with files named train and dev, and perhaps ``labels.json``.

    ``labels.json`` is a list that names the classes in order ("0 = negative", or just "negative"):
    the labels are places in it, or the names themselves.  The metric is that of the GLUE task the
    folder is named after, if any; F1 is of the second class, see `positive_class`.

    Raises:
        DataError: no such folder or files in it, or as `file_task` or `positive_second`.
    """
    train, dev = (_file_named(folder, stem) for stem in ("train", "dev"))
    task = file_task(train, dev, columns)
    named = replace(
        task,
        name=folder.name,
        description=f"{folder.name}, judged on its {dev.name}",
        metric=task.metric if task.regression else GLUE.get(folder.name, ACCURACY),
    )
    names = folder / "labels.json"
    if names.is_file():
        return positive_second(_with_class_names(named, names), ordered=True)
    return positive_second(named, ordered=False)


def _file_named(folder: Path, stem: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one with the files train and dev")
    names = [stem + ending for ending in _ENDINGS]
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) != 1:
        have = ", ".join(path.name for path in found) or "none of them"
        raise DataError(f"{folder}: expected exactly one of {', '.join(names)}; it has {have}")
    return found[0]


def _with_class_names(task: Task, path: Path) -> Task:
    """The task with its classes named by a list: at the labels' places, or in the list's order."""
    if task.regression:
        return task
    found = task.classes
    try:
        names = read_json(path)
    except BadJSON as error:
        raise DataError(f"{path} must be a list of class names, but it {error}") from error
    if not isinstance(names, list) or len(names) < len(found):
        raise DataError(f"{path} must be a list that names all {len(found)} classes")
    titles = [str(name).partition(" = ")[2] or str(name) for name in names]
    if set(found) <= set(titles):
        return reordered(task, sorted(found, key=titles.index))
    try:
        places = [int(label) for label in found]
        if min(places) >= 0:
            return replace(task, classes=tuple(titles[place] for place in places))
    except (ValueError, IndexError):
        pass
    raise DataError(
        f"{path} names classes 0 to {len(titles) - 1}, but the labels are "
        f"{', '.join(map(shown, found[:10]))}"
    )


def file_task(train: Path, dev: Path, columns: Columns) -> Task:
    """A task from two files of one of the formats csv, tsv, jsonl; classes are those of `train`.

    Raises:
        DataError: a file is missing, empty, of another format, without the named columns, with an
            unreadable label, or with one class only.
    """
    records = {path: list(read_records(path)) for path in (train, dev)}
    if columns.pair is None and records[train] and _PAIR in records[train][0]:
        columns = replace(columns, pair=_PAIR)
    rows = {path: list(_rows(path, found, columns)) for path, found in records.items()}
    names: list[str] = []
    labels: dict[Path, list[float]]
    if columns.regression:
        labels = {
            path: [_number(path, i, row[2]) for i, row in enumerate(found, start=1)]
            for path, found in rows.items()
        }
    else:
        names = sorted({label for _, _, label in rows[train]}, key=_natural)
        if len(names) < 2:
            raise DataError(
                f"{train}: every label is {shown(names[0])}; a classifier needs at least two "
                "classes"
            )
        index = {name: i for i, name in enumerate(names)}
        for number, (_, _, label) in enumerate(rows[dev], start=1):
            if label not in index:
                raise DataError(
                    f"{dev}: record {number} has the label {shown(label)}, which {train} does not "
                    f"have; known labels are {', '.join(map(shown, names[:10]))}"
                )
        labels = {path: [index[row[2]] for row in found] for path, found in rows.items()}
    examples = {path: _examples(found, labels[path]) for path, found in rows.items()}
    what = f"{len(names)} classes" if names else "numbers"
    return Task(
        name=train.name.partition(".")[0],
        description=f"{what} from {train.name}, judged on {dev.name}",
        classes=tuple(names),
        train=examples[train],
        unlabelled=examples[train],
        dev=examples[dev],
        metric=ACCURACY if names else SPEARMAN,
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
        yield text, pair, _label(path, number, columns, record[columns.label])
    if number == 0:
        raise DataError(f"{path} is empty: it has no records; a task needs some in train and dev")


def _label(path: Path, number: int, columns: Columns, value: Any) -> str:
    kinds = (str, int, float) if columns.regression else (str, int)
    if isinstance(value, kinds) and str(value).strip():
        return str(value).strip()
    raise DataError(
        f"{path}: record {number} has an unreadable label in column {columns.label!r}: "
        f"{shown(value)}; expected a {'number' if columns.regression else 'word or a whole number'}"
    )


def _number(path: Path, number: int, label: str) -> float:
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}: record {number} has the label {shown(label)}; expected a number")
    return value


_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a csv, tsv or jsonl file, perhaps with .gz after it.

    Raises:
        DataError: another name, or a file that cannot be read or is not well-formed.
    """
    name = path.name.lower()
    ending = next((e for e in _ENDINGS if name.endswith(e)), None)
    if ending is None:
        raise DataError(
            f"{path}: the name must end in .csv, .tsv or .jsonl, perhaps with .gz after it, which "
            "says its format"
        )
    reader = _json_lines if ".jsonl" in ending else _delimited
    with open_text(path) as file:
        yield from reader(path, file)


@contextmanager
def open_text(path: Path) -> Iterator[Iterable[str]]:
    """The lines of a UTF-8 text, or of a gzip file of one where the name ends in .gz.

    Raises:
        DataError: what goes wrong while they are read.
    """
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except csv.Error as error:
        raise DataError(f"{path} is not well-formed: {error}") from error


def _delimited(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    tabs = ".tsv" in path.name.lower()
    reader = csv.DictReader(file, dialect="excel-tab" if tabs else "excel")
    names = list(reader.fieldnames or ())
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has the column {twice!r} twice")
    for number, record in enumerate(reader, start=1):
        if None in record:  # type: ignore[comparison-overlap]
            raise DataError(
                f"{path}: record {number} has more cells than the header has names "
                f"({len(names)}); put quotes round texts with a separator in them"
            )
        yield record


def _json_lines(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One object a line; a string may hold a raw line break, as in some published files."""
    start, text = 1, ""
    for number, line in enumerate(file, start=1):
        if not text and not line.strip():
            start = number + 1
            continue
        text += line
        try:
            record = parse_json(text, constants=True, strict=False)
        except BadJSON as error:
            if "Unterminated string" in str(error) and number - start < _LONGEST_RECORD:
                continue
            raise DataError(f"{path}: line {start} {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {start} is not a JSON object with named columns")
        yield record
        start, text = number + 1, ""
    if text:
        raise DataError(f"{path}: line {start} is not JSON (it has a string without an end)")


def _natural(label: str) -> tuple[int, int, str]:
    """Sort key: whole numbers by value, before words."""
    try:
        return (0, int(label), label)
    except ValueError:
        return (1, 0, label)


def _examples(rows: list[Row], labels: list[float]) -> Examples:
    pairs = [pair for _, pair, _ in rows if pair is not None]
    return Examples([text for text, _, _ in rows], pairs or None, labels)
