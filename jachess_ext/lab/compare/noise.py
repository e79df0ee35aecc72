"""Noise in the rows of a task: wrong labels for training, and changed texts for evaluation."""

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
    """Change the labels of a random share of the training rows to another class.

    Args:
        task: a classification task.
        share: share of the training rows that get a wrong label, drawn uniformly.
        seed: seed of the draw.

    Raises:
        DataError: `task` is a regression task.
    """
    if task.is_regression:
        raise DataError(f"{task.name}: label noise is of classes, and its labels are numbers")
    generator = torch.Generator().manual_seed(seed)
    count = len(task.train)
    wrong_rows = torch.randperm(count, generator=generator)[: round(share * count)].tolist()
    # offsets are at least 1, as 0 would keep the right label
    offsets = torch.randint(1, task.outputs, (len(wrong_rows),), generator=generator).tolist()
    labels = list(task.train.labels)
    for row, offset in zip(wrong_rows, offsets, strict=True):
        labels[row] = (int(labels[row]) + offset) % task.outputs
    return replace(task, train=replace(task.train, labels=labels))


def add_text_noise(rows: Examples, change: str, share: float) -> Examples:
    """Change about a share of the words of each row, with another seed for second texts.

    Args:
        rows: the rows.
        change: kind of change, one of `settings.TEXT_NOISE`.
        share: probability that a word is changed.
    """
    second_texts = rows.second_texts
    return replace(
        rows,
        texts=noisy_texts(rows.texts, change, share, 0),
        second_texts=None if second_texts is None else noisy_texts(second_texts, change, share, 1),
    )


def noisy_texts(texts: Sequence[str], change: str, share: float, seed: int) -> list[str]:
    """Change about a share of the words of each text; words are separated by whitespace.

    Args:
        texts: the texts.
        change: kind of change, one of `settings.TEXT_NOISE`.
        share: probability that a word is changed.
        seed: seed of the changes.

    Returns:
        The changed texts, with single spaces between words.

    Examples:
        >>> noisy_texts(["a good film"], "case", 1.0, seed=0)
        ['A GOOD FILM']
    """
    rng = random.Random(f"{seed} {change}")
    return [" ".join(_CHANGES[change](text.split(), share, rng)) for text in texts]


def _typo(word: str, rng: random.Random) -> str:
    """Swap a random letter with the next, or drop, double or replace it; words of up to two
    letters are unchanged."""
    if len(word) < 3:
        return word
    index = rng.randrange(len(word) - 1)
    return rng.choice(
        (
            word[:index] + word[index + 1] + word[index] + word[index + 2 :],
            word[:index] + word[index + 1 :],
            word[: index + 1] + word[index:],
            word[:index] + rng.choice(_LETTERS) + word[index + 1 :],
        )
    )


def _toggle_punctuation(word: str, rng: random.Random) -> str:
    """Remove punctuation from the ends of a word, or append a random mark if there is none."""
    stripped = word.strip(_MARKS)
    if stripped == word:
        return word + rng.choice(_MARKS)
    return stripped or rng.choice(_MARKS)


Change = Callable[[list[str], float, random.Random], list[str]]
"""(words, share, random generator) -> changed words."""


def _word_by_word(change: Callable[[str, random.Random], str]) -> Change:
    """Return a function that applies `change` to each word with probability `share`."""

    def change_words(words: list[str], share: float, rng: random.Random) -> list[str]:
        return [change(word, rng) if rng.random() < share else word for word in words]

    return change_words


def _swap_words(words: list[str], share: float, rng: random.Random) -> list[str]:
    """Swap words with the next word with probability `share`; no word is swapped twice."""
    words, index = list(words), 0
    while index + 1 < len(words):
        if rng.random() < share:
            words[index : index + 2] = words[index + 1], words[index]
            index += 1
        index += 1
    return words


_CHANGES: dict[str, Change] = {
    "typos": _word_by_word(_typo),
    "case": _word_by_word(lambda word, rng: word.swapcase()),
    "punctuation": _word_by_word(_toggle_punctuation),
    "swaps": _swap_words,
}
