"""Load tasks from files, folders and the Hugging Face hub, and draw the rows to use."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..._io import DataError, from_json, parse_json, require, shown
from .metrics import ACCURACY, F1, GLUE, SPEARMAN, Metric
from .settings import Columns


@dataclass(frozen=True)
class Examples:
    """Texts, second texts if the task has text pairs, and labels.

    Labels are class indices, or the numbers to predict in a regression task.

    Examples:
        >>> Examples(["a good film", "a bad film"], None, [1, 0]).slice(1, 2).rows
        [('a bad film',)]
    """

    texts: list[str]
    second_texts: list[str] | None
    labels: Sequence[float]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> Examples:
        """Return the examples at `indices`, in that order."""
        return Examples(
            [self.texts[i] for i in indices],
            None if self.second_texts is None else [self.second_texts[i] for i in indices],
            [self.labels[i] for i in indices],
        )

    def slice(self, start: int, stop: int) -> Examples:
        """Return the examples from `start` up to `stop`, which is excluded."""
        return self.take(range(len(self))[start:stop])

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The text, or both texts, of each example."""
        columns = [self.texts] if self.second_texts is None else [self.texts, self.second_texts]
        return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class Task:
    """A task: labelled training and dev rows, and unlabelled rows of its domain.

    Attributes:
        classes: names of the classes; () for a regression task.
        unlabelled: rows whose labels no method uses.
        validation: rows used neither for training nor for the scores, to fit temperatures and
            choose the best epoch.

    Raises:
        DataError: a label of the training or dev rows is not a class index.
    """

    name: str
    classes: tuple[str, ...]
    train: Examples
    unlabelled: Examples
    dev: Examples
    metric: Metric
    validation: Examples | None = None

    def __post_init__(self) -> None:
        if self.is_regression:
            return
        classes = range(self.outputs)  # a loss may silently ignore rows with other labels
        for split, examples in (("training", self.train), ("dev", self.dev)):
            wrong = (label for label in examples.labels if label not in classes)
            if (label := next(wrong, None)) is not None:
                raise DataError(
                    f"{self.name}: a {split} row has the label {label}; expected an index of its "
                    f"{self.outputs} classes, from 0 to {self.outputs - 1}"
                )

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers rather than classes."""
        return not self.classes

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: one for each class, or one in a regression."""
        return len(self.classes) or 1


def load_task(spec: str, columns: Columns = Columns()) -> Task:  # noqa: B008  frozen
    """Load ``glue/cola``, ``hub:owner/name``, a folder (`folder_task`), or ``train.csv:dev.csv``.

    A prefix ``name=`` renames the task.

    Raises:
        DataError: ``spec`` has none of these forms, or its data cannot be used.
        MissingExtra: `datasets` (of the hub) or `pandas` (of files) is not installed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     films = Path(folder, "films.csv")
        ...     _ = films.write_text("text,label\\na good film,good\\na bad film,bad\\n")
        ...     task = load_task(f"reviews={films}:{films}")
        >>> task.name, task.classes, task.train.labels
        ('reviews', ('bad', 'good'), [1, 0])
    """
    name, equals, path = spec.partition("=")
    if equals:
        return replace(load_task(path, columns), name=name)
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

_FORMATS = (".jsonl", ".csv", ".tsv", ".txt", ".parquet")
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")


def file_task(train: Path, dev: Path, columns: Columns) -> Task:
    """Load a task from two csv, tsv, jsonl (also .gz) or parquet files; the classes are the labels
    of `train`.

    Raises:
        DataError: a file is missing, empty or of another format, lacks a column, or has an invalid
            label or only one class.
        MissingExtra: `pandas` is not installed.
    """
    parts = [(str(path), read_records(path)) for path in (train, dev)]
    if columns.pair is None and any("text_pair" in record for record in parts[0][1][:1]):
        columns = replace(columns, pair="text_pair")
    return _build_task(train.name.partition(".")[0], parts[0], parts[1], columns)


