"""Under autocast every rule gives the dtype that torch gives, on the CPU and on a GPU.

No GPU is needed: a fake tensor knows its device, and torch's autocast acts on it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import jachess_ext as jx
from jachess_ext.jet.engine import context
from jachess_ext.jet.engine.errors import last_name

from .calls import Call, make_call
from .rule_table import Row, X
from .test_rules import first_of_each

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
"""The first only where the engine casts; the last only where torch has no kernel for halves, which
show all that it shows, and the cast to it besides: it is what autocast casts to."""
# What a build of torch for the CPU cannot try with fake tensors; from torch's list.
ON_A_GPU = {"mv": torch.bfloat16, "bmm": torch.bfloat16, "baddbmm": torch.bfloat16}
ON_A_GPU["scaled_dot_product_attention"] = torch.bfloat16
# torch has no kernel for halves on the CPU, whose autocast therefore avoids them.
NO_HALVES_ON_THE_CPU = (
    "cholesky_solve",
    "triangular_solve",
    *("solve", "tensorsolve", "inverse", "cholesky_inverse", "householder_product", "orgqr"),
    "cond",
    "avg_pool3d",
    "ctc_loss",
    "ormqr",
)


FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""One for all tests: making it takes as long as a call."""


class autocast:
    """`torch.autocast`, which switches itself off for "cuda" where there is no GPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device, True)
        torch.set_autocast_dtype(self.device, torch.bfloat16)

    def __exit__(self, *_: Any) -> None:
        torch.set_autocast_enabled(self.device, False)


def _dtypes(call: Call, x: torch.Tensor) -> list[torch.dtype] | None:
    """None where torch refuses such arguments."""
    try:
        return [tensor.dtype for tensor in call(x)]
    except (RuntimeError, NotImplementedError, TypeError, DataDependentOutputException):
        return None


def _jet_dtypes(call: Call, order: int = 2) -> list[torch.dtype]:
    directions = torch.zeros(order, len(call.x), dtype=call.x.dtype)
    with torch.no_grad():
        jets = jx.jet(call, call.x, directions, order=order)
    assert all(jet.first.dtype == jet.primal.dtype for jet in jets)
    return [jet.primal.dtype for jet in jets]


def _numbers_and_dtype(function: Any, row: Row) -> Any:
    """Return what autocast looks at: the name, the number of tensors, whether a dtype is asked."""
    count = sum(isinstance(value, X | torch.Tensor) for value in row.args)
    return last_name(function), count, "dtype" in row.kwargs


@pytest.mark.parametrize("function, row", first_of_each(_numbers_and_dtype))
def test_dtype_on_the_cpu(function: Any, row: Row) -> None:
    if last_name(function) in context._REFUSED:
        call = make_call(function, row, torch.float32)
        with autocast("cpu"), pytest.raises(jx.MissingJetRule, match="autocast"):
            _jet_dtypes(call)
        return
    tried: set[torch.dtype] = set()
    for dtype in FLOATS if context._cast_kind(function, False) else FLOATS[1:]:
        if dtype == torch.bfloat16 and torch.float16 in tried:
            break
        call = make_call(function, row, dtype)
        with autocast("cpu"):
            expected = _dtypes(call, call.x)
            if expected is not None:
                tried.add(dtype)
                assert _jet_dtypes(call) == expected, dtype
    assert torch.float32 in tried


def _name_and_dtype(function: Any, row: Row) -> Any:
    return last_name(function), "dtype" in row.kwargs


@pytest.mark.parametrize("function, row", first_of_each(_name_and_dtype))
def test_dtype_on_a_gpu(function: Any, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain call is fake, on "cuda"; the jet's is on the CPU, by the lists for a GPU."""
    monkeypatch.setattr(context, "_on_gpu", lambda device: True)
    name, tried = last_name(function), set[torch.dtype]()
    if name in (*context._REFUSED, *NO_HALVES_ON_THE_CPU):
        pytest.skip("refused, or not to be tried on a CPU")
    for dtype in FLOATS[1:]:
        if dtype == torch.bfloat16 and torch.float16 in tried:
            break
        call = make_call(function, row, dtype)
        with FAKE, autocast("cuda"):
            there = call.on("cuda")
            expected = _dtypes(there, there.x)
        if expected is None and name in ON_A_GPU:
            expected = [ON_A_GPU[name]]
        with autocast("cpu"):
            if expected is not None and _dtypes(call, call.x) is not None:
                tried.add(dtype)
                assert _jet_dtypes(call, order=1) == expected, dtype
    if not tried:
        pytest.skip("a build for the CPU cannot try this with fake tensors")
