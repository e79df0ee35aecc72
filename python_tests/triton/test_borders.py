"""Triton's operator where torch exports, traces, checkpoints or asks for sizes, interpreted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint

pytest.importorskip("triton")

from jachess_ext import ops, torch_private
from jachess_ext.ops import attention
from python_tests.ops.cases import TRACED, opcheck_backward, random_jet
from python_tests.triton import interpreter  # noqa: F401  mends bfloat16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
dynamo = pytest.mark.skipif(
    torch_private.release(torch.__version__) < (2, 12),
    reason="dynamo cannot trace which transforms are active",
)
OPERATOR = torch.ops.jachess.attention_jet_triton
BACKWARD = torch.ops.jachess.attention_jet_triton_backward
NUMBERS = (1, 0.25, True, -1, -1, 0.0, 0.0, 0)


@pytest.fixture
def jets(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Query, key and value of which Triton's kernels compute a call, however few its scores."""
    monkeypatch.setattr(attention.attention_triton, "accepts", lambda call: len(call.query) == 2)
    monkeypatch.setattr(attention, "TRITON_FROM", 1)
    shapes = ((2, 5, 16), (1, 7, 16), (1, 7, 32))
    return [random_jet(2, 1, *s, dtype=torch.float32).requires_grad_() for s in shapes]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ops.attention_jet(query, key, value, q=1, causal=True)


def with_gradients(function: Any, *jets: Tensor) -> list[Tensor]:
    y = function(*jets)
    return [y, *torch.autograd.grad(y.sin().sum(), jets)]


def called(graph: torch.fx.Graph) -> list[str]:
    """The operators of attention that a graph calls."""
    names = (str(node.target) for node in graph.nodes)
    return [name.removesuffix(".default") for name in names if name.startswith("jachess.")]


@pytest.mark.parametrize("traced", TRACED)
def test_opcheck(jets: list[Tensor], traced: bool) -> None:
    seed, numbers = torch.tensor(7), (1, 0.5, False, 3, -1, 2.0, 0.25, 0)
    opcheck_backward(OPERATOR, (*jets, torch.zeros(5, 7), seed, *numbers), traced)
    with torch.no_grad():
        y, statistics = OPERATOR(*jets, None, None, *NUMBERS)
    gy = torch.randn_like(y).requires_grad_()
    opcheck_backward(BACKWARD, (gy, *jets, None, None, y, statistics, *NUMBERS), traced)


class Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=dynamo)])
@pytest.mark.parametrize("unknown", [False, True])
def test_export(jets: list[Tensor], strict: bool, unknown: bool, tmp_path: Path) -> None:
    """Also of unknown numbers of tokens; and a program that was saved has the same gradients."""
    tokens = {3: torch.export.Dim.DYNAMIC} if unknown else {}
    program = torch.export.export(
        Attend(), tuple(jets), dynamic_shapes=(tokens,) * 3, strict=strict
    )
    assert called(program.graph) == ["jachess.attention_jet_triton"]
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    if unknown:
        jets = [torch.cat([x, x], 3).detach().requires_grad_() for x in jets]
    for a, b in zip(with_gradients(loaded, *jets), with_gradients(attend, *jets), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(jets: list[Tensor], mode: str) -> None:
    graph = make_fx(partial(with_gradients, attend), tracing_mode=mode)(*jets)
    names = ["jachess.attention_jet_triton", "jachess.attention_jet_triton_backward"]
    assert called(graph.graph) == names
    others = [(2 * x).detach().requires_grad_() for x in jets]
    for a, b in zip(graph(*others), with_gradients(attend, *others), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_checkpoint(jets: list[Tensor], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run again in the backward, but where their results are what is saved."""
    runs, forward = [], attention.attention_triton.forward
    monkeypatch.setattr(
        attention.attention_triton, "forward", lambda call: runs.append(1) or forward(call)
    )
    settings: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        save = partial(checkpoint.create_selective_checkpoint_contexts, [OPERATOR.default])
        settings["context_fn"] = save
    checkpoint.checkpoint(attend, *jets, **settings).sin().sum().backward()
    assert len(runs) == (1 if kind == "selective" else 2)
    for x, gradient in zip(jets, with_gradients(attend, *jets)[1:], strict=True):
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_sizes_alone(jets: list[Tensor], device: str) -> None:
    """Shapes, dtypes and layouts of results and gradients without data."""
    for dtype in (torch.float32, torch.bfloat16):
        # Heads behind tokens, as a model has them.
        real = [x.detach().to(dtype).transpose(2, 3).contiguous().transpose(2, 3) for x in jets]
        mode = FakeTensorMode()
        there = [mode.from_tensor(x) if device == "fake" else x.to(device) for x in real]
        results = []
        for leaves in (real, there):
            y, statistics = OPERATOR(*leaves, None, None, *NUMBERS)
            gradients = BACKWARD(torch.ones_like(y), *leaves, None, None, y, statistics, *NUMBERS)
            results.append([(x.shape, x.dtype, x.stride()) for x in (y, statistics, *gradients)])
        assert results[0] == results[1]


def test_fake_tensors_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACHESS_TRITON", "1")
    with FakeTensorMode():
        x = torch.empty(2, 1, 1, 4096, 64, dtype=torch.bfloat16, device="cuda")
        graph = make_fx(attend)(x, x, x)
    assert called(graph.graph) == ["jachess.attention_jet_triton"]
