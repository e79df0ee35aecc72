"""The numbers of one call are those of one function, also where it draws random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx
from python_tests.jet.drawn import randn

N, D = 5, 4
Rows = Callable[[Tensor], Tensor]


def attention(x: Tensor) -> Tensor:
    h = torch.stack([x, x.sin()], -1)
    return F.scaled_dot_product_attention(h, h, h.cos(), dropout_p=0.5).sum(-1)


DRAWING: dict[str, Rows] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5) * x,
    "randn_like": lambda x: (x * torch.randn_like(x)).sin(),
    "bernoulli": lambda x: x.sin() * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: (
        x * x.detach().exp().multinomial(1) + x.sin() * x.detach().exp().multinomial(1)
    ),
    "attention's dropout": attention,
    "some numbers": lambda x: (x * torch.randn(()).item()).sin(),
}


def with_seed(fn: Rows, seed: int) -> Rows:
    """The function that ``fn`` is with this seed."""

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return fn(x)

    return run


def derivatives(fn: Rows, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, first derivatives ``[D, N, D]``, squares ``[D, N, D]`` by reverse mode, twice."""
    x = x.clone().requires_grad_()
    value = fn(x)
    first, second = torch.zeros(D, N, D).double(), torch.zeros(D, N, D).double()
    for k in range(D):
        (slope,) = torch.autograd.grad(value[:, k].sum(), x, create_graph=True)
        first[:, :, k] = slope.T
        for i in range(D):
            (bend,) = torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)
            second[i, :, k] = bend[:, i]
    return value, first, second


WEIGHTS = torch.tensor([2.0, 0.0, -3.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", DRAWING)
def test_one_function(name: str, chunk_size: int | None) -> None:
    fn, x = DRAWING[name], randn(N, D)
    value, first, second = derivatives(with_seed(fn, 7), x)
    torch.manual_seed(7)
    fn(x)
    after = torch.get_rng_state()
    weighted = (WEIGHTS[:, None, None] * second).sum(0)
    trace = first.diagonal(dim1=0, dim2=2).sum(-1)
    own: dict[str, Any] = {"chunk_size": chunk_size}
    differentiated = WEIGHTS.clone().requires_grad_()
    calls: list[tuple[Callable[[], Any], list[Tensor]]] = [
        (lambda: jx.laplacian(fn, x, **own), [value, first, second.sum(0)]),
        (lambda: jx.laplacian(fn, x, weights=WEIGHTS, **own), [value, first, weighted]),
        (lambda: jx.laplacian(fn, x, weights=differentiated, **own), [value, first, weighted]),
        (lambda: jx.hessian_diagonal(fn, x, **own), [value, first, second]),
        (lambda: jx.divergence(fn, x, **own), [value, trace]),
        (lambda: jx.laplacian(lambda x: (fn(x), 0), x, has_aux=True, **own)[:3], [value, first]),
    ]
    for call, expected in calls:
        for _ in range(2):  # with and without the question whether rows depend on each other
            torch.manual_seed(7)
            results = call()
            assert torch.equal(torch.get_rng_state(), after)
            for result, wanted in zip(results, expected, strict=False):
                torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", DRAWING)
def test_one_function_in_one_pass(name: str) -> None:
    fn, x, v = DRAWING[name], randn(N, D), randn(N, D, seed=1)
    fixed = with_seed(fn, 7)
    value, first, _ = derivatives(fixed, x)
    torch.manual_seed(7)
    fn(x)
    after = torch.get_rng_state()
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(fixed(point).sum(), point, create_graph=True)
    (product,) = torch.autograd.grad((slope * v).sum(), point, allow_unused=True)
    along = torch.einsum("ink,ni->nk", first, v)
    total = lambda x: fn(x).sum()  # noqa: E731
    calls: list[tuple[Callable[[], Any], list[Any]]] = [
        (lambda: jx.hvp(total, (x,), (v,)), [value.sum(), (slope,), (product,)]),
        (lambda: jx.jvp(fn, (x,), (v,)), [value, along]),
        (lambda: jx.jvp(fn, (x,), (v,), differentiable=False), [value, along]),
    ]
    for call, expected in calls:
        torch.manual_seed(7)
        torch.testing.assert_close(list(call()), expected, rtol=1e-9, atol=1e-11)
        assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(7)
    jet = jx.jet(fn, x, v[None], order=1)
    torch.testing.assert_close([jet.primal, jet.first[0]], [value, along], rtol=1e-9, atol=1e-11)
    assert torch.equal(torch.get_rng_state(), after)


def test_rounding_that_is_looked_into_draws_nothing() -> None:
    """Its passes begin with the numbers of the call's, and what comes after the call goes on."""
    cancelling = lambda x: (F.dropout(x.sin(), 0.5) + 1e9 * x) - 1e9 * x  # noqa: E731
    x = randn(N, D)
    torch.manual_seed(7)
    cancelling(x)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    jx.laplacian(cancelling, x)
    assert torch.equal(torch.get_rng_state(), after)
