"""Gradients of weights and inputs through programs that were traced, as of the eager call.

A graph that autograd differentiates later may hold no operator without a derivative: a result would
be right, and its gradient None.  Faster products begin at some size, which all of these have.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import jachess_ext as jx
from jachess_ext.ops import gemm
from jachess_ext.torch_private import release
from python_tests.covering import pairs
from python_tests.jet.drawn import Packed

WIDTH = 8
ROWS = 400


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have oneDNN preferred on processors of Intel, too."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        pytest.skip("this torch has no oneDNN, or nothing beside it")
    monkeypatch.setattr(gemm, "onednn_preferred", lambda: True)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


class Heads(nn.Module):
    """Attention, written out or torch's own, in four dimensions or in three."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).reshape(-1, 2, 2, WIDTH // 4).transpose(1, 2) for f in self.layers)
        if self.kind == "written out":
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(1)
        if self.kind == "three":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).reshape(len(x), 2, 2, -1)
        return mixed.transpose(1, 2).flatten(1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.gate(x)) * self.up(x)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.matrix = torch.randn(WIDTH, WIDTH).as_subclass(Packed)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).tanh(), self.matrix, self.bias)


def _linear(bias: bool) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: nn.Sequential(_linear(False), nn.Tanh(), _linear(False), nn.Tanh()),
    "bias": lambda: nn.Sequential(_linear(True), nn.GELU(), _linear(True), nn.Tanh()),
    "matmul": lambda: nn.Sequential(Heads("written out"), nn.Tanh()),
    "attention": lambda: nn.Sequential(Heads("four"), nn.Tanh()),
    "attention of three dimensions": lambda: nn.Sequential(Heads("three"), nn.Tanh()),
    "layer norm": lambda: nn.Sequential(_linear(True), nn.LayerNorm(WIDTH), nn.Tanh()),
    "group norm": lambda: nn.Sequential(_linear(True), nn.GroupNorm(2, WIDTH), nn.Tanh()),
    "RMS norm": lambda: nn.Sequential(Gated(), nn.RMSNorm(WIDTH), nn.Tanh()),
}
CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "jvp": lambda f, x, u: jx.jvp(f, (x,), (u,))[1],
    "jet": lambda f, x, u: jx.jet(f, x, torch.stack([u, u.sin()])).streams,
    "laplacian": lambda f, x, u: jx.laplacian(f, x)[2],
}


class Step(nn.Module):
    def __init__(self, call: str, net: nn.Module) -> None:
        super().__init__()
        self.call, self.net = call, net

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return CALLS[self.call](self.net, x, u)


def _by_make_fx(step: Step, *inputs: Tensor, **settings: Any) -> Tensor:
    names, leaves = zip(*step.named_parameters(), strict=True)

    def call(inputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> Tensor:
        return functional_call(step, dict(zip(names, leaves, strict=True)), inputs)

    return make_fx(call, **settings)(inputs, leaves)(inputs, leaves)


def _exported(step: Step, x: Tensor, u: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(step, (x, u))


def _for_any_size(step: Step, x: Tensor, u: Tensor) -> Tensor:
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    program = torch.export.export(step, (x, u), dynamic_shapes=(rows, rows))
    return program.module()(x, u)


WAYS: dict[str, Callable[[Step, Tensor, Tensor], Tensor]] = {
    "export": lambda step, x, u: _exported(step, x, u).module()(x, u),
    "export, decomposed": lambda step, x, u: (
        _exported(step, x, u).run_decompositions().module()(x, u)
    ),
    "make_fx": _by_make_fx,
    "make_fx before dispatch": lambda step, x, u: _by_make_fx(step, x, u, pre_dispatch=True),
    "jit.trace": lambda step, x, u: torch.jit.trace(step, (x, u), check_trace=False)(x, u),
    "compile": lambda step, x, u: torch.compile(step, backend="aot_eager")(x, u),
}
if release(torch.__version__) < (2, 12):  # which runs a jet eagerly, between two graphs
    del WAYS["compile"]
REFUSED = {
    "make_fx": {"jet", "laplacian"},
    "make_fx before dispatch": {"jet", "laplacian"},
    "jit.trace": {"laplacian"},
}
"""What asks whether numbers are finite or rows independent, of which these cannot be asked."""


def gradients(
    step: Step, way: Callable[[Step, Tensor, Tensor], Tensor], x: Tensor, u: Tensor
) -> dict[str, Tensor | None]:
    """Return the result, and the gradients of a sum of it by the input and the parameters."""
    x = x.detach().requires_grad_()
    result = way(step, x, u)
    leaves = {"x": x, **dict(step.named_parameters())}
    weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    found = torch.autograd.grad((result * weights).sum(), [*leaves.values()], allow_unused=True)
    return {"result": result.detach(), **dict(zip(leaves, found, strict=True))}


@pytest.mark.parametrize(("way", "network"), pairs(WAYS, NETWORKS))
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_the_eager_call(way: str, network: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[network]()
    x, u = torch.randn(2, ROWS, WIDTH)
    for call in CALLS.keys() - REFUSED.get(way, set()):
        assert_same(Step(call, net), WAYS[way], x, u)


@pytest.mark.parametrize("network", ["bias", "matmul"])
def test_export_for_any_number_of_rows(network: str) -> None:
    torch.manual_seed(0)
    x, u = torch.randn(2, 20, WIDTH)
    assert_same(Step("jet", NETWORKS[network]()), _for_any_size, x, u)


def assert_same(
    step: Step, way: Callable[[Step, Tensor, Tensor], Tensor], x: Tensor, u: Tensor
) -> None:
    """Compare with the eager call in float64."""
    exact = gradients(copy.deepcopy(step).double(), Step.__call__, x.double(), u.double())
    for name, gradient in gradients(step, way, x, u).items():
        expected = exact[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            bound = 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=bound)


def test_a_quantised_layer() -> None:
    torch.manual_seed(0)
    step = Step("jvp", Quantised())
    x, u = torch.randn(2, ROWS, WIDTH)
    expected = gradients(step, Step.__call__, x, u)
    for name, gradient in gradients(step, _by_make_fx, x, u).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)
