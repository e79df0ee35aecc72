"""What `ops.ntk_materialised` has of its own: how it cuts gradients, weights and workspace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jachess_ext import ops
from jachess_ext.ops.ntk import WORKSPACE
from python_tests.ops.ntk_sides import error, expected, make_side

WORKSPACES = [1, 40_000, 10**6, WORKSPACE]


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_workspace(dtype: torch.dtype, workspace: int) -> None:
    """Gradients in one block or many."""
    left = make_side(2, 11, 9, 70, (45, 3, 50), dtype=dtype)
    right = make_side(2, 5, 12, 70, (45, 3, 50), seed=1, dtype=dtype)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    got = ops.ntk_materialised(*left, workspace=workspace)
    assert error(got, expected(left, left)) < bound
    assert torch.equal(got, got.permute(2, 3, 0, 1))
    unequal = ops.ntk_materialised(*left, *right, workspace=workspace)
    assert error(unequal, expected(left, right)) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_more_than_a_block(dtype: torch.dtype) -> None:
    """Many gradients: strips of the upper triangle, samples of which nothing counts."""
    lengths = torch.arange(300) % 4  # of some samples nothing counts
    a, (delta,) = make_side(3, 300, 3, 4, (5,), dtype=dtype)
    delta[:, torch.arange(3) >= lengths[:, None]] = 0
    left, right = (a, [delta]), make_side(3, 280, 2, 4, (5,), seed=1, dtype=dtype)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    got = ops.ntk_materialised(*left)
    assert error(got, expected(left, left)) < bound
    assert torch.equal(got, got.permute(2, 3, 0, 1))
    assert error(ops.ntk_materialised(*left, *right), expected(left, right)) < bound


@settings(max_examples=30, deadline=None)
@given(
    inputs=st.integers(1, 400),
    widths=st.lists(st.integers(0, 250), min_size=1, max_size=3),
    workspace=st.integers(1, 10**6),
    positions=st.integers(1, 3),
)
def test_any_features(inputs: int, widths: list[int], workspace: int, positions: int) -> None:
    """Blocks of any number of rows, the last one smaller."""
    left = make_side(1, 5, positions, inputs, tuple(widths))
    got = ops.ntk_materialised(*left, workspace=workspace)
    torch.testing.assert_close(got, expected(left, left), rtol=1e-11, atol=1e-9)


def test_long_samples() -> None:
    """A number of a gradient is a sum over many positions."""
    left = make_side(2, 3, 130, 7, (6,), dtype=torch.float32)
    assert error(ops.ntk_materialised(*left), expected(left, left)) < 1e-6


def test_refuses_a_workspace_of_nothing() -> None:
    a, deltas = make_side(1, 2, 3, 4, (5,))
    with pytest.raises(ValueError, match="workspace is 0; expected bytes"):
        ops.ntk_materialised(a, deltas, workspace=0)
