"""A pytest plugin that counts, on the CPU, the calls of each test that a GPU's kernels would take,
by the dtype, streams and size of heads that they are compiled for.

    python -m pytest -p python_tests.ops.kernel_calls python_tests/ops/test_attention.py -k cpu

What goes to the composite on a GPU (float64, wide heads) tests no kernel there.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jachess_ext.ops import attention

HOPPER_SHARED_MEMORY = 232_448
COUNTED: Counter[tuple[str, str]] = Counter()
_CURRENT = ""
_takes = attention._kernels_take


def _count(query: Tensor, value: Tensor, q: int) -> bool:
    """Note what would be decided for the same heads on a Hopper GPU; decide as before."""
    on_gpu: Any = SimpleNamespace(
        shape=query.shape,
        dtype=query.dtype,
        device=torch.device("cuda:0"),
        element_size=query.element_size,
    )
    properties = SimpleNamespace(shared_memory_per_block_optin=HOPPER_SHARED_MEMORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        kernel = f"{query.dtype}-{query.shape[0]}-{query.shape[-1]}".removeprefix("torch.")
        COUNTED[_CURRENT, kernel] += _takes(on_gpu, value, q)
    return _takes(query, value, q)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count for this test from now on."""
    global _CURRENT
    _CURRENT = item.nodeid
    attention._kernels_take = _count


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each test and kernel."""
    for (test, kernel), calls in COUNTED.items():
        terminalreporter.write_line(f"kernel calls: {calls} of {kernel} in {test}")
