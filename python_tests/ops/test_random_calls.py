"""A sample of the random and the wrong calls; all ten thousand: `python -m
python_tests.ops.random_calls` (docs/hardening.md)."""

from __future__ import annotations

from collections import Counter

import pytest

from python_tests.ops import bad_calls, random_calls

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


ANSWERS = bad_calls.try_all()


@pytest.mark.parametrize(("operator", "way", "what"), ANSWERS)
def test_wrong_calls_get_a_sentence(operator: str, way: str, what: str) -> None:
    """The compiled operator names itself (a norm with a residual is the norm) and says what is
    expected; the references fail as torch does."""
    error = ANSWERS[operator, way, what]
    assert isinstance(error, RuntimeError | ValueError | TypeError | IndexError), error
    if way == "reference" or operator == "ntk_materialised":
        return
    sentence = str(error).splitlines()[0]
    if torch_has_said(what):
        return
    name = operator.removeprefix("add_")
    assert f"jachess::{name}" in sentence
    assert "expected" in sentence or ":" in sentence.split(name, 1)[1]


def torch_has_said(what: str) -> bool:
    """Whether torch's own dispatcher refuses: no kernel, or more bits than an int64 has."""
    return what in ("seed: 2**64", "seed: -2**63 - 1", "dropout_seed: 2**63")
