"""Masks of attention that are tensors of a class of their own, which alone knows what they mean.

The oracle is attention written out with a plain boolean mask, by torch.func and double backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import jachess_ext as jx
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS

BIASES = {"upper left": causal_upper_left, "lower right": causal_lower_right}
CASES = [
    ("upper left", (5, 3), 3),
    ("lower right", (3, 5), 3),
    ("lower right", (5, 3), 2),
]
WEIGHTS = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)


class Attention(torch.nn.Module):
    """Rows ``[N, T·6]`` through attention of six columns, whose keys are other rows of tokens."""

    attention = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, mask: Callable[[], Any], sizes: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.mask, self.sizes, self.heads = mask, sizes, heads
        self.weight = torch.nn.Parameter(torch.randn(3, 6, 6, dtype=torch.float64) / 3)

    def forward(self, x: Any) -> Any:
        rows, keys = self.sizes
        tokens = x.unflatten(-1, (-1, 6))
        parts = (tokens[:, :rows], tokens[:, -keys:], tokens[:, :keys])
        q, k, v = (
            (part @ w).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, w in zip(parts, self.weight, strict=True)
        )
        return self.attention(q, k, v, attn_mask=self.mask()).transpose(1, 2).flatten(1)


class WrittenOut(Attention):
    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * attn_mask
        return weights / weights.sum(-1, True).clamp_min(1e-300) @ v  # rows without keys are 0


def with_plain_mask(net: Attention, name: str) -> WrittenOut:
    """Return the oracle of attention with a mask of that name."""
    oracle = WrittenOut(lambda: plain_mask(name, *net.sizes), net.sizes, net.heads)
    oracle.load_state_dict(net.state_dict())
    return oracle


def plain_mask(name: str, rows: int, keys: int) -> Tensor:
    ahead = torch.arange(keys) - torch.arange(rows)[:, None]
    return ahead <= (0 if name == "upper left" else keys - rows)


@pytest.fixture(params=CASES, ids=str)
def nets(request: Any) -> Iterator[tuple[Attention, Attention, Tensor, Tensor]]:
    """Yield attention with torch's bias and with a plain mask, and a point and a direction."""
    name, (rows, keys), heads = request.param
    torch.manual_seed(0)
    net = Attention(lambda: BIASES[name](rows, keys), (rows, keys), heads)
    oracle = with_plain_mask(net, name)
    with warnings.catch_warnings():  # of rows without keys
        warnings.simplefilter("ignore")
        yield net, oracle, *torch.randn(2, 2, max(rows, keys) * 6, dtype=torch.float64)


def jvp(fn: Callable[[Any], Any], x: Tensor, u: Tensor) -> Tensor:
    return torch.func.jvp(fn, (x,), (u,))[1]


def diagonal(fn: Callable[[Any], Any], x: Tensor, order: int) -> Tensor:
    """Return Σ ∂f_i/∂x_i or Σ ∂²f/∂x_i² of each row, by torch.func."""

    def along(unit: Tensor) -> Tensor:
        u = unit.expand_as(x)
        return jvp(fn, x, u) if order == 1 else jvp(lambda x: jvp(fn, x, u), x, u)

    parts = torch.func.vmap(along)(torch.eye(x.shape[1], dtype=x.dtype))
    return parts.diagonal(dim1=0, dim2=2).sum(-1) if order == 1 else parts.sum(0)


