"""Random programs: value, first and second derivatives and their gradients, in every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from .draw import draw
from .oracle import MODES, result
from .shrink import shrunk


def check(seeds: Sequence[int]) -> None:
    """No program is wrong; of each mode at least four of five are right, and almost every seed
    gives a program that plain torch runs."""
    right: Counter[str] = Counter()
    programs, exercised = 0, set()
    for seed in seeds:
        row = result(seed)
        programs += bool(row.verdicts)
        for mode, verdict in row.verdicts.items():
            if verdict.kind == "wrong":
                script = shrunk(draw(seed), mode).script()
                pytest.fail(f"seed {seed}, {mode}: {verdict.what}\n{script}")
            right[mode] += verdict.kind == "right"
        exercised |= row.features
    assert programs >= 0.95 * len(seeds)
    assert all(right[mode] >= 0.8 * programs for mode in MODES), right
    assert len(exercised) > 100


QUICK = (
    *(2, 3, 6, 7, 8, 10, 12, 13, 15, 16, 19, 20, 21, 22, 23, 29, 33, 35, 38, 40, 42, 44, 45, 46),
    *(47, 48, 49, 51, 52, 54, 55, 56, 63, 65, 66, 67, 68, 69, 72, 73, 75, 76, 77, 78, 81, 82, 84),
    *(86, 91, 92, 97, 98),
)
"""Seeds whose programs call every function that those of the first hundred call."""


def test_random_programs() -> None:
    check(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5000, 200))
def test_more_random_programs(first: int) -> None:
    check(range(first, first + 200))