def folder_task(folder: Path, columns: Columns) -> Task:
    """Load a task from a folder with files named train and dev.

    A folder named after a GLUE task gets that task's metric; F1 refers to the class labelled 1.

    Raises:
        DataError: the folder or its files do not exist, the metric is F1 but the labels are not 0
            and 1, or for a reason of `file_task`.
    """
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
    task = replace(
        task,
        name=folder.name,
        metric=task.metric if task.is_regression else GLUE.get(folder.name, ACCURACY),
    )
    if task.metric is F1 and task.classes != ("0", "1"):
        raise DataError(
            f"{task.name}: F1 is of the class labelled 1, of 0 and 1, but the labels are "
            f"{', '.join(map(shown, task.classes[:10]))}; label them so, or rename the folder to "
            "have it judged by accuracy"
        )
    return task


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a csv, tsv, jsonl or txt file, which may be gzipped, or a parquet file.

    A record of a txt file is a non-blank line, under the key ``text``.  Cells of csv and tsv are
    strings: "007", "NA" and "2024-01-01" are not converted.  (`datasets.load_dataset` would infer
    types, making "01" and "1" one class, and would take a surplus first cell for an index, shifting
    every text by one column.)

    Raises:
        DataError: the file's name has another ending, or the file cannot be read or is malformed.
        MissingExtra: `pandas` is not installed, and the file is neither jsonl nor txt.
    """
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(_FORMATS):
        raise DataError(
            f"{path}: the name must end in .csv, .tsv, .jsonl or .txt, perhaps with .gz after it, "
            "or in .parquet, which says its format"
        )
    if name.endswith(".txt"):
        with open_text(path) as lines:
            return [{"text": line.strip()} for line in lines if line.strip()]
    if name.endswith(".jsonl"):
        with open_text(path) as lines:
            named_lines = ((f"{path}: line {n}", line) for n, line in enumerate(lines, start=1))
            return [
                from_json(parse_json(line, name, lenient=True), dict[str, Any], name)
                for name, line in named_lines
                if line.strip()
            ]
    pandas = require("pandas")
    with _data_errors(path), warnings.catch_warnings():
        # pandas gives this warning if it drops the last cells of rows longer than the header.
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        if name.endswith(".parquet"):
            frame = pandas.read_parquet(path)
        else:
            separator = "\t" if name.endswith(".tsv") else ","
            frame = pandas.read_csv(
                path,
                sep=separator,
                dtype=str,
                keep_default_na=False,
                index_col=False,
                engine="python",  # distinguishes a missing cell from an empty one
            )
    # pandas renames the second of two equal columns to "column.1".
    if twice := [column for column in frame if f"{column}.1" in frame]:
        raise DataError(f"{path} has the column {twice[0]!r} twice")
    return frame.to_dict("records")  # type: ignore[no-any-return]


@contextmanager
def open_text(path: Path) -> Iterator[Iterable[str]]:
    """Open the lines of a UTF-8 text file, compressed by gzip if its name ends in .gz.

    Raises:
        DataError: the file cannot be opened, or reading a line fails.
    """
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with _data_errors(path), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield file


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Convert errors of reading a file, raised within the context, to DataErrors that name the
    file."""
    try:
        yield
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error
    except (OSError, ValueError, Warning) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read: {reason}") from error


# The hub

_GLUE_COLUMNS = {
    **dict.fromkeys(("cola", "sst2"), ("sentence", None)),
    **dict.fromkeys(("mrpc", "rte", "stsb"), ("sentence1", "sentence2")),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
    "mnli": ("premise", "hypothesis"),
}
# In order of preference: "test" is the last, since GLUE's test rows have no labels.
_DEV_SPLITS = ("validation", "validation_matched", "dev", "test")


def hub_task(name: str, columns: Columns) -> Task:
    """Load `glue/cola`, or a data set `owner/name` with splits train and dev, by `datasets`.

    If labels are floating point, it is a regression task (`glue/stsb`), with rank correlation as
    metric.

    Raises:
        DataError: the data set cannot be loaded, has only one class, or lacks columns, splits or
            labels.
        MissingExtra: `datasets` is not installed.
    """
    datasets = require("datasets")
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
    names = getattr(feature, "names", None)  # class names of a ClassLabel, whose values are ids
    if str(getattr(feature, "dtype", "")).startswith("float"):
        columns = replace(columns, regression=True)
    parts = [(f"data set {name!r} ({split})", list(splits[split])) for split in ("train", dev)]
    task = _build_task(name, parts[0], parts[1], columns, names)
    if glue and not task.is_regression:
        task = replace(task, metric=GLUE[glue])
    return replace(task, name=glue or name)


