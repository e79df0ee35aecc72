"""Strings reach the operators through csrc/text.h, since torch's own conversion leaks them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import pytest
import torch

import jachess_ext.ops  # noqa: F401  loads the operators

CALLS = 40_000


def resident() -> float:
    """MiB, after what is free was given back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


x = torch.randn(4, 3)
token = torch.arange(3)
zero = torch.zeros((), dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ops.jachess.activation_jet(x, "gelu_tanh", 2),
        lambda: torch.ops.jachess.gated_activation_jet(x, x, "quick_gelu", 2),
        lambda: torch.ops.jachess.sample_directions(
            token, 2, 3, zero, zero, "rademacher", torch.float32
        ),
    ],
)
def test_memory_of_strings_is_given_back(call: Callable[[], object]) -> None:
    """torch's conversion lost 384 bytes a call: 15 MiB here, and none of it is used again."""
    for _ in range(2000):
        call()
    before = resident()
    for _ in range(CALLS):
        call()
    assert resident() - before < 3
