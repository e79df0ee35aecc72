"""Linear layers of a recorded pass: the same numbers, by inputs alone, and only where served."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import jachess_ext as jx
from jachess_ext.ntk.recorder import fast_linear
from jachess_ext.ops import gemm

from .oracles import error, kernel

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
ROWS, K, N = 160, 24, 40


@pytest.fixture(autouse=True)
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is the faster one."""
    monkeypatch.setattr(gemm, "onednn_preferred", lambda: True)


def _operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = normal(ROWS // 8, 8, K).requires_grad_()
    return x, nn.Parameter(normal(N, K)), nn.Parameter(normal(N))


@pytest.mark.parametrize("layout", ["dense", "turned"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradient(with_bias: bool, layout: str) -> None:
    """Against float64; the cotangent of a sum is expanded, with strides of zero."""
    x, weight, bias = _operands()
    given = x if layout == "dense" else x.transpose(0, 1)
    args = (given, weight, bias) if with_bias else (given, weight)
    found = fast_linear(F.linear, args, {})
    assert found is not None
    wide = [value.detach().double() for value in args]
    torch.testing.assert_close(found.double(), F.linear(*wide), rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    for cotangent in (
        torch.randn(found.shape, generator=generator),
        torch.ones(()).expand_as(found),
    ):
        (got,) = torch.autograd.grad(found, [x], cotangent, retain_graph=True)
        wanted = cotangent.double() @ wide[1]
        wanted = wanted if layout == "dense" else wanted.transpose(0, 1)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_keywords_and_second_derivative() -> None:
    x, weight, bias = _operands()
    found = fast_linear(F.linear, (x,), {"bias": bias, "weight": weight})
    assert found is not None
    (first,) = torch.autograd.grad(found.square().sum(), [x], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [x])
    wanted = 2 * torch.ones(ROWS, K) @ weight.T @ weight
    torch.testing.assert_close(second.view(ROWS, K), wanted, rtol=1e-4, atol=1e-4)


X, W, B = _operands()
NOT_SERVED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "another function": lambda: (torch.matmul, (X, W.T), {}),
    "inputs without a gradient": lambda: (F.linear, (X.detach(), W, B), {}),
    "a weight that was computed": lambda: (F.linear, (X, W * 2, B), {}),
    "a bias that was computed": lambda: (F.linear, (X, W, B * 2), {}),
    "float64": lambda: (F.linear, _operands(torch.float64), {}),
    "few rows": lambda: (F.linear, (X[0], W, B), {}),
    "a vector for a weight": lambda: (F.linear, (X, W[0].detach()), {}),
    "a tensor of another class": lambda: (F.linear, (X, W.detach().as_subclass(_Other), B), {}),
}


class _Other(Tensor):
    pass


@pytest.mark.parametrize("name", NOT_SERVED)
def test_leaves_alone(name: str) -> None:
    assert fast_linear(*NOT_SERVED[name]()) is None


def test_leaves_autocast_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast_linear(F.linear, (X, W, B), {}) is None
    assert fast_linear(F.linear, (X, W, B), {}) is not None


class _Tied(nn.Module):
    """Two linear layers share a weight; a third one's weight is computed; one has few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.shared = nn.Linear(16, 16)
        self.factor = nn.Parameter(torch.randn(16, 4))
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        x = x + F.linear(x, self.factor @ self.factor.T)
        return SimpleNamespace(logits=self.head(x.mean(1)))


def test_kernel_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, calls = _Tied(), []

    def counted(*args: Any) -> Tensor | None:
        found = fast_linear(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(sys.modules["jachess_ext.ntk.recorder"], "fast_linear", counted)
    samples = {"input_ids": torch.randint(0, 30, (20, 9))}
    with pytest.warns(RuntimeWarning, match="factor"):
        theta = jx.ntk(model, samples)
    assert calls.count(True) == 2  # the shared weight's calls, in the capture alone
    exact = kernel(model.double(), samples)
    assert error(theta.double(), exact) < 1e-5


def test_tensors_that_record_stay_with_torch() -> None:
    """torch 2.12 does not call its tracing of a jet compiling, and refuses oneDNN's call there."""
    x, weight, _ = _operands()
    assert gemm.onednn_takes(x, weight)
    mode = FakeTensorMode()
    assert not gemm.onednn_takes(mode.from_tensor(x), mode.from_tensor(weight))
