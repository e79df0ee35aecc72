"""An autograd Function that meets a jet is refused before anything is lost, whatever it does with
the gradient mode; a pass that begins inside of one, and ends there, is nobody's business."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from python_tests.covering import pairs

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
U = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

Formula = Callable[[Tensor], Any]


def _with_context(forward: Formula, **members: Any) -> Any:
    def run(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return forward(x)

    return _class(run, **members)


def _with_setup(forward: Formula, **members: Any) -> Any:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape

    return _class(forward, setup_context=staticmethod(setup), **members)


def _decorated(forward: Formula) -> Any:
    return _class(torch.no_grad()(lambda ctx, x: forward(x)))


def _called_object(forward: Formula) -> Any:
    class Called:
        def __call__(self, ctx: Any, x: Tensor) -> Any:
            return forward(x)

    return _class(Called())


def _partial(forward: Formula) -> Any:
    return _class(functools.partial(lambda bound, ctx, x: forward(x), None))


def _in_another(forward: Formula) -> Any:
    inner = _with_context(forward)
    return _with_context(lambda x: inner.apply(x))


def _class(forward: Any, **members: Any) -> Any:
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient

    members = {"backward": staticmethod(backward), **members}
    return type("Custom", (torch.autograd.Function,), {"forward": staticmethod(forward), **members})


KINDS = [
    *(_with_context, _with_setup, _decorated, _called_object, _partial, _in_another),
]


def _computed(x: Tensor) -> Tensor:
    return torch.round(x) * 2


def _gradients_on(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.tanh(x)


def _set_on(x: Tensor) -> Tensor:
    torch.set_grad_enabled(True)
    return x * x


def _own_graph(x: Tensor) -> Tensor:
    """As a deep equilibrium layer does."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        y = torch.tanh(z)
        (step,) = torch.autograd.grad(y.sum(), z)
    return y - step


def _by_an_operator(x: Tensor) -> Tensor:
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.mul(x, x)


def _as_it_came(x: Tensor) -> Tensor:
    return x


def _viewed(x: Tensor) -> Tensor:
    return x.view_as(x)


