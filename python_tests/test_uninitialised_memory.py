"""Memory that nobody has written is no number in these tests (`conftest.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext import ops

MAKERS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "empty": lambda dtype: torch.empty(6, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(6, dtype=dtype)),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(6),
    "empty_strided": lambda dtype: torch.empty_strided((2, 3), (3, 1), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((6,), (1,)),
    "empty_permuted": lambda dtype: torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
    "Tensor": lambda dtype: torch.zeros(0, dtype=dtype).new(6),
    "resize_": lambda dtype: torch.zeros(0, dtype=dtype).resize_(6),
    "aten": lambda dtype: torch.ops.aten.empty.memory_format([6], dtype=dtype),
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="where the flag was tried")


@linux
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_not_written_spoils_a_sum(maker: str, dtype: torch.dtype) -> None:
    for _ in range(3):
        torch.zeros(6, dtype=dtype)  # freed: its zeros would be read again
        assert not MAKERS[maker](dtype).sum().isfinite()


@linux
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_planted_read_is_seen(dtype: torch.dtype) -> None:
    """Of a rule and of an operator, whose results would be other numbers each time, or none."""
    x = torch.ones(3, 8, dtype=dtype)

    def reads(x: Tensor) -> Tensor:
        return x.sin() + torch.empty(8, dtype=dtype)

    for result in (jx.jvp(reads, (x,), (x,))[0], jx.jet(reads, x, torch.stack([x, x])).primal):
        assert not (result.abs() < 1e300).any()
    stack = x.new_empty(3, 8)  # of which the operator is to be given all
    stack[0] = 1
    stack[1] = 2
    y = ops.layer_norm_jet(stack, None, None, 1e-5, 2)
    assert y[:2].isfinite().all() and not y[2].sum().isfinite()
