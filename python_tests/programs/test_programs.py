"""Random programs: value, first and second derivatives and their gradients, in every mode."""

from __future__ import annotations

from collections import Counter

import pytest

from .draw import draw
from .oracle import MODES
from .seeds import result
from .shrink import shrunk


def check(seeds: range) -> None:
    """No program is wrong; of each mode at least four of five are right, and almost every seed
    gives a program that plain torch runs."""
    right: Counter[str] = Counter()
    programs, exercised = 0, set()
    for seed in seeds:
        row = result(seed)
        programs += bool(row["verdicts"])
        for mode, (kind, what) in row["verdicts"].items():
            if kind == "wrong":
                pytest.fail(f"seed {seed}, {mode}: {what}\n{shrunk(draw(seed), mode).script()}")
            right[mode] += kind == "right"
        exercised |= set(row["features"])
    assert programs >= 0.95 * len(seeds)
    assert all(right[mode] >= 0.8 * programs for mode in MODES), right
    assert len(exercised) > min(len(seeds), 100)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_programs(first: int) -> None:
    check(range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("first", (100, *range(200, 5000, 200)))
def test_more_random_programs(first: int) -> None:
    check(range(first, first + 200))