def _written_into(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.mul_(2)


FORMULAS = [
    *(_computed, _gradients_on, _set_on, _own_graph, _by_an_operator, _as_it_came, _viewed),
    _written_into,
]
PASSES: dict[str, Callable[[Formula], Any]] = {
    "first": lambda fn: jx.jet(fn, X, U, order=1),
    "second": lambda fn: jx.jet(fn, X.clone().requires_grad_(), U),
    "jvp": lambda fn: jx.jvp(fn, (X.clone().requires_grad_(),), (U[0],)),
    "target": lambda fn: jx.jvp(fn, (X,), (U[0],), differentiable=False),
}
AROUND = (nullcontext, torch.no_grad, torch.inference_mode)


@pytest.fixture(autouse=True)
def _gradient_mode() -> Any:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("formula, kind", pairs(FORMULAS, KINDS))
def test_a_function_is_refused(kind: Callable, formula: Formula) -> None:
    """The message names it."""
    function = kind(formula)
    for within, run in itertools.product(AROUND, PASSES.values()):
        message = rf"a jet went into the torch\.autograd\.Function {__name__}\..*Custom"
        with within(), pytest.raises(RuntimeError, match=message):
            run(lambda x: torch.sin(function.apply(x * 1)))
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("formula", [_computed, _gradients_on])
@pytest.mark.parametrize("way", PASSES)
def test_a_jet_that_only_a_closure_carries(way: str, formula: Formula) -> None:
    def model(x: Tensor) -> Tensor:
        function = _class(lambda ctx, plain: plain * formula(x))
        return function.apply(W[:3])

    with pytest.raises(RuntimeError, match=r"a jet went into the torch\.autograd\.Function"):
        PASSES[way](model)


@pytest.mark.parametrize("way", PASSES)
def test_gradients_turned_off_and_on_outside_of_functions_are_no_function(way: str) -> None:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
            with torch.enable_grad():
                y = torch.sin(x)
        return y / scale

    PASSES[way](model)


@pytest.mark.parametrize("way", PASSES)
def test_a_function_of_plain_tensors_is_none_of_the_jets_business(way: str) -> None:
    PASSES[way](lambda x: F.linear(x, _with_context(_gradients_on).apply(W)))


# ---- passes that begin inside -------------------------------------------------------------------


def _model(x: Tensor) -> Tensor:
    return torch.tanh(x @ W)


def _numbers(x: Tensor) -> Tensor:
    """One number of each kind of pass."""
    jet = jx.jet(_model, x, U)
    _, tangent = jx.jvp(_model, (x,), (U[0],))
    _, target = jx.jvp(_model, (x,), (U[1],), differentiable=False)
    return (jet.second.sum() + tangent.square().sum() + target.sum()).reshape(1)


def _expected(x: Tensor) -> Tensor:
    """By torch.func, which has nothing of the engine."""

    def along(u: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.jvp(_model, (x,), (u,))[1]

    second = torch.func.jvp(along(U[0]), (x,), (U[1],))[1]
    total = second.sum() + along(U[0])(x).square().sum() + along(U[1])(x).detach().sum()
    return total.reshape(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [*AROUND, torch.enable_grad])
def test_a_pass_may_begin_and_end_inside_a_function(kind: Callable, mode: Any) -> None:
    def inside(x: Tensor) -> Tensor:
        with mode():
            return _numbers(x).detach()

    torch.testing.assert_close(kind(inside).apply(X), _expected(X), rtol=1e-10, atol=1e-12)


def test_a_pass_may_begin_and_end_inside_a_reentrant_checkpoint() -> None:
    x, same = X.clone().requires_grad_(), X.clone().requires_grad_()
    found = checkpoint(_numbers, x, use_reentrant=True)
    expected = _expected(same)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-9, atol=1e-11)


def test_a_pass_whose_model_is_checkpointed_inside_a_function_that_differentiates() -> None:
    """The recomputation runs inside the Function, too, when the pass is over."""

    def penalty(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            jet = jx.jet(lambda x: checkpoint(_model, x, use_reentrant=False), x, U)
            (gradient,) = torch.autograd.grad(jet.second.square().sum(), x)
        return gradient

    found = _with_context(penalty).apply(X)
    torch.testing.assert_close(found, penalty(X), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("formula, kind", pairs(FORMULAS, KINDS))
def test_a_function_inside_such_a_pass_is_refused(kind: Callable, formula: Formula) -> None:
    function = kind(formula)

    def inside(x: Tensor) -> Tensor:
        return jx.jet(lambda x: torch.sin(function.apply(x * 1)), x, U).primal

    with pytest.raises(RuntimeError, match=r"a jet went into (the|a) torch\.autograd\.Function"):
        _with_setup(inside).apply(X)
    with pytest.raises(RuntimeError, match=r"a jet went into (the|a) torch\.autograd\.Function"):
        checkpoint(inside, X.clone().requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("way", PASSES)
def test_a_reentrant_checkpoint_that_turns_gradients_on(way: str) -> None:
    with pytest.raises(RuntimeError, match="reentrant gradient checkpointing"):
        PASSES[way](lambda x: checkpoint(_gradients_on, x * 1, use_reentrant=True))


# ---- inference mode inside a pass ---------------------------------------------------------------


@pytest.mark.parametrize("way", PASSES)
def test_inference_mode_inside_a_pass(way: str) -> None:
    """As torch.no_grad: values and derivatives are there, gradients are not asked for."""

    def model(mode: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ W)
        with mode():
            scale = F.layer_norm(h, (4,)).exp() + h.abs().amax(-1, keepdim=True)
            scale = scale[..., :1].expand_as(h).clone()
            scale += torch.sigmoid(scale).mul_(0.5)
            scale[0, 0] = h[1, 1]
        return scale * 2

    found = PASSES[way](functools.partial(model, torch.inference_mode))
    expected = PASSES[way](functools.partial(model, torch.no_grad))
    one, other = (getattr(result, "streams", result) for result in (found, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
