"""Questions about a jet are answered by its primal, as plain values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.jet.engine.errors import function_name
from jachess_ext.jet.passes.eager import make_input

from .calls import make_call
from .queries import QUERIES
from .rule_table import Row

CALLS = [
    pytest.param(function, row, id=function_name(function))
    for row in QUERIES
    for function in row.functions()
]


@pytest.mark.parametrize("function, row", CALLS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_query(function: Any, row: Row) -> None:
    call = make_call(function, row)
    jet = make_input(call.x, torch.ones(2, len(call.x)).double())
    if "requires_grad_" in row.names:
        assert call.raw(jet) is not None
        return
    actual, expected = call.raw(jet), call.raw(call.x)
    assert not isinstance(actual, jx.JetTensor)
    if not isinstance(expected, torch.Tensor):
        assert actual == expected
        return
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual, expected)


def test_a_jet_in_the_condition_of_a_loop() -> None:
    x = torch.tensor([0.5, 3.0], dtype=torch.float64)

    def halve(x: Any) -> Any:
        while (x.abs() > 0.6).any():
            x = x / 2
        return x

    jet = jx.jet(halve, x, torch.ones(1, 2).double())
    assert torch.equal(jet.primal, x / 8)
    assert torch.equal(jet.first, torch.full((1, 2), 0.125).double())


def test_requires_grad_acts_on_the_stack() -> None:
    jet = make_input(torch.ones(2), torch.ones(1, 2))
    assert jet.requires_grad_() is jet
    assert jet.requires_grad and jet.streams.requires_grad and jet.is_leaf
