"""Load tasks from files, folders and the Hugging Face hub, and draw the rows to use."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .._io import DataError, parse_json, read_json, require, shown
from .metrics import ACCURACY, F1, GLUE, SPEARMAN, Metric
from .settings import Columns


@dataclass(frozen=True)
class Examples:
    """Texts, second texts (`pairs`) if the task has them, and labels.

    Labels are indices of classes, or the numbers of a regression task.

    Example:
        >>> Examples(["a good film", "a bad film"], None, [1, 0]).part(1, 2).rows
        [('a bad film',)]
    """

    texts: list[str]
    pairs: list[str] | None
    labels: Sequence[float]

    def __len__(self) -> int:
        return len(self.texts)

    def chosen(self, indices: Sequence[int]) -> Examples:
        """Return the examples at `indices`, in that order."""
        return Examples(
            [self.texts[i] for i in indices],
            None if self.pairs is None else [self.pairs[i] for i in indices],
            [self.labels[i] for i in indices],
        )

    def part(self, start: int, stop: int) -> Examples:
        """Return the examples from `start` up to `stop`, which is excluded."""
        return self.chosen(range(len(self))[start:stop])

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The text, or both texts, of each example."""
        columns = [self.texts] if self.pairs is None else [self.texts, self.pairs]
        return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class Task:
    """A task: labelled training and dev rows, and unlabelled rows of its domain.

    Attributes:
        classes: their names; a regression task has none.
        unlabelled: rows whose labels no method reads.
        validation: rows neither trained nor judged on, for temperatures and the epoch to stop at.

    Raises:
        DataError: a label of the training or dev rows is not the index of a class.
    """

    name: str
    classes: tuple[str, ...]
    train: Examples
    unlabelled: Examples
    dev: Examples
    metric: Metric
    validation: Examples | None = None

    def __post_init__(self) -> None:
        if self.regression:
            return
        known = range(self.outputs)  # a loss may silently leave out rows with other labels
        for part, examples in (("training", self.train), ("dev", self.dev)):
            wrong = (label for label in examples.labels if label not in known)
            if (label := next(wrong, None)) is not None:
                raise DataError(
                    f"{self.name}: a {part} row has the label {label}; expected an index of its "
                    f"{self.outputs} classes, from 0 to {self.outputs - 1}"
                )

    @property
    def regression(self) -> bool:
        """Whether labels are numbers rather than classes."""
        return not self.classes

    @property
    def outputs(self) -> int:
        """How many outputs a model of the task has: one for each class, or one number."""
        return len(self.classes) or 1


def load_task(spec: str, columns: Columns = Columns()) -> Task:  # noqa: B008  frozen
    """Load ``glue/cola``, ``hub:owner/name``, a folder (`folder_task`), or ``train.csv:dev.csv``.

    ``name=`` before any of them gives the task another name.

    Raises:
        DataError: it is none of these, or cannot be used.
        MissingExtra: `datasets` (of the hub) or `pandas` (of parquet files) is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     films = Path(folder, "films.csv")
        ...     _ = films.write_text("text,label\\na good film,good\\na bad film,bad\\n")
        ...     task = load_task(f"reviews={films}:{films}")
        >>> task.name, task.classes, task.train.labels
        ('reviews', ('bad', 'good'), [1, 0])
    """
    name, equals, rest = spec.partition("=")
    if equals:
        return replace(load_task(rest, columns), name=name)
    if spec.startswith("glue/") and not Path(spec).is_dir():
        return hub_task(spec, columns)
    if spec.startswith("hub:"):
        return hub_task(spec.removeprefix("hub:"), columns)
    train, colon, dev = spec.partition(":")
    if colon:
        return file_task(Path(train), Path(dev), columns)
    if Path(spec).is_dir():
        return folder_task(Path(spec), columns)
    raise DataError(
        f"unknown task {spec!r}; expected glue/<name>, hub:<owner>/<name>, a folder with train and "
        "dev files, or <train file>:<dev file>"
    )


