"""Models that mix the samples of a batch are refused, whatever they mix; others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx

from .oracles import kernel

Function = Callable[[Tensor], Tensor]
MIXING: dict[str, Function] = {
    "minus the mean": lambda y: y - y.mean(0),
    "over the spread": lambda y: y / (y - y.mean(0)).norm(dim=0),
    "softmax over samples": lambda y: y.softmax(0),
    "minus its mirror": lambda y: y - y.flip(0),
    "plus the first": lambda y: y + y[:1],
    "plus the last": lambda y: y + y[-1:],
    "running sums": lambda y: y.cumsum(0),
    "attention over samples": lambda y: (y @ y.T).softmax(-1) @ y,
    "two far samples": lambda y: torch.cat([y[:-1], y[-1:] + y[:1]]),
    "one output": lambda y: torch.cat([y[:, :-1], y[:, -1:] - y[:, -1:].mean()], 1),
    "gradients alone": lambda y: y + y.mean(0) - y.mean(0).detach(),
    "gradients of the first": lambda y: y + y[:1] - y[:1].detach(),
}
SEPARATE: dict[str, Function] = {
    "nothing": lambda y: y,
    "centred outputs": lambda y: y - y.mean(1, keepdim=True),
    "dead": lambda y: torch.relu(y - 100),
    "some dead": torch.relu,
    "softmax": lambda y: y.softmax(1),
}


class Model(nn.Module):
    def __init__(self, outputs: int, last: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x))


def inputs(samples: int) -> Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("outputs", "samples"), [(1, 2), (3, 3), (2, 40)])
@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused(name: str, outputs: int, samples: int) -> None:
    method = "per_sample" if samples == 3 else "auto"
    with pytest.raises(RuntimeError, match="depend on the other samples"):
        jx.ntk(Model(outputs, MIXING[name]), inputs(samples), method=method)


def _far(change: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Sample 37 has something of sample 12."""

    def function(y: Tensor) -> Tensor:
        if len(y) < 38:
            return y
        return torch.cat([y[:37], change(y[37:38], y[12:13]), y[38:]])

    return function


FAR: dict[str, tuple[Function, Function]] = {  # of the inputs, of the outputs
    "sum": (lambda x: x, _far(lambda a, b: a + b)),
    "gradients alone": (lambda x: x, _far(lambda a, b: a + b - b.detach())),
    "a detached factor": (lambda x: x, _far(lambda a, b: a * b.detach())),
    "inputs": (_far(lambda a, b: a + b), lambda y: y),
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", FAR)
def test_two_samples_anywhere_are_refused(name: str, outputs: int) -> None:
    first, last = FAR[name]
    model = Model(outputs, last)
    model.layers.register_forward_pre_hook(lambda module, given: first(given[0]))
    with pytest.raises(RuntimeError, match="depend on the other samples"):
        jx.ntk(model, inputs(40))


def test_sorted_samples_are_refused_where_they_came_sorted() -> None:
    model = Model(1, lambda y: y.sort(0).values)
    x = inputs(2)
    if model.layers(x[:1]) > model.layers(x[1:]):
        x = x.flip(0)
    with pytest.raises(RuntimeError, match="depend on the other samples"):
        jx.ntk(model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("samples", [2, 12])
@pytest.mark.parametrize("name", ["layer norm", "unit length", "tiny"])
def test_round_off_is_no_mixing(name: str, samples: int, dtype: torch.dtype) -> None:
    """Gradients that are zero in exact arithmetic, or that float16 hardly holds."""
    functions: dict[str, Function] = {
        "layer norm": lambda y: nn.functional.layer_norm(y, y.shape[1:]),
        "unit length": lambda y: nn.functional.normalize(y, dim=1),
        "tiny": lambda y: y * 1e-6,
    }
    for outputs in (1, 2, 3):
        model = Model(outputs, functions[name]).to(dtype)
        jx.ntk(model, inputs(samples).to(dtype), outputs="sum")


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", SEPARATE)
def test_others_are_not(name: str, samples: int) -> None:
    model, x = Model(2, SEPARATE[name]), inputs(samples)
    theta = jx.ntk(model, x)
    torch.testing.assert_close(theta, kernel(model, x).float(), rtol=1e-4, atol=1e-5)


SHAPES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "0-d, a factor": ((), lambda x, w, t: (x @ w.T) * t),
    "0-d, an addend": ((), lambda x, w, t: x @ w.T + t),
    "0-d, in the matrix": ((), lambda x, w, t: x @ (w * t).T),
    "0-d, an exponent": ((), lambda x, w, t: ((x @ w.T) ** 2 + 1) ** t),
    "one entry": ((1,), lambda x, w, t: (x @ w.T) * t),
    "a vector": ((5,), lambda x, w, t: torch.sin(x @ w.T * t)),
    "1 x 1": ((1, 1), lambda x, w, t: (x @ w.T) * t),
    "three dimensions": ((2, 3, 5), lambda x, w, t: x @ w.T + torch.einsum("ni,kij->nj", x, t)),
    "empty": ((0, 5), lambda x, w, t: x @ w.T + t.sum()),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_any_shape(name: str) -> None:
    shape, function = SHAPES[name]

    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.matrix = nn.Parameter(torch.randn(5, 3))
            self.other = nn.Parameter(torch.rand(shape) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.matrix, self.other)

    model = Shaped()
    with warnings.catch_warnings():  # of parameters that are taken sample by sample
        warnings.simplefilter("ignore", RuntimeWarning)
        theta = jx.ntk(model, inputs(4))
    torch.testing.assert_close(theta, kernel(model, inputs(4)).float(), rtol=1e-4, atol=1e-4)