# From records to a task

Records = Sequence[Mapping[str, Any]]


def _build_task(
    name: str,
    train: tuple[str, Records],
    dev: tuple[str, Records],
    columns: Columns,
    ids: Sequence[str] | None = None,
) -> Task:
    """Check training and dev records, and return their task.

    Args:
        train, dev: (name for messages, records) of each set.
        ids: names of the classes if labels are class indices; None: labels are names.
    """
    (rows, labels), (dev_rows, dev_labels) = (
        _split_labels(source, records, columns, ids) for source, records in (train, dev)
    )
    class_names: tuple[str, ...] = ()
    if not columns.regression:
        # The training rows alone determine the classes and their order, so that two data sets of
        # one task (a shift) have the same indices, and a class that only dev rows have is an error,
        # not an output without training rows.
        label_names = set(map(str, labels))
        class_names = tuple(ids or sorted(label_names, key=_label_order))
        if len(label_names) < 2:
            raise DataError(
                f"{train[0]}: every label is {shown(labels[0])}; a classifier needs at least two "
                "classes"
            )
        for number, label in enumerate(dev_labels, start=1):
            if label not in class_names:
                raise DataError(
                    f"{dev[0]}: record {number} has the label {shown(label)}, which {train[0]} "
                    f"does not have; known labels are {', '.join(map(shown, class_names[:10]))}"
                )
    index = {class_name: i for i, class_name in enumerate(class_names)}
    rows, dev_rows = (
        replace(examples, labels=[y if isinstance(y, float) else index[y] for y in split_labels])
        for examples, split_labels in ((rows, labels), (dev_rows, dev_labels))
    )
    return Task(name, class_names, rows, rows, dev_rows, ACCURACY if class_names else SPEARMAN)


def _split_labels(
    source: str, records: Records, columns: Columns, ids: Sequence[str] | None
) -> tuple[Examples, list[str | float]]:
    """Check records; return examples of their texts without labels, and the labels (see `_label`).

    Args:
        source: name of the records, for messages.
    """
    if not records:
        raise DataError(f"{source} is empty: it has no records; a task needs some in train and dev")
    required = [name for name in (columns.text, columns.pair, columns.label) if name is not None]
    labels = []
    for number, record in enumerate(records, start=1):
        where = f"{source}: record {number}"
        for column in required:
            if column not in record:
                raise DataError(
                    f"{where} has no column {column!r}; it has "
                    f"{', '.join(map(repr, filter(None, record))) or 'none'} "
                    "(--columns.text and --columns.label say which are)"
                )
            if column != columns.label and not isinstance(record[column], str):
                raise DataError(f"{where} has no text in column {column!r}")
        labels.append(_label(where, record[columns.label], columns, ids))
    second_texts = None if columns.pair is None else [record[columns.pair] for record in records]
    return Examples([record[columns.text] for record in records], second_texts, ()), labels


def _label(where: str, value: object, columns: Columns, ids: Sequence[str] | None) -> str | float:
    """Check a record's label; return it as a number (regression) or as the name of a class.

    Args:
        where: name of the record, for messages.
        value: the record's label.
    """
    if ids is not None and not columns.regression:
        if isinstance(value, int) and 0 <= value < len(ids):
            return ids[value]
        raise DataError(
            f"{where} has the label {value}, which means it has none; expected an id from 0 to "
            f"{len(ids) - 1}: drop such rows from a copy of the data set"
        )
    readable = (str, int, float) if columns.regression else (str, int)
    text = str(value).strip() if isinstance(value, readable) else ""
    if text and not columns.regression:
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        expected = "number" if columns.regression else "word or a whole number"
        raise DataError(
            f"{where} has the label {shown(value)}; expected a {expected} in column "
            f"{columns.label!r}"
        )
    return number


def _label_order(label: str) -> tuple[int, int, str]:
    """Return a sort key for labels: whole numbers come first, by value, then words."""
    try:
        return (0, int(label), label)
    except ValueError:
        return (1, 0, label)