# Files

_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_LONGEST_RECORD = 1000  # lines of a JSON object; a longer string is taken to lack its end


def file_task(train: Path, dev: Path, columns: Columns) -> Task:
    """Load a task from two csv, tsv, jsonl (also .gz) or parquet files; classes are `train`'s.

    Where `train` has two columns, by other names than `columns` has, and their values tell which is
    the text and which the label, they are taken so, and stderr says it.

    Raises:
        DataError: a file is missing, empty, of another format, without the named columns, with an
            unreadable label, or with one class only.
    """
    records = {path: list(read_records(path)) for path in (train, dev)}
    if columns.pair is None and records[train] and "text_pair" in records[train][0]:
        columns = replace(columns, pair="text_pair")
    found = _by_values(records[train], columns)
    if found != columns:
        print(
            f"{train}: {found.text!r} is taken for the text and {found.label!r} for the label",
            file=sys.stderr,
        )
    columns = found
    return _task(
        name=train.name.partition(".")[0],
        train=(str(train), records[train]),
        dev=(str(dev), records[dev]),
        columns=columns,
    )


_WORDS = re.compile(r"[^\W\d_]\s+\S|(?=[^\x00-\x7f])[^\W\d_]")
"""What texts have and identifiers and dates have not: a space after a letter, or a letter beyond
ASCII's (of writing that does not part words)."""


def _by_values(records: Sequence[Mapping[str, Any]], columns: Columns) -> Columns:
    """Return which of two columns is the text and which the label, where the values tell.

    A text holds words; labels are each there twice on average, or all numbers to predict.
    """
    names = [name for name in records[0] if name] if records else []  # an index has no name
    if len(names) != 2 or {columns.text, columns.label} <= set(names) or columns.pair is not None:
        return columns

    def may_be(name: str, said: str, usual: str, told: Callable[[str], bool]) -> bool:
        return name == said or (said == usual and said not in names and told(name))

    def is_label(name: str) -> bool:
        values = [str(record.get(name)) for record in records]
        if columns.regression:
            return all(math.isfinite(_number(value)) for value in values)
        return 2 <= len(set(values)) <= len(values) / 2

    def is_text(name: str) -> bool:
        values = [record.get(name) for record in records]
        if not all(isinstance(value, str) for value in values) or is_label(name):
            return False
        return sum(bool(_WORDS.search(str(value))) for value in values) > len(values) / 2

    for text, label in (names, names[::-1]):
        if may_be(label, columns.label, Columns.label, is_label) and may_be(
            text, columns.text, Columns.text, is_text
        ):
            return replace(columns, text=text, label=label)
    return columns


