"""One derivative more than a result gives, and another one, against finite differences.

A backward that torch cannot differentiate ends the graph without a word where the gradient that
reaches it requires none, as in a loss that is linear in the derivative: what follows is 0, or what
comes through another path alone.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jachess_ext as jx
from jachess_ext import ops
from jachess_ext.ops import library
from python_tests.covering import pairs
from python_tests.jet.drawn import Packed, randn

N, D = 3, 4


X, U = randn(2, N, D, seed=0), randn(2, 2, N, D, seed=1)
A, B, C = randn(3, D, D, seed=2) / 2
BIAS = randn(D, seed=3)
MHA = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)
MHA.load_state_dict({k: randn(*v.shape, seed=4) for k, v in MHA.state_dict().items()})


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, D // 2)).transpose(1, 2)


def attention(x: Tensor, **settings: Any) -> Tensor:
    q, k, v = (heads(x @ w) for w in (A, B, C))
    mixed = F.scaled_dot_product_attention(q, k, v, **settings)
    return mixed.transpose(1, 2).flatten(2)


def regular(x: Tensor) -> Tensor:
    """Matrices of full rank and positive definite."""
    return 0.1 * x @ x.mT + torch.eye(N, dtype=x.dtype)


def turned(x: Tensor) -> Tensor:
    z = torch.complex(x, x.sin())
    return (z @ z.mT @ z).imag


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(F.linear(x, A, BIAS).tanh(), B),
    "quantised": lambda x: F.linear(F.linear(x, A.as_subclass(Packed), BIAS).tanh(), B),
    "convolution": lambda x: F.conv1d(x, A[:3, :3, None], BIAS[:3]).tanh(),
    "matmul": lambda x: x @ x.sin().mT @ x,
    "complex matmul": turned,
    "bmm": lambda x: torch.bmm(torch.bmm(x, x.sin().mT), x),
    "baddbmm": lambda x: torch.baddbmm(x, torch.bmm(x, x.cos().mT), x, beta=0.5, alpha=0.7),
    "einsum": lambda x: torch.einsum("bik,bjk,bjl->bil", x, x.sin(), x),
    "attention, written out": lambda x: (x @ x.sin().mT / 2).softmax(-1) @ (x @ A),
    "attention": attention,
    "causal attention": partial(attention, is_causal=True),
    "attention's module": lambda x: MHA(x, x, x, need_weights=False)[0],
    "distances": lambda x: torch.cdist(x, x.sin() + 3) @ x,
    "determinant": lambda x: torch.linalg.det(regular(x))[:, None, None] * x,
    "solution": lambda x: torch.linalg.solve(regular(x), x),
    "inverse": lambda x: torch.linalg.inv(regular(x)) @ x,
    "cholesky": lambda x: torch.linalg.cholesky(regular(x)) @ x,
    "activation": lambda x: F.gelu(x) * x,
    "layer norm": lambda x: F.layer_norm(x @ A, (D,), BIAS, BIAS),
    "layer norm of a sum": lambda x: F.layer_norm(x @ A + x, (D,), BIAS, BIAS),
    "group norm": lambda x: F.group_norm(x @ A, 1, BIAS[:N].square(), None),
    "RMS norm": lambda x: F.rms_norm(x @ A, (D,), BIAS),
    "softmax": lambda x: (x @ A).softmax(-1),
    "checkpoint": lambda x: checkpoint(lambda x: x @ x.sin().mT @ x, x, use_reentrant=False),
}
if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # of older torch: takes no jets
    del PROGRAMS["checkpoint"]
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "jvp": lambda f, x: jx.jvp(f, (x,), (U[0],))[1],
    "order 1": lambda f, x: jx.jet(f, x, U, 1).streams,
    "pairs": lambda f, x: jx.jet(f, x, U).streams,
    "squares": lambda f, x: jx.jet(f, x, U, second="squares").streams,
    "sum": lambda f, x: jx.jet(f, x, U, second="sum").streams,
}
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "laplacian": lambda x: jx.laplacian(PROGRAMS["matmul"], x)[2],
    "laplacian in chunks": lambda x: jx.laplacian(PROGRAMS["matmul"], x, chunk_size=5)[2],
    "hessian_diagonal": lambda x: jx.hessian_diagonal(PROGRAMS["matmul"], x)[2],
    "divergence": lambda x: jx.divergence(PROGRAMS["matmul"], x)[1],
    "hvp": lambda x: jx.hvp(lambda x: PROGRAMS["matmul"](x).sum(), (x,), (U[0],)).product[0],
    "differentiable": lambda x: _twice(x),
    "jet_mean_squares": lambda x: ops.jet_mean_squares(_stack(x), 2)[0],
    "attention_jet_composite": lambda x: _composite(x),
}
"""Results of calls by themselves, and operators that no call above reaches on a CPU."""
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda result, x: _weighted(result),
    "with another path": lambda result, x: _weighted(result) + x.pow(4).sum(),
}


def _stack(x: Tensor) -> Tensor:
    return torch.stack([x, x.sin(), x.cos(), x * x])


def _twice(x: Tensor) -> Tensor:
    with jx.differentiable():
        return attention(x)


def _composite(x: Tensor) -> Tensor:
    jets = [heads(y).unflatten(0, (2, 1)) for y in (x, x.sin(), x.cos())]
    settings = (None, None, 1, 0.7, False, -1, -1, 0.0, 0.0, 0)
    return torch.ops.jachess.attention_jet_composite(*jets, *settings)


def _weighted(result: Tensor) -> Tensor:
    return (result * randn(*result.shape, seed=5)).sum()


def assert_differentiable(loss: Callable[[Tensor], Tensor], orders: int = 2) -> set[str]:
    """Compare the slopes of a function, of its gradient, ..., with finite differences; return the
    names of the nodes of their graphs."""

    def values(x: Tensor, count: int) -> list[Tensor]:
        """The function, and weighted sums of its gradients."""
        values = [loss(x)]
        for _ in range(count):
            (gradient,) = torch.autograd.grad(values[-1], x, create_graph=True)
            values.append(_weighted(gradient) / 10)
        return values

    x, along, step = X.clone().requires_grad_(), randn(*X.shape, seed=6), 1e-4
    results = values(x, orders - 1)
    slopes = [(torch.autograd.grad(v, x, retain_graph=True)[0] * along).sum() for v in results]
    with torch.no_grad():
        points = [(x + n * step * along).requires_grad_() for n in (-2, -1, 1, 2)]
    around = zip(*(map(Tensor.detach, values(point, orders - 1)) for point in points), strict=True)
    for slope, (a, b, c, d) in zip(slopes, around, strict=True):
        expected = (a - 8 * b + 8 * c - d) / (12 * step)
        torch.testing.assert_close(slope, expected, rtol=1e-7, atol=1e-10 * float(d.abs()) + 1e-9)
    return {name for value in results for name in _nodes(value)}


def _nodes(value: Tensor) -> Iterator[str]:
    """The names of the nodes of a graph, without the end ``Backward`` of a Function's."""
    nodes, before = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in before:
            continue
        before.add(node)
        yield node.name().removesuffix("Backward")
        nodes += [below for below, _ in node.next_functions]


