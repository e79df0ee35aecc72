"""On a GPU every rule gives what it gives on the CPU, where `test_rules.py` checks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx

from .calls import Call, make_call
from .rule_table import Row
from .test_rules import RULES

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


def _drawn(function: Any, row: Row) -> bool:
    return "dropout" in function.__name__ or bool(row.kwargs.get("dropout_p"))


def _torchs_own_difference(call: Call) -> float:
    """Largest relative difference of the function itself between the devices: in float64 too,
    torch's hardswish and hardsigmoid multiply by a float32 sixth on a GPU."""
    pairs = zip(call(call.x), call.moved(DEVICE)(call.x.to(DEVICE)), strict=True)
    return max(
        float(((one - other.cpu()).abs() / one.abs().clamp_min(1.0)).nan_to_num().max())
        for one, other in pairs
        if one.is_floating_point() and one.numel()
    )


def _streams_and_gradients(call: Call, device: str) -> list[Tensor]:
    """Every stream of every output, and the gradient of a weighted sum of them all."""
    torch.manual_seed(1)
    directions = torch.randn(2, len(call.x), dtype=torch.float64).to(device)
    moved = call.moved(device)
    x = moved.x.requires_grad_()
    streams = [jet.streams.cpu() for jet in jx.jet(moved, x, directions)]
    finite = [s.masked_fill(s == -torch.inf, 0.0) for s in streams]
    weighted = [
        (s * torch.linspace(0.5, 1.5, s.numel(), dtype=s.dtype).view_as(s)).sum() for s in finite
    ]
    total = torch.stack([w.double() for w in weighted]).sum()
    gradient = torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)
    return [*(s.detach() for s in finite), gradient.cpu()]


@pytest.mark.parametrize("function, row", RULES)
def test_a_rule_is_the_cpus(function: Any, row: Row) -> None:
    if _drawn(function, row):
        pytest.skip("another device draws another mask")
    call = make_call(function, row)
    expected = _streams_and_gradients(call, "cpu")
    found = _streams_and_gradients(call, DEVICE)
    own = _torchs_own_difference(call)
    assert own < 1e-7
    tolerance = 1e-9 + 10 * own
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert all(f.dtype == e.dtype for f, e in zip(found, expected, strict=True))
