"""Tasks of the `datasets` library, by name: `glue/cola`, or any with splits train and dev."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..evaluation.extras import require
from ..evaluation.metrics import ACCURACY, GLUE, SPEARMAN
from .examples import DataError, Examples, Task
from .files import Columns
from .positive_class import positive_second


def hub_task(name: str, columns: Columns) -> Task:
    """A task of the `datasets` library: `glue/cola`, or `owner/name` with splits train and dev.

    Labels that are fractions make it a regression task (`glue/stsb`), judged by rank correlation.

    Raises:
        DataError: it cannot be loaded, has one class only, or lacks columns or splits.
        MissingExtra: `datasets` is not installed.
    """
    datasets = require("datasets")
    group, _, subset = name.partition("/")
    if group == "glue" and subset not in _GLUE_COLUMNS:
        raise DataError(f"unknown GLUE task {subset!r}; known are {', '.join(_GLUE_COLUMNS)}")
    try:
        loaded = datasets.load_dataset(*(("glue", subset) if group == "glue" else (name,)))
    except Exception as error:  # the library raises many kinds; to the user they are one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"data set {name!r} could not be loaded: {reason}") from error
    return _from_splits(name, subset if group == "glue" else "", loaded, columns)


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


def _from_splits(name: str, glue: str, loaded: Any, columns: Columns) -> Task:
    if glue in _GLUE_COLUMNS:
        text, pair = _GLUE_COLUMNS[glue]
        columns = Columns(text, pair, "label")
    dev_name = next(
        (s for s in ("validation", "validation_matched", "dev", "test") if s in loaded), None
    )
    if "train" not in loaded or dev_name is None:
        raise DataError(
            f"data set {name!r} needs the splits train and validation; it has {', '.join(loaded)}"
        )
    split = {"train": loaded["train"], "dev": loaded[dev_name]}
    for wanted in filter(None, (columns.text, columns.pair, columns.label)):
        if wanted not in split["train"].column_names:
            raise DataError(
                f"data set {name!r} has no column {wanted!r}; "
                f"it has {', '.join(split['train'].column_names)}"
            )
    feature = split["train"].features.get(columns.label)
    names = getattr(feature, "names", None)  # of a ClassLabel, whose values are ids
    found = {part: list(rows[columns.label]) for part, rows in split.items()}
    for part, values in found.items():
        _check_labelled(f"data set {name!r}: row {{}} of its {part} split", values, names)
    regression = columns.regression or any(isinstance(value, float) for value in found["train"])
    known = sorted(set(found["train"]))
    if len(known) < 2:
        raise DataError(
            f"data set {name!r}: column {columns.label!r} must hold two or more classes"
        )
    index = {value: i for i, value in enumerate(range(len(names)) if names else known)}
    examples = {}
    for part, rows in split.items():
        unknown = set() if regression else set(found[part]) - set(index)
        if unknown:
            raise DataError(
                f"data set {name!r}: its {part} split has labels that train lacks: "
                f"{sorted(unknown)}"
            )
        pairs = list(rows[columns.pair]) if columns.pair else None
        labels = [float(value) if regression else index[value] for value in found[part]]
        examples[part] = Examples(list(rows[columns.text]), pairs, labels)
    titles = names or [str(value) for value in known]
    task = Task(
        name=glue or name,
        description=f"data set {name}, judged on its {dev_name} split",
        classes=() if regression else tuple(titles),
        train=examples["train"],
        unlabelled=examples["train"],
        dev=examples["dev"],
        metric=SPEARMAN if regression else GLUE.get(glue, ACCURACY),
    )
    return positive_second(task, ordered=names is not None)


def _check_labelled(place: str, labels: Sequence[Any], names: Sequence[str] | None) -> None:
    """Whether every row has a label, and the id of a class where classes have ids.

    Args:
        place: names a row, with {} for its number.
        names: of the classes, if labels are ids.
    """
    for number, label in enumerate(labels):
        if label is None or (names and label not in range(len(names))):
            expected = f"an id from 0 to {len(names) - 1}" if names else "one"
            raise DataError(
                f"{place.format(number)} has the label {label}, which means it has none; expected "
                f"{expected}: drop such rows from a copy of the data set"
            )
