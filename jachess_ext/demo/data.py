"""What the demo trains on: a classification task, and the one it makes from installed packages."""

from __future__ import annotations

from dataclasses import dataclass

from ..evaluation.metrics import ACCURACY, Metric
from .text import PACKAGES, load_text_task


class DataError(ValueError):
    """The data cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Examples:
    """Texts, second texts where the task has pairs, and the index of each one's class."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int) -> Examples:
        """The first `count` examples."""
        return self.part(0, count)

    def part(self, start: int, stop: int) -> Examples:
        """Examples `start` to `stop` (exclusive)."""
        cut = slice(start, stop)
        pairs = None if self.pairs is None else self.pairs[cut]
        return Examples(self.texts[cut], pairs, self.labels[cut])


@dataclass(frozen=True)
class Task:
    """A classification task: labelled training and dev data, and unlabelled text of its domain.

    `unlabelled` has labels as `Examples` always do; the JacHess-unlab method does not look at them.
    """

    name: str
    description: str
    classes: tuple[str, ...]
    train: Examples
    unlabelled: Examples
    dev: Examples
    metric: Metric


def docstring_task(train_size: int, unlabelled_size: int, dev_size: int) -> Task:
    """The demo's own task (`text.load_text_task`), with further sentences as unlabelled text.

    Raises:
        DataError: a package is missing, or has too few sentences.
    """
    classes = len(PACKAGES)
    try:
        made = load_text_task(
            sum(_whole(size, classes) for size in (train_size, unlabelled_size)),
            _whole(dev_size, classes),
        )
    except ValueError as error:
        raise DataError(str(error)) from error
    everything = Examples(made.train.texts, None, made.train.labels)
    return Task(
        name="docstrings",
        description=(
            "which package does a sentence of documentation come from "
            f"({', '.join(made.classes)}; names masked; no source file in both splits)"
        ),
        classes=made.classes,
        train=everything.first(train_size),
        unlabelled=everything.part(train_size, train_size + unlabelled_size),
        dev=Examples(made.dev.texts, None, made.dev.labels),
        metric=ACCURACY,
    )


def _whole(size: int, classes: int) -> int:
    """`size` rounded up to a multiple of `classes`."""
    return -(-size // classes) * classes
