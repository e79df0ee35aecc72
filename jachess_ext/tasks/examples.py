"""A task: labelled text to train and to judge on, unlabelled text, and its metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..evaluation.metrics import Metric


class DataError(ValueError):
    """The data cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Examples:
    """Texts, second texts where the task has pairs, and what each one is labelled.

    Labels are indices of classes, or numbers in a regression task.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: Sequence[float]

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int) -> Examples:
        """The first `count` examples."""
        return self.part(0, count)

    def part(self, start: int, stop: int) -> Examples:
        """Examples `start` to `stop` (exclusive)."""
        return self.chosen(range(len(self))[start:stop])

    def chosen(self, indices: Sequence[int]) -> Examples:
        """The examples at `indices`, in that order."""
        return Examples(
            [self.texts[i] for i in indices],
            None if self.pairs is None else [self.pairs[i] for i in indices],
            [self.labels[i] for i in indices],
        )


@dataclass(frozen=True)
class Task:
    """A task: labelled training and dev data, and unlabelled text of its domain.

    `classes` are their names; without any it is a regression task. `unlabelled` has labels as
    `Examples` always do; no method looks at them. `validation` are rows neither trained nor judged
    on, for temperatures and the epoch to stop at; None: no such rows.

    Raises:
        DataError: a label of the training or dev data is not the index of a class.
    """

    name: str
    description: str
    classes: tuple[str, ...]
    train: Examples
    unlabelled: Examples
    dev: Examples
    metric: Metric
    validation: Examples | None = None

    def __post_init__(self) -> None:
        # a loss takes some of these for "no label" and leaves the row out without a word
        for part, examples in (("training", self.train), ("dev", self.dev)):
            known = range(self.outputs)
            wrong = (y for y in examples.labels if not self.regression and y not in known)
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
        """How many outputs a model for it has: one per class, or one number."""
        return len(self.classes) or 1
