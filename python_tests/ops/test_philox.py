"""Philox4x32-10 against its authors' known answers, and against Python's own integers."""

import random

import pytest

from jachess_ext import _C

# (counter, key, words): the known answers published with the paper (Random123, kat_vectors,
# "philox4x32 10"): all zero, all one, and the digits of pi
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_integers(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition, in Python's integers."""
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & 0xFFFFFFFF,
            (low >> 32) ^ counter[3] ^ key[1],
            low & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert _C.philox4x32_10(words(counter), words(key)) == words(expected)
    assert philox_by_integers(words(counter), words(key)) == words(expected)


def test_agrees_with_the_definition() -> None:
    source = random.Random(0)
    for _ in range(200):
        counter = [source.getrandbits(32) for _ in range(4)]
        key = [source.getrandbits(32) for _ in range(2)]
        assert _C.philox4x32_10(counter, key) == philox_by_integers(counter, key)


def test_refuses_what_is_not_words() -> None:
    for counter, key in (([0] * 3, [0] * 2), ([0] * 4, [2**32, 0]), ([-1] * 4, [0] * 2)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            _C.philox4x32_10(counter, key)
