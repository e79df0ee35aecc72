"""Operators under forward-mode AD and torch.func: right numbers, never tangents of zero.

A custom operator with autograd of its own gives zero tangents to forward mode without a word
(docs/how_it_works.md, traps); the wrappers use their pure-torch references there.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from jachess_ext import ops
from python_tests.operators import OPERATORS
from python_tests.ops.cases import random_jet

Q, S = 2, 4
Wrapper = Callable[..., Tensor]


def example(name: str) -> tuple[Wrapper, list[Tensor]]:
    """A wrapper as a function of the tensors that it differentiates, and these."""
    operator = OPERATORS[name]
    shapes = enumerate(operator.shapes(S))
    inputs = [random_jet(*shape, seed=number) for number, shape in shapes]
    return partial(operator.flat, q=Q), inputs


@pytest.fixture(params=OPERATORS)
def wrapper(request: pytest.FixtureRequest) -> tuple[Wrapper, list[Tensor], list[Tensor]]:
    """A wrapper, its inputs and a direction for each."""
    function, inputs = example(request.param)
    generator = torch.Generator().manual_seed(9)
    directions = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in inputs]
    return function, inputs, directions


def moved(inputs: list[Tensor], directions: list[Tensor], step: float) -> list[Tensor]:
    return [x + step * v for x, v in zip(inputs, directions, strict=True)]


def first_difference(function: Wrapper, inputs: list[Tensor], directions: list[Tensor]) -> Tensor:
    """Fourth-order central difference of the compiled operator."""
    h = 1e-3
    weights = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}
    return sum(w * function(*moved(inputs, directions, s * h)) for s, w in weights.items()) / h


def test_forward_mode_has_the_right_tangents(wrapper) -> None:
    function, inputs, directions = wrapper
    expected = first_difference(function, inputs, directions)
    primal, tangent = torch.func.jvp(function, tuple(inputs), tuple(directions))
    torch.testing.assert_close(primal, function(*inputs))
    torch.testing.assert_close(tangent, expected, rtol=1e-8, atol=1e-8)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, v) for x, v in zip(inputs, directions, strict=True)]
        tangent = forward_ad.unpack_dual(function(*duals)).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-8, atol=1e-8)


def test_forward_mode_twice(wrapper) -> None:
    function, inputs, directions = wrapper

    def along(t: Tensor) -> Tensor:
        return function(*(x + t * v for x, v in zip(inputs, directions, strict=True)))

    def slope(t: Tensor) -> Tensor:
        return torch.func.jvp(along, (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=torch.float64)
    curvature = torch.func.jvp(slope, (zero,), (zero + 1,))[1]
    h = 1e-3
    weights = {-2: -1 / 12, -1: 4 / 3, 0: -5 / 2, 1: 4 / 3, 2: -1 / 12}
    expected = sum(w * along(zero + s * h) for s, w in weights.items()) / h**2
    torch.testing.assert_close(curvature, expected, rtol=1e-6, atol=1e-6)


def test_vmap_is_the_loop(wrapper) -> None:
    function, inputs, directions = wrapper
    batches = [torch.stack([x, x + v, x - v]) for x, v in zip(inputs, directions, strict=True)]
    expected = torch.stack([function(*rows) for rows in zip(*batches, strict=True)])
    torch.testing.assert_close(torch.func.vmap(function)(*batches), expected)


def test_reverse_and_forward_over_reverse(wrapper) -> None:
    """Against the compiled backward operator, and its own derivative by differences."""
    function, inputs, directions = wrapper

    def loss(*tensors: Tensor) -> Tensor:
        return function(*tensors).square().sum()

    def gradient(*tensors: Tensor) -> Tensor:
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss(*leaves), leaves)])

    def transformed(*tensors: Tensor) -> Tensor:
        every = tuple(range(len(inputs)))
        return torch.cat([g.flatten() for g in torch.func.grad(loss, every)(*tensors)])

    torch.testing.assert_close(transformed(*inputs), gradient(*inputs))
    tangent = torch.func.jvp(transformed, tuple(inputs), tuple(directions))[1]
    expected = first_difference(gradient, inputs, directions)
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-6)


def test_within_compile_too(wrapper) -> None:
    function, inputs, directions = wrapper

    def tangent(inputs: tuple[Tensor, ...], directions: tuple[Tensor, ...]) -> Tensor:
        return torch.func.jvp(function, inputs, directions)[1]

    torch._dynamo.reset()
    compiled = torch.compile(tangent, fullgraph=True, backend="eager")
    expected = first_difference(function, inputs, directions)
    got = compiled(tuple(inputs), tuple(directions))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_compile_alone_keeps_the_operator() -> None:
    """Dynamo must not take its own tracing for a transform."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    function, inputs = example("layer_norm_jet")
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    assert [str(n.target) for n in graphs[0].graph.nodes if "jachess" in str(n.target)]


def test_the_operator_is_back_after_the_transform() -> None:
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        seen.append(ops.available("activation_jet", x.device))
        return ops.activation_jet(x, "gelu", Q)

    x = random_jet(S, 3)
    note(x)
    torch.func.jvp(note, (x,), (x,))
    torch.func.vmap(note)(x.unsqueeze(0))
    with forward_ad.dual_level():
        note(x)
    note(x)
    assert seen == [True, False, False, False, True]


def test_an_error_within_a_transform_does_not_switch_operators_off() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("here")

    x = random_jet(S, 3)
    with pytest.raises(RuntimeError, match="here"):
        torch.func.jvp(fails, (x,), (x,))
    assert ops.available("activation_jet", "cpu")
