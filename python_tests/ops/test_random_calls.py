"""A sample of the random calls; all ten thousand: `python -m
python_tests.ops.random_calls` (docs/hardening.md)."""

from __future__ import annotations

from collections import Counter

import pytest

from python_tests.ops import random_calls

CALLS = 600


@pytest.mark.parametrize("start", range(0, CALLS, 100))
def test_random_calls(start: int) -> None:
    for seed in range(start, start + 100):
        call, values = random_calls.random_call(seed)
        try:
            random_calls.check(call, values)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {call.name}, {values} values") from error


def test_the_sample_has_everything() -> None:
    """Every operator with every kind of values, every dtype and q, empty and strided tensors."""
    seen: Counter = Counter()
    for seed in range(CALLS):
        call, values = random_calls.random_call(seed)
        first = call.first
        seen.update([(call.name, values == "ordinary"), values, first.dtype])
        seen.update(["empty"] * (not first.numel()) + ["strided"] * (not first.is_contiguous()))
    assert len(seen) == 2 * len(random_calls.MAKERS) + 5 + 4 + 2
    assert min(seen.values()) >= 10
