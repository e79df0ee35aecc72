"""`jx.jet` and `jx.jvp` within the transforms of torch.func and forward-mode AD.

The oracles are central differences and torch's own backward through the compiled operators, which
the transforms do not use.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

import jachess_ext as jx
from python_tests.jet.drawn import randn

WEIGHTS = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}
STEP = 1e-3


class Block(nn.Module):
    """Linear layers with a bias, norms, masked attention, a sum and a product of jets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.up, self.down = nn.Linear(4, 12), nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)
        self.register_buffer("mask", torch.tensor([[True, True, False]]))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 2)).movedim(-3, 0).transpose(-3, -2)
        y = F.scaled_dot_product_attention(*qkv, attn_mask=self.mask)
        x = x + y.transpose(-3, -2).flatten(-2) + 1
        return self.rms(x) * self.down(F.gelu(self.up(x)))


@pytest.fixture
def block() -> Block:
    return Block().double()


X, V, U = randn(2, 3, 4, seed=0), randn(2, 3, 4, seed=1), randn(2, 2, 3, 4, seed=2)


def difference(fn: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    return sum(w * fn(x + s * STEP * v) for s, w in WEIGHTS.items()) / STEP


def assert_same(found: Tensor, expected: Tensor, bound: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.fixture(params=[1, 2], ids=["order 1", "order 2"])
def streams(request: pytest.FixtureRequest, block: Block) -> Callable[[Tensor], Tensor]:
    return lambda x, u=U: jx.jet(block, x, u, order=request.param).streams


def test_forward_mode(streams: Callable) -> None:
    expected = difference(streams, X, V)
    assert_same(torch.func.jvp(streams, (X,), (V,))[1], expected, 1e-6)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(streams(forward_ad.make_dual(X, V)))
    assert_same(out.tangent, expected, 1e-6)


def test_reverse_mode(streams: Callable) -> None:
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(streams(x).sin().sum(), x)[0]
    assert_same(grad(lambda x: streams(x).sin().sum())(X), expected)


def test_jacobians(streams: Callable) -> None:
    expected = torch.autograd.functional.jacobian(streams, X)
    assert_same(jacrev(streams)(X), expected)
    assert_same(jacfwd(streams)(X), expected)


def test_forward_over_reverse(streams: Callable) -> None:
    def loss(x: Tensor) -> Tensor:
        return streams(x).sin().sum()

    expected = torch.autograd.functional.vhp(loss, X, V)[1]
    assert_same(torch.func.jvp(grad(loss), (X,), (V,))[1], expected)


def test_vmap_over_points_and_directions(streams: Callable) -> None:
    points, directions = randn(3, *X.shape, seed=3), randn(3, *U.shape, seed=4)
    assert_same(vmap(streams)(points), torch.stack([streams(x) for x in points]))
    found = vmap(lambda u: streams(X, u))(directions)
    assert_same(found, torch.stack([streams(X, u) for u in directions]))


def test_gradients_of_functional_parameters(block: Block) -> None:
    parameters = dict(block.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        jet = jx.jet(lambda x: functional_call(block, given, (x,)), X, U)
        return jet.streams.sin().sum()

    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for found, right in zip(grad(loss)(parameters).values(), expected, strict=True):
        assert_same(found, right)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacrev])
def test_a_transform_inside_a_pass_is_refused(transform: Callable) -> None:
    x = randn(3, seed=1)
    with pytest.raises(jx.MissingJetRule, match=r"take the pass inside and the transform outside"):
        jx.jvp(lambda x: transform(lambda y: y.sin().sum())(x), (x,), (x,))


@pytest.mark.parametrize("differentiable", [True, False])
def test_jvp_within_transforms(block: Block, differentiable: bool) -> None:
    """A tangent that is not differentiable is a constant to the transforms around."""

    def both(x: Tensor) -> Tensor:
        return torch.stack(jx.jvp(block, (x,), (V,), differentiable=differentiable))

    found = torch.func.jvp(both, (X,), (U[0],))[1]
    expected = difference(both, X, U[0])
    if not differentiable:
        expected[1] = 0
    assert_same(found, expected, 1e-6)
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(both(x).sin().sum(), x)[0]
    assert_same(grad(lambda x: both(x).sin().sum())(X), expected)
    points = randn(3, *X.shape, seed=3)
    assert_same(vmap(both)(points), torch.stack([both(x) for x in points]))
