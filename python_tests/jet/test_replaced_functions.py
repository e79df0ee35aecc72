"""Functions of torch.nn.functional that others replace: counters of profilers, kernels, mocks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import jachess_ext as jx
from python_tests import processes

Place = pytest.MonkeyPatch


def _doubled(function: Callable[..., Tensor]) -> Any:
    @functools.wraps(function)
    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * function(*args, **kwargs)

    return doubled


def _mocked(function: Callable[..., Tensor]) -> Any:
    return MagicMock(side_effect=lambda *args, **kwargs: 2 * function(*args, **kwargs))


def _written_out(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return 2 * (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, torch.ones(2, 4).double()),
    "layer_norm": lambda x: functional.layer_norm(x, [4]),
    "softmax": lambda x: functional.softmax(x, -1),
    "gelu": lambda x: functional.gelu(x),
    "glu": lambda x: functional.glu(x),
    "dropout": lambda x: functional.dropout(x, 0.5, False),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "conv1d": lambda x: functional.conv1d(x[0], torch.ones(2, 3, 1).double()),
    "pad": lambda x: functional.pad(x, (1, 1), value=2.0),
    "interpolate": lambda x: functional.interpolate(x[0], scale_factor=2.0, mode="linear"),
    "mse_loss": lambda x: functional.mse_loss(x, x.detach() + 1),
    "embedding": lambda x: functional.embedding(torch.tensor([0, 1]), x[0, 0]),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
}
DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Sequence[Tensor]]] = {
    "jvp": lambda fn, x: jx.jvp(fn, (x,), (x.cos(),)),
    "jvp of a target": lambda fn, x: jx.jvp(fn, (x,), (x.cos(),), differentiable=False),
    "jet": lambda fn, x: (jx.jet(fn, x, torch.stack([x.cos(), x.sin()])).streams,),
}


@pytest.mark.parametrize(
    "name, replace", [("linear", _mocked), *((name, _doubled) for name in CALLS)]
)
def test_while_it_is_replaced_and_after(name: str, replace: Any, monkeypatch: Place) -> None:
    """Twice the value has twice the derivatives, as often as the model calls it."""
    fn, x = CALLS[name], torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    for derivative in DERIVATIVES.values():
        before = derivative(fn, x)
        with monkeypatch.context() as patch:
            patch.setattr(functional, name, replace(getattr(functional, name)))
            during = derivative(fn, x)
        torch.testing.assert_close([*during], [2 * part for part in before])
        torch.testing.assert_close([*derivative(fn, x)], [*before])


def test_attention_of_another_library(monkeypatch: Place) -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    name = "scaled_dot_product_attention"
    for derivative in DERIVATIVES.values():
        expected = [2 * part for part in derivative(CALLS[name], x)]
        with monkeypatch.context() as patch:
            patch.setattr(functional, name, _written_out)
            torch.testing.assert_close([*derivative(CALLS[name], x)], expected)


@pytest.mark.parametrize("name", ["linear", "softmax", "dropout", "scaled_dot_product_attention"])
def test_what_a_function_of_python_calls(name: str, monkeypatch: Place) -> None:
    """Its copies in the engine see what others put into the module later."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2).double()
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    weights = name == "softmax" or name == "dropout"

    def fn(x: Tensor) -> Tensor:
        out = module(x, x, x, need_weights=weights)[0]
        return out + functional.dropout(out, 0.5, False)

    def check() -> None:
        step = 1e-5 * x.cos()
        slope = (fn(x + step) - fn(x - step)) / 2e-5
        for call in ("jvp", "jvp of a target"):
            torch.testing.assert_close([*DERIVATIVES[call](fn, x)], [fn(x), slope])

    check()
    with monkeypatch.context() as patch:
        patch.setattr(functional, name, _doubled(getattr(functional, name)))
        check()
    check()


def test_a_first_use_while_all_are_replaced() -> None:
    """The engine, which is imported at its first use, keeps torch's own."""
    program = """
import torch
from torch.nn import functional
from python_tests.jet.test_replaced_functions import CALLS, DERIVATIVES, _doubled
import jachess_ext, sys
assert "jachess_ext.jet" not in sys.modules
own = {name: getattr(functional, name) for name in CALLS}
for name, function in own.items():
    setattr(functional, name, _doubled(function))
x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
def run(): return {name: [d(CALLS[name], x) for d in DERIVATIVES.values()] for name in own}
during = run()
for name, function in own.items():
    setattr(functional, name, function)
after = run()
for name in own:
    for doubled, single in zip(during[name], after[name]):
        torch.testing.assert_close([*doubled], [2 * part for part in single], msg=name)
"""
    run = processes.run([sys.executable, "-c", program])
    assert run.returncode == 0, run.stderr[-2000:]