def folder_task(folder: Path, columns: Columns) -> Task:
    """Load a task from a folder with files named train and dev, and perhaps ``labels.json``.

    ``labels.json`` is a list that names the classes in order ("0 = negative", or just "negative");
    labels are places in it, or the names themselves.  A folder named after a GLUE task has that
    task's metric; F1 is of the second class, see `_positive_second`.

    Raises:
        DataError: no such folder or files in it, or as `file_task` or `_positive_second`.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; expected one with the files train and dev")
    files = []
    for stem in ("train", "dev"):
        names = [stem + ending for ending in _ENDINGS]
        present = [name for name in names if (folder / name).is_file()]
        if len(present) != 1:
            raise DataError(
                f"{folder}: expected exactly one of {', '.join(names)}; it has "
                f"{', '.join(present) or 'none of them'}"
            )
        files.append(folder / present[0])
    task = file_task(files[0], files[1], columns)
    named = replace(
        task,
        name=folder.name,
        metric=task.metric if task.regression else GLUE.get(folder.name, ACCURACY),
    )
    titles = folder / "labels.json"
    if titles.is_file():
        return _positive_second(_with_class_names(named, titles), ordered=True)
    return _positive_second(named, ordered=False)


def _with_class_names(task: Task, path: Path) -> Task:
    """Name the classes by a list whose places, or whose names, are the labels."""
    if task.regression:
        return task
    names = read_json(path)
    if not isinstance(names, list) or len(names) < len(task.classes):
        raise DataError(f"{path} must be a list that names all {len(task.classes)} classes")
    titles = [str(name).partition(" = ")[2] or str(name) for name in names]
    if set(task.classes) <= set(titles):
        return _reordered(task, sorted(task.classes, key=titles.index))
    try:
        places = [int(label) for label in task.classes]
        if min(places) >= 0:
            return replace(task, classes=tuple(titles[place] for place in places))
    except (ValueError, IndexError):
        pass
    raise DataError(
        f"{path} names classes 0 to {len(titles) - 1}, but the labels are "
        f"{', '.join(map(shown, task.classes[:10]))}"
    )


# Python reads csv and json: load_dataset silently turns the text "007" into a number, a date into
# a datetime and the second of two equal column names into another name.
def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a csv, tsv or jsonl file, perhaps with .gz, or of a parquet file.

    Raises:
        DataError: another name, or a file that cannot be read or is not well-formed.
        MissingExtra: a parquet file, and pandas is not installed.
    """
    name = path.name.lower()
    if not name.endswith(_ENDINGS):
        raise DataError(
            f"{path}: the name must end in .csv, .tsv or .jsonl, perhaps with .gz after it, or in "
            ".parquet, which says its format"
        )
    if name.endswith(".parquet"):
        try:
            yield from require("pandas").read_parquet(path).to_dict("records")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
        return
    with open_text(path) as file:
        yield from _json_lines(path, file) if ".jsonl" in name else _delimited(path, file)


@contextmanager
def open_text(path: Path) -> Iterator[Iterable[str]]:
    """Open the lines of a UTF-8 text file, compressed by gzip if its name ends in .gz.

    Raises:
        DataError: the file cannot be read, or the lines as they are read.
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
    reader = csv.DictReader(file, dialect="excel-tab" if ".tsv" in path.name.lower() else "excel")
    names = list(reader.fieldnames or ())
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path} has the column {twice[0]!r} twice")
    for number, record in enumerate(reader, start=1):
        if None in record:  # type: ignore[comparison-overlap]
            raise DataError(
                f"{path}: record {number} has more cells than the header has names "
                f"({len(names)}); put quotes round texts with a separator in them"
            )
        yield record


def _json_lines(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield an object a line; strings may hold raw line breaks, as in some published files."""
    start, text = 1, ""
    for number, line in enumerate(file, start=1):
        if not text and not line.strip():
            start = number + 1
            continue
        text += line
        try:
            record = parse_json(text, f"{path}: line {start}", lenient=True)
        except DataError as error:
            if "Unterminated string" in str(error) and number - start < _LONGEST_RECORD:
                continue
            raise
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {start} is not a JSON object with named columns")
        yield record
        start, text = number + 1, ""
    if text:
        raise DataError(f"{path}: line {start} is not JSON (it has a string without an end)")


# The hub

_GLUE_COLUMNS = {
    "cola": ("sentence", None),
    "sst2": ("sentence", None),
    "mrpc": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
    "mnli": ("premise", "hypothesis"),
    "stsb": ("sentence1", "sentence2"),
}
_DEV_SPLITS = ("validation", "validation_matched", "dev", "test")


