"""Noise in a task's rows: wrong labels to train on, and texts with typing mistakes to judge on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..._io import DataError
from ..workbench.tasks import Examples, Task

_MARKS = ",.!?;:-"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def add_label_noise(task: Task, share: float, seed: int) -> Task:
    """Return the task with round(share · N) training rows labelled as another class, drawn evenly.

    Raises:
        DataError: it is a regression task.
    """
    if task.regression:
        raise DataError(f"{task.name}: label noise is of classes, and its labels are numbers")
    generator = torch.Generator().manual_seed(seed)
    count = len(task.train)
    wrong = torch.randperm(count, generator=generator)[: round(share * count)].tolist()
    # from 1 up: a move of 0 would leave a label right that was drawn to be wrong
    moves = torch.randint(1, task.outputs, (len(wrong),), generator=generator).tolist()
    labels = list(task.train.labels)
    for row, move in zip(wrong, moves, strict=True):
        labels[row] = (int(labels[row]) + move) % task.outputs
    return replace(task, train=replace(task.train, labels=labels))


def add_text_noise(rows: Examples, change: str, share: float) -> Examples:
    """Return the rows with about `share` of their words changed, second texts by another seed.

    Args:
        change: one of `settings.TEXT_NOISE`.
    """
    second_texts = rows.second_texts
    return replace(
        rows,
        texts=noisy_texts(rows.texts, change, share, 0),
        second_texts=None if second_texts is None else noisy_texts(second_texts, change, share, 1),
    )


def noisy_texts(texts: Sequence[str], change: str, share: float, seed: int) -> list[str]:
    """Return the texts, words separated by blanks, with about `share` of their words changed.

    Examples:
        >>> noisy_texts(["a good film"], "case", 1.0, seed=0)
        ['A GOOD FILM']
    """
    draw = random.Random(f"{seed} {change}")
    return [" ".join(_CHANGES[change](text.split(), share, draw)) for text in texts]


def _typo(word: str, draw: random.Random) -> str:
    """Swap a letter with the next, drop, double or replace it; keep words of two letters."""
    if len(word) < 3:
        return word
    at = draw.randrange(len(word) - 1)
    return draw.choice(
        (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[: at + 1] + word[at:],
            word[:at] + draw.choice(_LETTERS) + word[at + 1 :],
        )
    )


def _toggle_punctuation(word: str, draw: random.Random) -> str:
    """Remove punctuation at a word's ends, or append a mark if there is none."""
    bare = word.strip(_MARKS)
    if bare == word:
        return word + draw.choice(_MARKS)
    return bare or draw.choice(_MARKS)


Change = Callable[[list[str], float, random.Random], list[str]]


def _word_by_word(change: Callable[[str, random.Random], str]) -> Change:
    def changed(words: list[str], share: float, draw: random.Random) -> list[str]:
        return [change(word, draw) if draw.random() < share else word for word in words]

    return changed


def _swap_words(words: list[str], share: float, draw: random.Random) -> list[str]:
    """Swap words with their right neighbours, none of them twice."""
    words, at = list(words), 0
    while at + 1 < len(words):
        if draw.random() < share:
            words[at : at + 2] = words[at + 1], words[at]
            at += 1
        at += 1
    return words


_CHANGES: dict[str, Change] = {
    "typos": _word_by_word(_typo),
    "case": _word_by_word(lambda word, draw: word.swapcase()),
    "punctuation": _word_by_word(_toggle_punctuation),
    "swaps": _swap_words,
}
