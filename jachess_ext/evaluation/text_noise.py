"""Texts as people may write them: typos, letter case, punctuation, word order.

Each kind changes a share of a text's words; draws are Python's own generator's, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_MARKS = ",.!?;:-"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _typo(word: str, draw: random.Random) -> str:
    """One letter swapped with the next, dropped, doubled or replaced; short words stay."""
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


def _each(change: Callable[[str, random.Random], str]) -> Callable[..., list[str]]:
    def changed(words: list[str], share: float, draw: random.Random) -> list[str]:
        return [change(word, draw) if draw.random() < share else word for word in words]

    return changed


def _swapped(words: list[str], share: float, draw: random.Random) -> list[str]:
    """Words change places with their right neighbour; none moves twice."""
    words, at = list(words), 0
    while at + 1 < len(words):
        if draw.random() < share:
            words[at : at + 2] = words[at + 1], words[at]
            at += 1
        at += 1
    return words


KINDS: dict[str, Callable[[list[str], float, random.Random], list[str]]] = {
    "typos": _each(_typo),
    "case": _each(lambda word, draw: word.swapcase()),
    "punctuation": _each(
        lambda word, draw: (
            word.strip(_MARKS) or draw.choice(_MARKS)
            if word.strip(_MARKS) != word
            else word + draw.choice(_MARKS)
        )
    ),
    "swaps": _swapped,
}
"""case: swapped, which a tokenizer that lower-cases undoes.  punctuation: marks at a word's ends
go; a word without gets one."""


def noisy_texts(texts: Sequence[str], kind: str, share: float, seed: int) -> list[str]:
    """The texts with about `share` of their words changed; words are what blanks separate.

    Args:
        kind: one of `KINDS`.
        share: from 0 to 1.
        seed: the same gives the same texts.

    Raises:
        ValueError: another kind, or a share out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r} of noise; expected one of {', '.join(KINDS)}")
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie in [0, 1]; got {share}")
    draw = random.Random(f"{seed} {kind}")
    return [" ".join(KINDS[kind](text.split(), share, draw)) for text in texts]