def hub_task(name: str, columns: Columns) -> Task:
    """Load `glue/cola`, or a data set `owner/name` with splits train and dev, by `datasets`.

    Labels that are fractions make it a regression task (`glue/stsb`), judged by rank correlation.

    Raises:
        DataError: it cannot be loaded, has one class only, or lacks columns, splits or labels.
        MissingExtra: `datasets` is not installed.
    """
    datasets = require("datasets", extra="hf")
    group, _, subset = name.partition("/")
    glue = subset if group == "glue" else ""
    if group == "glue":
        if glue not in _GLUE_COLUMNS:
            raise DataError(f"unknown GLUE task {glue!r}; known are {', '.join(_GLUE_COLUMNS)}")
        columns = Columns(*_GLUE_COLUMNS[glue])
    try:
        splits = datasets.load_dataset("glue", glue) if glue else datasets.load_dataset(name)
    except Exception as error:  # the library raises errors of many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"data set {name!r} could not be loaded: {reason}") from error
    dev = next((split for split in _DEV_SPLITS if split in splits), None)
    if "train" not in splits or dev is None:
        raise DataError(
            f"data set {name!r} needs the splits train and validation; it has {', '.join(splits)}"
        )
    feature = splits["train"].features.get(columns.label)
    names = getattr(feature, "names", None)  # of a ClassLabel, whose values are ids
    if str(getattr(feature, "dtype", "")).startswith("float"):
        columns = replace(columns, regression=True)
    task = _task(
        name=name,
        train=(f"data set {name!r} (train)", list(splits["train"])),
        dev=(f"data set {name!r} ({dev})", list(splits[dev])),
        columns=columns,
        ids=names,
    )
    if glue and not task.regression:
        task = replace(task, metric=GLUE[glue])
    return _positive_second(replace(task, name=glue or name), ordered=names is not None)


# From records to a task

Records = Sequence[Mapping[str, Any]]


def _task(
    name: str,
    train: tuple[str, Records],
    dev: tuple[str, Records],
    columns: Columns,
    ids: Sequence[str] | None = None,
) -> Task:
    """Check two sets of records and return their task.

    Args:
        train, dev: the name of a set in messages, and its records.
        ids: names of the classes if labels are numbers from 0 up; None: labels are names.
    """
    parts = [_labelled(place, records, columns, ids) for place, records in (train, dev)]
    titles: list[str] = []
    if not columns.regression:
        titles = list(ids or sorted(set(parts[0].labels), key=_natural))  # type: ignore[arg-type]
        if len(set(parts[0].labels)) < 2:
            raise DataError(
                f"{train[0]}: every label is {shown(parts[0].labels[0])}; a classifier needs at "
                "least two classes"
            )
        for number, label in enumerate(parts[1].labels, start=1):
            if label not in titles:
                raise DataError(
                    f"{dev[0]}: record {number} has the label {shown(label)}, which {train[0]} "
                    f"does not have; known labels are {', '.join(map(shown, titles[:10]))}"
                )
        index = {title: i for i, title in enumerate(titles)}
        parts = [replace(part, labels=[index[str(y)] for y in part.labels]) for part in parts]
    return Task(
        name=name,
        classes=tuple(titles),
        train=parts[0],
        unlabelled=parts[0],
        dev=parts[1],
        metric=ACCURACY if titles else SPEARMAN,
    )


def _labelled(place: str, records: Records, columns: Columns, ids: Sequence[str] | None) -> Any:
    """Check records and return their `Examples`, with classes by name."""
    if not records:
        raise DataError(f"{place} is empty: it has no records; a task needs some in train and dev")
    wanted = [name for name in (columns.text, columns.pair, columns.label) if name is not None]
    labels = []
    for number, record in enumerate(records, start=1):
        where = f"{place}: record {number}"
        for column in wanted:
            if column not in record:
                raise DataError(
                    f"{where} has no column {column!r}; it has "
                    f"{', '.join(map(repr, filter(None, record))) or 'none'} "
                    "(say which are the text and the label: --columns.text, --columns.label, of "
                    "select-live --columns)"
                )
            if column != columns.label and not isinstance(record[column], str):
                raise DataError(f"{where} has no text in column {column!r}")
        labels.append(_label(where, record[columns.label], columns, ids))
    pairs = None if columns.pair is None else [record[columns.pair] for record in records]
    return Examples([record[columns.text] for record in records], pairs, labels)


