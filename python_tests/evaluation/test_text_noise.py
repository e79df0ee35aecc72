"""Changed texts: what stays, how much changes, and that a seed decides."""

from __future__ import annotations

from collections import Counter

import pytest
from jachess_ext.evaluation.text_noise import KINDS, noisy_texts

TEXTS = ["the quick brown foxes jump over seven lazy sleeping dogs at noon"] * 400
WORDS = TEXTS[0].split()


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides(kind: str) -> None:
    made = noisy_texts(TEXTS, kind, 0.2, 1)
    assert made == noisy_texts(TEXTS, kind, 0.2, 1) != noisy_texts(TEXTS, kind, 0.2, 2)
    assert noisy_texts(TEXTS, kind, 0.0, 1) == TEXTS
    assert len(made) == len(TEXTS) and all(made)


@pytest.mark.parametrize("kind", ["typos", "case", "punctuation"])
def test_the_share_of_changed_words(kind: str) -> None:
    made = [text.split() for text in noisy_texts(TEXTS, kind, 0.2, 0)]
    changeable = sum(len(word) > 2 for word in WORDS) if kind == "typos" else len(WORDS)
    count = sum(a != b for words in made for a, b in zip(words, WORDS, strict=True))
    expected = 0.2 * changeable * len(TEXTS)
    lost = 0.1 if kind == "typos" else 0.0  # a letter for itself, or two equal ones swapped
    assert expected * (1 - lost) - 4 * expected**0.5 < count < expected + 4 * expected**0.5


def test_typos_are_one_edit() -> None:
    kinds = Counter()
    for words in noisy_texts(TEXTS, "typos", 1.0, 0):
        for made, word in zip(words.split(), WORDS, strict=True):
            kinds[len(made) - len(word)] += 1
            if len(word) < 3:
                assert made == word
            if len(made) == len(word):
                apart = [i for i, (a, b) in enumerate(zip(made, word, strict=True)) if a != b]
                assert len(apart) < 3 and (len(apart) < 2 or sorted(made) == sorted(word))
            elif len(made) < len(word):
                assert any(made == word[:i] + word[i + 1 :] for i in range(len(word)))
            else:
                assert any(made == word[: i + 1] + word[i:] for i in range(len(word)))
    assert set(kinds) == {-1, 0, 1}


def test_what_each_kind_keeps() -> None:
    for text in noisy_texts(TEXTS, "case", 0.5, 0):
        assert text.lower() == TEXTS[0]
    for text in noisy_texts(TEXTS, "punctuation", 0.5, 0):
        assert text.translate(str.maketrans("", "", ",.!?;:-")) == TEXTS[0]
    moved = noisy_texts(TEXTS, "swaps", 0.3, 0)
    assert all(Counter(text.split()) == Counter(WORDS) for text in moved)
    assert noisy_texts(["a b c d e"], "swaps", 1.0, 0) == ["b a d c e"]
    assert noisy_texts(["good, bad ."], "punctuation", 1.0, 0)[0].startswith("good bad")


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown kind 'noise' of noise; expected one of typos"):
        noisy_texts(["a"], "noise", 0.1, 0)
    with pytest.raises(ValueError, match=r"share must lie in \[0, 1\]; got 2"):
        noisy_texts(["a"], "case", 2, 0)
