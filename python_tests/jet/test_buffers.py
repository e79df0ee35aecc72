"""Programs of packages that fill a plain buffer of their own, ask for a gradient of their input, or
set the memory of a tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from jachess_ext.torch_private import release
from python_tests.jet.test_writes import streams_by_double_backward

ROWS, COLUMNS = 3, 4
MAKERS: dict[str, Callable[..., Tensor]] = {
    "zeros": lambda *s: torch.zeros(*s, dtype=torch.float64),
    "empty": lambda *s: torch.empty(*s, dtype=torch.float64).fill_(0.3),
    # torch_geometric.utils.to_dense_batch
    "repeated": lambda *s: torch.as_tensor(0.2).to(torch.float64).repeat(s),
}


@pytest.fixture(autouse=True, scope="module")
def _nothing_frozen() -> Any:
    """`conftest.py` freezes what the tests import, so that nobody finds what holds a tensor."""
    gc.unfreeze()
    yield
    gc.freeze()


INDEX = torch.tensor([4, 0, 2])


def item(b: Any, x: Any) -> Any:
    b[1] = x[0] * 2
    b[2:5] = x.sin()
    return b


def by_a_mask(b: Any, x: Any) -> Any:
    b[INDEX] = x
    b[torch.arange(5) == 1] = x[2]
    return b


def solver(b: Any, x: Any) -> Any:
    """As torchdiffeq's solvers of fixed grids fill their solution."""
    y = x[0]
    b[0] = y
    for step in range(1, 5):
        y = y + 0.1 * torch.tanh(y)
        b[step] = y
    return b


def coupling(b: Any, x: Any) -> Any:
    """As normflows' couplings and the autoregressive inverse of nflows write."""
    b[:ROWS, ::2] = x[:, ::2]
    b[:ROWS, 1::2] = x[:, 1::2] * torch.exp(torch.tanh(x[:, ::2])) + b[:ROWS, ::2]
    return b


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "mask": by_a_mask,
    "solver": solver,
    "coupling": coupling,
    "copy_": lambda b, x: b.copy_(x[[0, 1, 2, 0, 1]]).sin(),
    "add_": lambda b, x: b.add_(x[0]).mul_(x[1]),
    "index_add_": lambda b, x: b.index_add_(0, INDEX, x),
    "masked_fill_": lambda b, x: b.masked_fill_(torch.arange(5)[:, None] > 2, x.sum()),
    "in a list of arguments": lambda b, x: torch.cat([item(b, x), x]),
}


def _program(maker: str, write: str, weight: Tensor) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        buffer = MAKERS[maker](5, COLUMNS)
        out = WRITES[write](buffer, x * weight)
        return (out * out.cos()).sum(-1)

    return program


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, u, v = torch.randn(4, ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), w.requires_grad_(), u, v