@pytest.mark.parametrize("call, program", pairs(CALLS, PROGRAMS))
def test_every_derivative_of_a_result(call: str, program: str) -> None:
    for loss, orders in (("linear", 3), ("with another path", 2)):
        result = partial(CALLS[call], PROGRAMS[program])
        assert_differentiable(lambda x, loss=LOSSES[loss], f=result: loss(f(x), x), orders)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ALONE)
def test_every_derivative_of_other_calls(name: str, loss: str) -> None:
    assert_differentiable(lambda x: LOSSES[loss](ALONE[name](x), x))


@pytest.mark.parametrize(
    "program, way",
    [
        *((name, "vmap") for name in PROGRAMS if name != "checkpoint"),
        ("linear", "is_grads_batched"),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_gradients_at_once(program: str, way: str) -> None:
    x = X.clone().requires_grad_()
    result = CALLS["sum"](PROGRAMS[program], x).flatten()
    rows = randn(3, len(result), seed=7)
    for create_graph in (False, True):
        gradient = partial(
            torch.autograd.grad, result, x, retain_graph=True, create_graph=create_graph
        )
        expected = torch.stack([gradient(row)[0] for row in rows])
        if way == "vmap":
            found = torch.vmap(lambda row, gradient=gradient: gradient(row)[0])(rows)
        else:
            (found,) = gradient(rows, is_grads_batched=True)
        torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(_weighted(g), x, retain_graph=True)[0] for g in (found, expected)]
    torch.testing.assert_close(*slopes)


def _functions_of_the_package(below: Any = torch.autograd.Function) -> Iterator[type]:
    """Of its modules' classes, not of those that they make of a user's Function."""
    for function in below.__subclasses__():
        module, ours = function.__module__, ("jachess_ext.jet", "jachess_ext.ops")
        if module.startswith(ours) and hasattr(sys.modules[module], function.__name__):
            yield function
        yield from _functions_of_the_package(function)


def test_every_function_is_among_them() -> None:
    """Each autograd Function of the engine and the operators, and each operator with a backward."""
    for name in ("jachess_ext.jet", "jachess_ext.ops"):
        importlib.import_module(name)
        for module in pkgutil.walk_packages(sys.modules[name].__path__, f"{name}."):
            if not module.name.endswith("triton_kernels"):  # which Triton is needed for
                importlib.import_module(module.name)
    functions = {function.__name__ for function in _functions_of_the_package()}
    operators = {*library._OPERATORS, *library._DEFINED}
    differentiable = {name for name in operators if f"{name}_backward" in operators}
    # whose backward runs on a GPU
    differentiable -= {"attention_jet_hybrid", "attention_jet_triton"}
    results = [partial(CALLS[c], f) for c in ("jvp", "sum") for f in PROGRAMS.values()]
    losses = [lambda x, call=call: _weighted(call(x)) for call in [*results, *ALONE.values()]]
    used = {name for loss in losses for name in assert_differentiable(loss)}
    # The first refuses them (test_gradient_loss.py), the second is for ranks (test_collectives.py).
    assert functions - used == {"AttachGradients", "Collective"}
    nodes = {f"GeneratedBackwardFor_jachess_{name}_default": name for name in differentiable}
    assert set(nodes) - used == set() or not library.loaded()