def _label(where: str, value: Any, columns: Columns, ids: Sequence[str] | None) -> Any:
    """Check a record's label and return it: a number, or the name of a class."""
    if ids is not None and not columns.regression:
        if isinstance(value, int) and 0 <= value < len(ids):
            return ids[value]
        raise DataError(
            f"{where} has the label {value}, which means it has none; expected an id from 0 to "
            f"{len(ids) - 1}: drop such rows from a copy of the data set"
        )
    readable = (str, int, float) if columns.regression else (str, int)
    text = str(value).strip()
    if not isinstance(value, readable) or not text:
        wanted = "number" if columns.regression else "word or a whole number"
        raise DataError(
            f"{where} has an unreadable label in column {columns.label!r}: {shown(value)}; "
            f"expected a {wanted}"
        )
    if not columns.regression:
        return text
    number = _number(text)
    if not math.isfinite(number):
        raise DataError(f"{where} has the label {shown(value)}; expected a number")
    return number


def _number(text: str) -> float:
    """Return the number that a text is, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _natural(label: str) -> tuple[int, int, str]:
    """Return a key that sorts whole numbers by value, before words."""
    try:
        return (0, int(label), label)
    except ValueError:
        return (1, 0, label)


_POSITIVE = ("equivalent", "duplicate", "is_duplicate", "paraphrase", "yes", "true", "positive")


def _positive_second(task: Task, *, ordered: bool) -> Task:
    """Return a task judged by F1 with the positive class second; any other as it is.

    Positive is the only class whose name says so ("equivalent", "duplicate", …), else 1 of the
    labels 0 and 1, else the second of classes that the data put in order.  In the order of the
    alphabet "not_equivalent" would come second.

    Args:
        ordered: whether the data, not the alphabet, put the classes in order.

    Raises:
        DataError: the positive class is unknown, or there are not two classes.
    """
    if task.metric is not F1:
        return task
    if len(task.classes) != 2:
        raise DataError(
            f"{task.name}: F1 needs two classes, and the labels have {len(task.classes)}; rename "
            "its folder to have it judged by accuracy"
        )
    positive = [name for name in task.classes if name.lower() in _POSITIVE]
    if len(positive) == 1:
        return _reordered(task, sorted(task.classes, key=positive.count))
    if ordered or task.classes == ("0", "1"):
        return task
    raise DataError(
        f"{task.name}: F1 is the score of one class, and neither {task.classes[0]!r} nor "
        f"{task.classes[1]!r} is known as the positive one; label it 1 and the other 0, "
        "or list both in labels.json, the positive one second"
    )


def _reordered(task: Task, classes: Sequence[str]) -> Task:
    """Return the task with its classes in the order of `classes`."""
    place = {index: classes.index(name) for index, name in enumerate(task.classes)}

    def moved(examples: Examples) -> Examples:
        return replace(examples, labels=[place[int(label)] for label in examples.labels])

    return replace(
        task,
        classes=tuple(classes),
        train=moved(task.train),
        unlabelled=moved(task.unlabelled),
        dev=moved(task.dev),
    )


# The part of a task that a comparison uses


def selected(
    task: Task,
    train: int | None,
    unlabelled: int | None,
    dev: int | None,
    seed: int,
    *,
    dev_seed: int | None = None,
) -> Task:
    """Return the task with so many rows, drawn by `seed` (dev rows by `dev_seed`); None keeps all.

    Unlabelled rows are those of the training file that are not trained on, then trained ones.

    Raises:
        DataError: there are fewer training rows than asked for, or all are of one class.
    """
    count = len(task.train)
    if train is not None and train > count:
        raise DataError(f"{task.name}: {train} training rows were asked for, and it has {count}")
    order = _order(count, seed)
    taken = count if train is None else train
    free = [order[(taken + i) % count] for i in range(min(unlabelled or count, count))]
    rows = task.train.chosen(order[:taken])
    if len(set(rows.labels)) < 2:
        same = "all have the same label" if task.regression else "are all of one class"
        raise DataError(f"{task.name}: the {taken} training rows drawn {same}; take more rows")
    judged = task.dev
    if dev is not None and dev < len(judged):
        drawn = _order(len(judged), seed if dev_seed is None else dev_seed)[:dev]
        judged = judged.chosen(sorted(drawn))
    return replace(task, train=rows, unlabelled=task.train.chosen(free), dev=judged)


def _order(count: int, seed: int) -> list[int]:
    """Return the numbers below `count` in a random order drawn by `seed`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def with_validation(task: Task, share: float, seed: int) -> Task:
    """Return the task with a share of its dev rows, drawn by `seed`, moved to validation.

    Raises:
        DataError: one of the two parts would be empty.
    """
    count, total = round(share * len(task.dev)), len(task.dev)
    if not 0 < count < total:
        raise DataError(
            f"{task.name}: a share of {share} of {total} dev rows leaves {count} to validate on "
            f"and {total - count} to judge on; expected some of both"
        )
    order = _order(total, seed)
    return replace(
        task,
        validation=task.dev.chosen(sorted(order[:count])),
        dev=task.dev.chosen(sorted(order[count:])),
    )


