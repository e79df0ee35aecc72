"""Tasks of the `datasets` library, by name: `glue/cola`, or any with splits train and dev."""

from __future__ import annotations

from typing import Any

from ..evaluation.extras import require
from ..evaluation.metrics import ACCURACY, GLUE
from .data import DataError, Examples, Task
from .data_files import Columns


def hub_task(name: str, columns: Columns) -> Task:
    """A task of the `datasets` library: `glue/cola`, or `owner/name` with splits train and dev.

    Raises:
        DataError: it cannot be loaded, is no classification task, or lacks columns or splits.
        MissingExtra: `datasets` is not installed.
    """
    datasets = require("datasets")
    group, _, subset = name.partition("/")
    if group == "glue" and subset == "stsb":
        raise DataError("glue/stsb is a regression task; the demo compares classifiers")
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
    values = sorted(set(split["train"][columns.label]))
    if len(values) < 2 or any(isinstance(value, float) for value in values):
        raise DataError(
            f"data set {name!r}: column {columns.label!r} must hold two or more classes"
        )
    index = {value: i for i, value in enumerate(values)}
    feature = split["train"].features.get(columns.label)
    titles = getattr(feature, "names", None) or [str(value) for value in values]
    examples = {}
    for key, rows in split.items():
        unknown = set(rows[columns.label]) - set(values)
        if unknown:
            raise DataError(
                f"data set {name!r}: its dev split has labels that train lacks: {sorted(unknown)}"
            )
        pairs = list(rows[columns.pair]) if columns.pair else None
        labels = [index[value] for value in rows[columns.label]]
        examples[key] = Examples(list(rows[columns.text]), pairs, labels)
    return Task(
        name=name,
        description=f"data set {name}, judged on its {dev_name} split",
        classes=tuple(titles),
        train=examples["train"],
        unlabelled=examples["train"],
        dev=examples["dev"],
        metric=GLUE.get(glue, ACCURACY),
    )