@pytest.mark.parametrize(
    "maker, write", [*(("zeros", w) for w in WRITES), *((m, "solver") for m in [*MAKERS][1:])]
)
def test_a_buffer_of_the_pass(maker: str, write: str) -> None:
    x, w, u, v = _tensors()
    fn = _program(maker, write, w)
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    streams = jx.jet(fn, x, torch.stack([u, v])).streams
    expected = streams_by_double_backward(fn, x, u, v)
    torch.testing.assert_close(streams, expected, **tolerance)
    weights = torch.randn_like(streams)
    for grad, wanted in zip(
        torch.autograd.grad((streams * weights).sum(), (x, w)),
        torch.autograd.grad((expected * weights).sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, **tolerance)
    value, tangent = jx.jvp(fn, (x,), (u,), differentiable=False)
    torch.testing.assert_close(tangent, expected[1].detach(), **tolerance)
    for grad, wanted in zip(
        torch.autograd.grad(value.square().sum(), (x, w)),
        torch.autograd.grad(fn(x).square().sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, **tolerance)


class _Cache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(5, COLUMNS, dtype=torch.float64))


MODULE, OUTSIDE = _Cache(), torch.zeros(5, COLUMNS, dtype=torch.float64)


def _of_a_module(x: Any) -> Any:
    MODULE.cache[:ROWS] = x
    return MODULE.cache.clone()


def _by_default(x: Any, cache: Tensor = torch.zeros(5, COLUMNS, dtype=torch.float64)) -> Any:  # noqa: B008
    cache[0] = x[0]
    return cache.clone()


def _with_a_view(x: Any) -> Any:
    buffer = torch.zeros(5, COLUMNS, dtype=torch.float64)
    row = buffer[0]
    buffer[0] = x[0]
    return row * 2


def _with_numpy(x: Any) -> Any:
    buffer = torch.zeros(5, COLUMNS, dtype=torch.float64)
    array = buffer.numpy()
    buffer[0] = x[0]
    return torch.from_numpy(array) * 2


def _in_a_list(x: Any) -> Any:
    buffers = [torch.zeros(5, COLUMNS, dtype=torch.float64)]
    buffers[0][0] = x[0]
    return buffers[0] * 2


KEPT = [
    *(_of_a_module, _by_default, _with_a_view),
    *(_with_numpy, _in_a_list),
]


@pytest.mark.parametrize(
    "program, differentiable", [(_of_a_module, False), *((program, True) for program in KEPT)]
)
def test_a_buffer_that_is_held_or_shared_is_refused(
    program: Callable, differentiable: bool
) -> None:
    x, _, u, _ = _tensors()
    x = x.detach()
    with pytest.raises(jx.MissingJetRule, match="unless the pass made it"):
        jx.jvp(program, (x,), (u,), differentiable=differentiable)
    assert type(MODULE.cache) is Tensor
    assert all(type(default) is Tensor for default in _by_default.__defaults__ or ())


def test_a_buffer_is_refused_where_objects_are_hidden() -> None:
    x, w, u, _ = _tensors()
    gc.freeze()
    try:
        with pytest.raises(jx.MissingJetRule, match="unless the pass made it"):
            jx.jet(_program("zeros", "mask", w), x.detach(), u[None])
    finally:
        gc.unfreeze()


def test_a_buffer_that_a_graph_knows_is_refused() -> None:
    def program(x: Any) -> Any:
        buffer = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        product = buffer * w
        buffer[0] = x[0]
        return product + buffer

    x, w, u, _ = _tensors()
    with pytest.raises(jx.MissingJetRule, match="unless the pass made it"):
        jx.jet(program, x, u[None])


@pytest.mark.skipif(release(torch.__version__) < (2, 11), reason="refuses jets in a checkpoint")
def test_within_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    x, w, u, v = _tensors()
    fn = _program("zeros", "solver", w)
    expected = streams_by_double_backward(fn, x, u, v)
    streams = jx.jet(
        lambda x: checkpoint(fn, x, use_reentrant=False), x, torch.stack([u, v])
    ).streams
    for grad, wanted in zip(
        torch.autograd.grad(streams.square().sum(), (x, w)),
        torch.autograd.grad(expected.square().sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted)


# ---- other questions of packages -----------------------------------------------------------------

PASSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "jet": lambda fn, x, u: jx.jet(fn, x, torch.stack([u, u])).first[0],
    "jvp": lambda fn, x, u: jx.jvp(fn, (x,), (u,))[1],
    "target": lambda fn, x, u: jx.jvp(fn, (x,), (u,), differentiable=False)[1],
}


def _asks_by_a_method(x: Any) -> Any:
    x.requires_grad_(True)
    return torch.sin(x)


def _asks_by_an_attribute(x: Any) -> Any:
    x.requires_grad = True
    return torch.sin(x)


def _hidden(x: Any) -> Any:
    return torch.sin((x * 1).requires_grad_(True))


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("program", [_asks_by_a_method, _asks_by_an_attribute, _hidden])
def test_a_gradient_is_asked_for(program: Callable, training: bool, way: str) -> None:
    x, _, u, _ = _tensors()
    x = x.detach().requires_grad_(training)
    torch.testing.assert_close(PASSES[way](program, x, u).detach(), (x.cos() * u).detach())


@pytest.mark.parametrize("way", PASSES)
def test_how_many_dimensions(way: str) -> None:
    x, _, u, _ = _tensors()
    torch.testing.assert_close(PASSES[way](lambda x: x * x.ndimension(), x.detach(), u), 2 * u)


def _data_of_a_buffer(x: Any) -> Any:
    buffer = torch.zeros_like(OUTSIDE)
    buffer.data = x
    return buffer * 2


def _data_of_a_parameter(x: Any) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    parameter.data = x * 2
    return parameter * 2


def _data_of_itself(x: Any) -> Any:
    x.data = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    return x * 2


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("program", [_data_of_a_buffer, _data_of_a_parameter, _data_of_itself])
def test_memory_is_not_replaced_by_derivatives(program: Callable, way: str) -> None:
    x, _, u, _ = _tensors()
    with pytest.raises(RuntimeError, match=r"data .*was set"):
        PASSES[way](program, x.detach(), u)
    assert "data" not in vars(Tensor)


@pytest.mark.parametrize("way", PASSES)
def test_memory_of_a_plain_tensor_is_replaced_as_ever(way: str) -> None:
    def program(x: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=torch.float64))
        weight.data = weight.data * 2
        return x * weight + x.data

    x, _, u, _ = _tensors()
    torch.testing.assert_close(PASSES[way](program, x.detach(), u).detach(), 2 * u)


# ---- many cotangents at once ---------------------------------------------------------------------


def _batched(y: Tensor, x: Any, rows: Tensor, graph: bool) -> Any:
    return torch.autograd.grad(y, x, rows, is_grads_batched=True, create_graph=graph)


def _by_vmap(y: Tensor, x: Any, rows: Tensor, graph: bool) -> Any:
    return torch.vmap(
        lambda row: torch.autograd.grad(y, x, row, retain_graph=True, create_graph=graph)
    )(rows)


@pytest.mark.parametrize("many", [_batched, _by_vmap])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_and_many_cotangents(bias: bool, graph: bool, many: Callable) -> None:
    """Of as many rows as faster products begin at."""
    torch.manual_seed(0)
    x, u = torch.randn(2, 400, 16)
    leaves = [x.requires_grad_(), torch.randn(5, 16, requires_grad=True)]
    shift = torch.randn(5) if bias else None
    y = jx.jvp(lambda x: F.linear(x, leaves[1], shift).sin(), (x,), (u,))[1]
    rows = torch.randn(4, *y.shape)
    singly = [torch.autograd.grad(y, leaves, row, create_graph=True) for row in rows]
    expected = [torch.stack(parts) for parts in zip(*singly, strict=True)]
    result = many(y, leaves, rows, graph)
    for part, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-4, check_stride=False)
    if graph and many is _batched:
        again = [torch.autograd.grad(part[1].square().sum(), leaves, retain_graph=True)
                 for part in (result[1], expected[1])]  # fmt: skip
        torch.testing.assert_close(again[0], again[1], rtol=1e-3, atol=1e-3)