WAYS: dict[str, tuple[Callable, Callable]] = {
    "jvp": (
        lambda f, x, u: torch.stack(jx.jvp(f, (x,), (u,))),
        lambda f, x, u: torch.stack([f(x), jvp(f, x, u)]),
    ),
    "jet": (
        lambda f, x, u: jx.jet(f, x, torch.stack([u, u.cos()])).second[0],
        lambda f, x, u: jvp(lambda x: jvp(f, x, u.cos()), x, u),
    ),
    "laplacian": (lambda f, x, u: jx.laplacian(f, x)[2], lambda f, x, u: diagonal(f, x, 2)),
    "divergence": (
        lambda f, x, u: jx.divergence(lambda x: x * f(x).sum(-1, True), x)[1],
        lambda f, x, u: diagonal(lambda x: x * f(x).sum(-1, True), x, 1),
    ),
    "hvp": (
        lambda f, x, u: jx.hvp(lambda x: f(x).square().sum(), (x,), (u,))[2][0],
        lambda f, x, u: torch.autograd.functional.hvp(
            lambda x: f(x).square().sum(), x, u, create_graph=True
        )[1],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_torchs_causal_bias(way: str, nets: Any) -> None:
    net, oracle, x, u = nets
    ours, reference = WAYS[way]
    out, expected = ours(net, x, u), reference(oracle, x, u)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    grad, wanted = (
        torch.autograd.grad((part * part.detach().cos()).sum(), model.weight)[0]
        for part, model in ((out, net), (expected, oracle))
    )
    torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-9)


def test_a_tangent_without_a_graph(nets: Any) -> None:
    net, oracle, x, u = nets
    out, tangent = jx.jvp(net, (x,), (u,), differentiable=False)
    torch.testing.assert_close(tangent, jvp(oracle, x, u))
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), net.weight)[0],
        torch.autograd.grad(oracle(x).square().sum(), oracle.weight)[0],
    )


def test_gradient_loss(nets: Any) -> None:
    net, oracle, x, _ = nets

    def penalty(value: Tensor, gradient: Tensor) -> Tensor:
        return gradient.square().sum() + value.sum()

    value = jx.gradient_loss(net, x, penalty).loss
    x = x.clone().requires_grad_()
    out = oracle(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    expected = penalty(out, slope)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        torch.autograd.grad(value, net.weight)[0], torch.autograd.grad(expected, oracle.weight)[0]
    )


def test_differentiable(nets: Any) -> None:
    net, oracle, x, _ = nets
    x = x.clone().requires_grad_()
    with jx.differentiable():
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    out = torch.autograd.grad(slope.square().sum(), [x, net.weight])
    (slope,) = torch.autograd.grad(oracle(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(out, torch.autograd.grad(slope.square().sum(), [x, oracle.weight]))


@NEEDS_MODULES_IN_GRAPHS
def test_in_a_graph() -> None:
    name = "lower right"
    net = Attention(lambda: BIASES[name](3, 5), (3, 5), 2)
    oracle = with_plain_mask(net, name)
    x, u = torch.randn(2, 2, 30, dtype=torch.float64)
    compiled_jvp = torch.compile(lambda x, u: jx.jvp(net, (x,), (u,))[1], backend="aot_eager")
    out, expected = compiled_jvp(x, u), jvp(oracle, x, u)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), net.weight)[0],
        torch.autograd.grad(expected.square().sum(), oracle.weight)[0],
    )


# ---- classes of others ---------------------------------------------------------------------------


class Silent(Tensor):
    """A mask without numbers, whose class answers for tensors of its own alone, as torch's does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Answering(Silent):
    """One that calls attention with the plain mask that it stands for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **{**kwargs, "attn_mask": plain_mask("lower right", 3, 5)})


class Numbers(Tensor):
    """One that holds its numbers, and leaves the answer to torch."""


PASSES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "jvp": lambda f, x, u: jx.jvp(f, (x,), (u,))[1],
    "jet": lambda f, x, u: jx.jet(f, x, u[None], order=1).first[0],
    "target": lambda f, x, u: jx.jvp(f, (x,), (u,), differentiable=False)[1],
}


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("kind", [Silent, Answering, Numbers])
def test_masks_of_others(kind: Any, way: str) -> None:
    mask = plain_mask("lower right", 3, 5) if kind is Numbers else torch.empty(3, 5)
    net = Attention(lambda: mask.as_subclass(kind), (3, 5), 2)
    oracle = with_plain_mask(net, "lower right")
    x, u = torch.randn(2, 2, 30, dtype=torch.float64)
    if kind is Silent:
        with pytest.raises(jx.MissingJetRule, match=r"its mask is a .*Silent; pass a plain tensor"):
            PASSES[way](net, x, u)
    else:
        expected = jvp(oracle, x, u)
        torch.testing.assert_close(PASSES[way](net, x, u), expected)
