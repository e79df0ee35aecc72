"""The accuracy checks themselves: a NaN anywhere is an error, whatever stands before it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jachess_ext import ops
from python_tests.models import oracles as model_oracles
from python_tests.ntk import oracles as ntk_oracles
from python_tests.ops import bad_calls, cases, ntk_sides, random_calls

CHECKS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "operators": cases.relative_error,
    "random calls": lambda got, expected: random_calls.error_of(got, expected, 0.0),
    "ntk operators": ntk_sides.error,
    "ntk": ntk_oracles.error,
    "models": model_oracles.relative_error,
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize("check", CHECKS)
def test_nan_is_an_infinite_error(check: str, stream: int, bad: float) -> None:
    right = torch.linspace(1, 2, 12, dtype=torch.float64).reshape(3, 2, 2)
    wrong = right.clone()
    wrong[stream, 1, 0] = bad
    assert CHECKS[check](right, right) == 0
    assert CHECKS[check](wrong, right) == math.inf
    assert CHECKS[check](right, wrong) == math.inf or not math.isnan(bad)


@pytest.mark.parametrize("check", ["operators", "ntk operators", "ntk", "models"])
def test_another_shape_is_an_error(check: str) -> None:
    with pytest.raises(AssertionError, match="would broadcast"):
        CHECKS[check](torch.ones(3, 1, 2), torch.ones(3, 2, 2))


def test_a_new_operator_is_in_every_table() -> None:
    """In `python_tests/operators.py`, from which wrong calls are made, and in the random calls."""
    names = [name.removesuffix("_reference") for name in ops.__all__ if "_reference" in name]
    assert {*names} == {*bad_calls.signatures()}
    assert {*names} == {*random_calls.MAKERS, "sample_directions"}
