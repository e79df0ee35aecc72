"""A graph that breaks inside the package's own code loses no derivative."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jachess_ext.jet.compiled import closures, reachable, regions
from python_tests.jet.compiled_blocks import SelfAttention, example, streams_of
from python_tests.jet.test_compile_closures import CALLS

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SHIFT = torch.tensor(0.5, dtype=torch.float64)


class Net(nn.Module):
    """With an embedding of numbers, chunks and attention, and attributes of several kinds."""

    def __init__(self, shift: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.mix, self.out = nn.Linear(4, 12).double(), nn.Linear(4, 4).double()
        self.act: Any = partial(torch.pow, exponent=2)
        self.sizes, self.options = [4, 4, 4], {"scale": 0.5, "names": ("a", "b")}
        self.call = lambda x, s=1.5: x * s

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift = SHIFT if self.shift is None else self.shift  # no graph takes the global one
        x = self.call(x + torch.cos(t)[:, None, None] + shift)
        q, k, v = self.mix(x).split(self.sizes, dim=-1)
        scale = self.options["scale"]
        return self.out(self.act(nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)))


Call = Callable[..., tuple[Tensor, ...]]
# Every function of the folder: dynamo traces those that walk through what a module holds.
STEPS = {
    name: file
    for file in (regions, closures, reachable)
    for name, value in vars(file).items()
    if inspect.isfunction(value) and value.__module__ == file.__name__
}
EVERY_TIME = ("can_trace", "contents")
SHIFTS = {"global": None, "buffer": SHIFT}


def _case(step: str, name: str, shift: str) -> Any:
    fast = step in EVERY_TIME and name == "jvp of a target" and shift == "global"
    marks = () if fast else pytest.mark.slow
    return pytest.param(step, name, shift, id=f"{step}-{name}-{shift}", marks=marks)


# Of a region that failed (the global tensor) `raise_if_error` raises the error while dynamo traces.
# A break just there, or around a jet's region, leaves a graph of the failed region, at which AOT
# autograd raises.
CASES = [
    _case(*case)
    for case in itertools.product(STEPS, CALLS, SHIFTS)
    if case[0] not in ("raise_if_error", "_jet_region") or case[2] != "global"
]


def _breaking(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def broken(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return step(*args, **kwargs)

    return broken


@pytest.mark.parametrize("step, name, shift", CASES)
def test_a_break_at_any_step(
    step: str, name: str, shift: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, call = Net(SHIFTS[shift]), CALLS[name]
    x, t = torch.randn(2, 3, 4, dtype=torch.float64), torch.rand(2, dtype=torch.float64)

    def results(call: Call) -> list[Tensor]:
        values = call(net, x, t)
        value = sum(part.square().sum() for part in values)
        slopes = torch.autograd.grad(value, [*net.parameters()], allow_unused=True)
        return [*values, *(torch.zeros(()) if s is None else s for s in slopes)]

    expected = results(call)
    for file in (regions, closures, reachable):
        if hasattr(file, step):
            monkeypatch.setattr(file, step, _breaking(getattr(STEPS[step], step)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = results(torch.compile(call, backend="aot_eager"))
    torch.testing.assert_close(actual, expected)


def test_where_torch_takes_no_module_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch 2.10 and 2.11: a jet runs eagerly, and a full graph says what is needed."""
    monkeypatch.setattr(regions, "MODULES_IN_GRAPHS", False)
    block = SelfAttention().double()
    streams, tensors = streams_of(block), example(block)
    assert torch.equal(torch.compile(streams, backend="eager")(*tensors), streams(*tensors))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs torch 2\.12 or newer"):
        torch.compile(streams, fullgraph=True, backend="eager")(*tensors)
