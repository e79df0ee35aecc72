"""Which of two classes an F1 score is of: the second, so that one has to be the positive one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..evaluation.metrics import F1
from .examples import DataError, Examples, Task

_POSITIVE = ("equivalent", "duplicate", "is_duplicate", "paraphrase", "yes", "true", "positive")


def positive_second(task: Task, *, ordered: bool) -> Task:
    """A task judged by F1 with the positive class second; any other as it is.

    Positive is the one class whose name says so ("equivalent", "duplicate", …), else 1 of the
    labels 0 and 1, else the second where the data say an order.  In the order of the alphabet
    "not_equivalent" would come second.

    Args:
        ordered: whether the classes' order is the data's own, not the alphabet's.

    Raises:
        DataError: it cannot be told which class is the positive one, or there are not two.
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
        return reordered(task, sorted(task.classes, key=positive.count))
    if ordered or task.classes == ("0", "1"):
        return task
    raise DataError(
        f"{task.name}: F1 is the score of one class, and neither {task.classes[0]!r} nor "
        f"{task.classes[1]!r} is known as the positive one; label it 1 and the other 0, "
        "or list both in labels.json, the positive one second"
    )


def reordered(task: Task, classes: Sequence[str]) -> Task:
    """The same task with its classes in the order of `classes`; every row keeps its own."""
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