# The rows of a task that a comparison uses


def draw_rows(
    task: Task, train: int | None, unlabelled: int | None, dev: int | None, seed: int
) -> Task:
    """Return the task with these numbers of rows, drawn at random by `seed`; None keeps all.

    Unlabelled rows are rows of the training file that are not trained on, and then, if these are
    too few, rows that are.

    Raises:
        DataError: there are fewer than `train` training rows, or all drawn ones have one class.
    """
    count = len(task.train)
    if train is not None and train > count:
        raise DataError(f"{task.name}: {train} training rows were asked for, and it has {count}")
    # One order for all sizes: a smaller subset is a prefix of a larger one, and the remaining rows,
    # whose labels no method may use, are unlabelled rows of the same domain.
    order = _order(count, seed)
    size = count if train is None else train
    unlabelled_rows = [order[(size + i) % count] for i in range(min(unlabelled or count, count))]
    rows = task.train.take(order[:size])
    if len(set(rows.labels)) < 2:
        problem = "all have the same label" if task.is_regression else "are all of one class"
        raise DataError(f"{task.name}: the {size} training rows drawn {problem}; take more rows")
    dev_rows = task.dev
    if dev is not None and dev < len(dev_rows):
        dev_rows = dev_rows.take(sorted(_order(len(dev_rows), seed)[:dev]))
    return replace(task, train=rows, unlabelled=task.train.take(unlabelled_rows), dev=dev_rows)


def _order(count: int, seed: int) -> list[int]:
    """Return a random permutation of range(`count`), drawn by `seed`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def split_validation(task: Task, share: float, seed: int) -> Task:
    """Return the task with a fraction of its dev rows, drawn by `seed`, moved to validation.

    Raises:
        DataError: the dev rows or the validation rows would be empty.
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
        validation=task.dev.take(sorted(order[:count])),
        dev=task.dev.take(sorted(order[count:])),
    )


def hold_out(task: Task, share: float) -> Task:
    """Return the task with the last fraction `share` of its training rows as its dev rows.

    These rows are removed from the unlabelled rows too, unless no others would remain.

    Raises:
        DataError: the dev rows would be empty, or the training rows of one class.
    """
    total = len(task.train)
    count = round(share * total)
    train, dev = task.train.slice(0, total - count), task.train.slice(total - count, total)
    if count < 1 or len(set(train.labels)) < 2:
        raise DataError(
            f"{task.name}: {total} training rows cannot be split into {total - count} to train on "
            f"and {count} to choose a strength on"
        )
    # Texts are compared, not indices, so that duplicates of dev texts are removed as well.
    dev_texts = set(dev.rows)
    not_in_dev = [i for i, row in enumerate(task.unlabelled.rows) if row not in dev_texts]
    unlabelled = task.unlabelled.take(not_in_dev) if not_in_dev else task.unlabelled
    return replace(task, train=train, unlabelled=unlabelled, dev=dev, validation=None)


def digest(task: Task) -> str:
    """Return eight hexadecimal digits that change with any text or label of the task."""
    parts = [
        [part.texts, part.second_texts, list(part.labels)]
        for part in (task.train, task.unlabelled, task.dev, task.validation)
        if part is not None
    ]
    content = json.dumps([*parts, task.classes, task.metric.name])
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def check_shift(source: Task, target: Task) -> None:
    """Check that a model trained on `source` can be evaluated on `target`.

    Raises:
        DataError: the tasks have different classes, or only one has text pairs.
    """
    place = f"shift {source.name} → {target.name}"
    if source.outputs != target.outputs or source.is_regression != target.is_regression:
        raise DataError(
            f"{place}: {source.outputs} outputs against {target.outputs}; both tasks need the same "
            "classes"
        )
    # "0" and "1" are class numbers, not names, whose meanings cannot be compared.
    have_names = not any(name.isdigit() for name in (*source.classes, *target.classes))
    if have_names and source.classes != target.classes:
        raise DataError(
            f"{place}: the classes are {', '.join(source.classes)} against "
            f"{', '.join(target.classes)}; both tasks need the same, in the same order"
        )
    if (source.train.second_texts is None) != (target.dev.second_texts is None):
        raise DataError(f"{place}: only one of them has text pairs")
