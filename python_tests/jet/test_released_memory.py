"""What a call made is freed with its result, by counting references alone.

A reference cycle keeps its tensors until Python's collector looks for it, which may be after many
steps: memory grows meanwhile, on a GPU until there is none.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext.jet import composed_rules
from python_tests.smoothness.tiny_models import classifier, token_batch

WIDTH = 4
FREED = (Tensor, BackwardCFunction, torch.Generator)


class _Exponential(torch.autograd.Function):
    """A Function with a jvp, for which it keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * tangents[0]


class _Sine(torch.autograd.Function):
    """A Function with a jvp, for which it keeps its argument, by setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * tangents[0]


class Net(nn.Module):
    """Rows of four numbers as tokens, through attention, norms and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.unsqueeze(-1))
        q = h.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return self.leave(F.gelu(self.norm(h + mixed))).squeeze(-1)


def _written_out(x: Tensor) -> Tensor:
    return ((x @ x.mT).softmax(-1) @ x).tanh()


def _of_loss(x: Tensor, net: nn.Module) -> Any:
    return jx.gradient_loss(net, x, lambda value, gradient: gradient.square().sum()).loss


def _twice(x: Tensor, net: nn.Module) -> Tensor:
    with jx.differentiable():
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return gradient


def _through(function: Any, x: Tensor, net: nn.Module) -> Any:
    return lambda x: function.apply(net(x)).cos()


def _named(x: Tensor, net: nn.Module) -> Tensor:
    with jx.forward_code(_Exponential):
        return jx.laplacian(_through(_Exponential, x, net), x)[2]


def _composed(x: Tensor, net: nn.Module) -> Tensor:
    with composed_rules():
        return jx.jet(net, x, torch.stack([x, x])).streams


CALLS: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "jet of pairs": lambda x, net: jx.jet(net, x, torch.stack([x, x])).streams,
    "jet of a sum": lambda x, net: jx.jet(net, x, x[None], second="sum").streams,
    "jvp": lambda x, net: jx.jvp(net, (x,), (x,))[1],
    "laplacian": lambda x, net: jx.laplacian(net, x)[2],
    "laplacian in chunks": lambda x, net: jx.laplacian(net, x, chunk_size=2)[2],
    "hessian_diagonal": lambda x, net: jx.hessian_diagonal(net, x)[2],
    "divergence": lambda x, net: jx.divergence(net, x)[1],
    "hvp": lambda x, net: jx.hvp(lambda x: net(x).sum(), (x,), (x,)).product[0],
    "gradient_loss": _of_loss,
    "differentiable": _twice,
    "forward_code": _named,
    "composed rules": _composed,
    "checkpoint": lambda x, net: jx.jvp(
        lambda x: checkpoint(_written_out, x, use_reentrant=False), (x,), (x,)
    )[1],
    "ntk": lambda x, net: jx.ntk(net, x.detach()) + x.sum(),
    **{
        f"{f.__name__}, {name}": partial(
            lambda x, net, f, call: call(_through(f, x, net), x), f=f, call=call
        )
        for f in (_Exponential, _Sine)
        for name, call in {
            "jvp": lambda g, x: jx.jvp(g, (x,), (x,))[1],
            "jvp without a graph": lambda g, x: jx.jvp(g, (x,), (x,), differentiable=False)[0],
            "jet": lambda g, x: jx.jet(g, x, torch.stack([x, x]), 1).streams,
            "divergence": lambda g, x: jx.divergence(g, x)[1],
            "gradient_loss": lambda g, x: (
                jx.gradient_loss(g, x, lambda v, g: g.square().sum()).loss
            ),
        }.items()
    },
}
if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # of older torch: takes no jets
    del CALLS["checkpoint"]


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _held() -> dict[int, Any]:
    return {id(o): o for o in gc.get_objects() if issubclass(type(o), FREED)}


def left_over(call: Callable[[], object]) -> list[Any]:
    """Return the tensors and contexts of Functions that a call leaves behind, the second time."""
    call()
    with _without_collector():
        before = _held()
        call()
        return [o for key, o in _held().items() if key not in before]


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_left(name: str) -> None:
    """Of a result alone, and of one that was differentiated."""
    torch.manual_seed(0)
    net, point = Net(), torch.randn(5, WIDTH)

    def call(backward: bool) -> None:
        x = point.clone().requires_grad_()
        result = CALLS[name](x, net)
        if backward:  # the loss of gradient_loss has no second one
            torch.autograd.grad(result.sum(), x, create_graph="gradient_loss" not in name)

    for backward in (False, True):
        assert not [type(o) for o in left_over(partial(call, backward))]


MEASURES: dict[str, Callable[[nn.Module, Any], object]] = {
    "smoothness": lambda model, batch: jx.smoothness(model, batch),
    "SmoothnessProbe": lambda model, batch: jx.SmoothnessProbe(batch)(model),
    "JacHess": lambda model, batch: jx.JacHess(model)(batch).total.backward(),
    "calibrate": lambda model, batch: jx.JacHess(model).calibrate(batch),
}


@pytest.mark.parametrize("name", MEASURES)
def test_nothing_is_left_of_a_model(name: str) -> None:
    model, batch = classifier("bert"), token_batch([5, 3])

    def call() -> None:
        MEASURES[name](model, batch)
        model.zero_grad()

    assert not [type(o) for o in left_over(call)]