def with_wrong_labels(task: Task, share: float, seed: int) -> Task:
    """Return the task with round(share · N) training rows labelled as another class, drawn evenly.

    Raises:
        DataError: it is a regression task.
    """
    if task.regression:
        raise DataError(f"{task.name}: label noise is of classes, and its labels are numbers")
    generator = torch.Generator().manual_seed(seed)
    count = len(task.train)
    wrong = torch.randperm(count, generator=generator)[: round(share * count)].tolist()
    moves = torch.randint(1, task.outputs, (len(wrong),), generator=generator).tolist()
    labels = list(task.train.labels)
    for row, move in zip(wrong, moves, strict=True):
        labels[row] = (int(labels[row]) + move) % task.outputs
    return replace(task, train=replace(task.train, labels=labels))


def held_out(task: Task, share: float) -> Task:
    """Return the task with the last `share` of its training rows in place of the dev rows.

    They are taken out of the unlabelled rows too, unless there are no others.

    Raises:
        DataError: one of the two parts would be empty or, in training, of one class.
    """
    total = len(task.train)
    count = round(share * total)
    train, dev = task.train.part(0, total - count), task.train.part(total - count, total)
    if count < 1 or len(set(train.labels)) < 2:
        raise DataError(
            f"{task.name}: {total} training rows cannot be split into {total - count} to train on "
            f"and {count} to choose a strength on"
        )
    judged = set(dev.rows)
    free = [i for i, row in enumerate(task.unlabelled.rows) if row not in judged]
    unlabelled = task.unlabelled.chosen(free) if free else task.unlabelled
    return replace(task, train=train, unlabelled=unlabelled, dev=dev, validation=None)


def digest(task: Task) -> str:
    """Return eight hexadecimal digits that change with any text or label of the task."""
    parts = [
        [part.texts, part.pairs, list(part.labels)]
        for part in (task.train, task.unlabelled, task.dev, task.validation)
        if part is not None
    ]
    content = json.dumps([*parts, task.classes, task.metric.name])
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def check_shift(source: Task, target: Task) -> None:
    """Check that a model of `source` can be judged on `target`.

    Raises:
        DataError: the tasks have different classes, or only one has pairs.
    """
    place = f"shift {source.name} → {target.name}"
    if source.outputs != target.outputs or source.regression != target.regression:
        raise DataError(
            f"{place}: {source.outputs} outputs against {target.outputs}; both tasks need the same "
            "classes"
        )
    named = not any(name.isdigit() for name in (*source.classes, *target.classes))
    if named and source.classes != target.classes:
        raise DataError(
            f"{place}: the classes are {', '.join(source.classes)} against "
            f"{', '.join(target.classes)}; both tasks need the same, in the same order"
        )
    if (source.train.pairs is None) != (target.dev.pairs is None):
        raise DataError(f"{place}: only one of them has text pairs")
