"""Tasks by a word on the command line, and the part of one that a comparison uses."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from .examples import DataError, Examples, Task
from .files import Columns, file_task, folder_task
from .hub import hub_task


def load_task(spec: str, columns: Columns = Columns()) -> Task:  # noqa: B008  frozen
    """``glue/cola``, ``hub:owner/name``, a folder (`folder_task`), or ``train.csv:dev.csv``.

    ``name=`` before any of them gives the task another name.

    Raises:
        DataError: it is none of these, or cannot be used.
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


def selected(
    task: Task,
    train: int | None,
    unlabelled: int | None,
    dev: int | None,
    seed: int,
    *,
    dev_seed: int | None = None,
) -> Task:
    """The same task with so many rows, drawn by `seed` (dev rows by `dev_seed`); None keeps all.

    Unlabelled rows are training rows that are not trained on, as long as there are such; the rest
    are training rows, too (their labels are not looked at).

    Raises:
        DataError: there are fewer training rows than asked for, or one class only among them.
    """
    count = len(task.train)
    if train is not None and train > count:
        raise DataError(f"{task.name}: {train} training rows were asked for, and it has {count}")
    order = _order(count, seed)
    taken = count if train is None else train
    free = [order[(taken + i) % count] for i in range(min(unlabelled or count, count))]
    rows = task.train.chosen(order[:taken])
    if not task.regression and len(set(rows.labels)) < 2:
        raise DataError(
            f"{task.name}: the {taken} training rows drawn are all of one class; take more rows"
        )
    if task.regression and len(set(rows.labels)) < 2:
        raise DataError(f"{task.name}: the training rows drawn all have the same label")
    return replace(
        task,
        train=rows,
        unlabelled=task.train.chosen(free),
        dev=_spread(task.dev, dev, seed if dev_seed is None else dev_seed),
    )


def with_validation(task: Task, share: float, seed: int) -> Task:
    """The task with a share of its dev rows, drawn by `seed`, as validation rows in their place.

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
    """The task with a share of its training rows labelled as another class, at random.

    Exactly round(share · N) rows, each with any of the other classes alike; dev, validation and
    unlabelled rows stay.

    Raises:
        DataError: it is a regression.
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


def _spread(examples: Examples, count: int | None, seed: int) -> Examples:
    """`count` of them, drawn by `seed`, in the order they come in."""
    if count is None or count >= len(examples):
        return examples
    return examples.chosen(sorted(_order(len(examples), seed)[:count]))


def _order(count: int, seed: int) -> list[int]:
    """The numbers below `count` in an order that `seed` decides."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def held_out(task: Task, share: float) -> Task:
    """The task with the last `share` of its training rows to judge on in place of its dev rows.

    As dev texts are, those are no unlabelled text either.

    Raises:
        DataError: one of the two parts would be empty or, in training, of one class.
    """
    count = round(share * len(task.train))
    rest = len(task.train) - count
    train = task.train.first(rest)
    if count < 1 or len(set(train.labels)) < 2:
        raise DataError(
            f"{task.name}: {len(task.train)} training rows cannot be split into {rest} to train on "
            f"and {count} to choose a strength on"
        )
    dev = task.train.part(rest, len(task.train))
    return replace(
        task, train=train, unlabelled=_without(task.unlabelled, dev), dev=dev, validation=None
    )


def _without(examples: Examples, others: Examples) -> Examples:
    """Those whose texts are not among the others'; all, where every one is."""
    known = set(zip(others.texts, others.pairs or others.texts, strict=True))
    rows = enumerate(zip(examples.texts, examples.pairs or examples.texts, strict=True))
    kept = [number for number, texts in rows if texts not in known]
    return examples.chosen(kept) if kept else examples


def digest(task: Task) -> str:
    """Eight hexadecimal digits that change with any text or label of the task."""
    parts = [
        [part.texts, part.pairs, list(part.labels)]
        for part in (task.train, task.unlabelled, task.dev, task.validation)
        if part is not None
    ]
    content = json.dumps([*parts, task.classes, task.metric.name])
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def check_shift(source: Task, target: Task) -> None:
    """Whether a model of `source` can be judged on `target`.

    Raises:
        DataError: the tasks have different classes, or only one has pairs.
    """
    if source.outputs != target.outputs or source.regression != target.regression:
        raise DataError(
            f"shift {source.name} → {target.name}: {source.outputs} outputs against "
            f"{target.outputs}; both tasks need the same classes"
        )
    named = not any(name.isdigit() for name in (*source.classes, *target.classes))
    if named and source.classes != target.classes:
        raise DataError(
            f"shift {source.name} → {target.name}: the classes are {', '.join(source.classes)} "
            f"against {', '.join(target.classes)}; both tasks need the same, in the same order"
        )
    if (source.train.pairs is None) != (target.dev.pairs is None):
        raise DataError(f"shift {source.name} → {target.name}: only one of them has text pairs")
