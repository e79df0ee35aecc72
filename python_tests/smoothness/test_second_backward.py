"""Second derivatives of every differentiable result against finite differences; or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jachess_ext as jx
from python_tests.smoothness.tiny_models import classifier, token_batch

Scalar = Callable[[nn.Module, Tensor], Tensor]


def network() -> nn.Module:
    """A field [N, 3] to [N, 3] with a norm, whose third derivative torch itself has wrong."""
    torch.manual_seed(0)
    parts = [nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4), nn.GELU()]
    return nn.Sequential(*parts, nn.Linear(4, 3)).double()


def total(result: Any) -> Tensor:
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
    return sum(
        (t * torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape)).square().sum() for t in tensors
    )


def directions(x: Tensor) -> Tensor:
    return torch.randn(2, *x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))


RESULTS: dict[str, Scalar] = {
    "jvp": lambda net, x: total(jx.jvp(net, (x,), (directions(x)[0],))),
    **{
        f"jet, {second}": lambda net, x, s=second: total(
            jx.jet(net, x, directions(x), 2, s).streams
        )
        for second in ("pairs", "squares", "sum")
    },
    "laplacian": lambda net, x: total(jx.laplacian(net, x)),
    "laplacian in chunks": lambda net, x: total(jx.laplacian(net, x, chunk_size=1)),
    "laplacian of both signs": lambda net, x: total(jx.laplacian(net, x, weights=[1, -1, 2.0])),
    "hessian_diagonal": lambda net, x: total(jx.hessian_diagonal(net, x)),
    "divergence": lambda net, x: total(jx.divergence(net, x)),
    "hvp": lambda net, x: total(jx.hvp(lambda x: net(x).sum(), (x,), (directions(x)[0],))),
    "gradient_loss": lambda net, x: (
        jx.gradient_loss(net, x, lambda value, gradient: gradient.square().sum() + value.sum()).loss
    ),
    "gradient_loss, linear": lambda net, x: (
        jx.gradient_loss(net, x, lambda value, gradient: (gradient * directions(x)[0]).sum()).loss
    ),
}


def is_right(compute: Callable[[], Tensor], parameters: list[Tensor]) -> None:
    """Compare ∂²/∂θ² along a direction with a central difference of ∂/∂θ."""
    generator = torch.Generator().manual_seed(3)
    step = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]

    def gradients(**how: bool) -> list[Tensor]:
        grads = torch.autograd.grad(compute(), parameters, allow_unused=True, **how)
        return [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)
        ]

    try:
        slope = sum((g * s).sum() for g, s in zip(gradients(create_graph=True), step, strict=True))
        products = torch.autograd.grad(slope, parameters, allow_unused=True)
    except RuntimeError:
        return
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, s in zip(parameters, step, strict=True):
                p.add_(s, alpha=sign * 1e-5)
        sides.append(gradients())
        with torch.no_grad():
            for p, s in zip(parameters, step, strict=True):
                p.sub_(s, alpha=sign * 1e-5)
    largest = max(float(a.abs().max()) for a in sides[0])
    for product, above, below in zip(products, *sides, strict=True):
        expected = (above - below) / 2e-5
        product = torch.zeros_like(expected) if product is None else product
        torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("name", RESULTS)
def test_of_a_function(name: str) -> None:
    net, x = network(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    leaves = [x, *net.parameters()]
    is_right(lambda: RESULTS[name](net, x), leaves)


@pytest.mark.parametrize(
    "name, engine, squared",
    [("bert", "jet", False), ("gpt2", "jet", True), ("gpt2", "reverse", False)],
)
def test_of_a_model(name: str, engine: str, squared: bool) -> None:
    model, batch = classifier(name), token_batch([3])
    penalty = jx.JacHess(
        model,
        weights="uniform",
        engine=engine,
        squared=squared,
        directions=2,
        dimensions=1,
        layers=[-1],
        seed=0,
    )

    def compute() -> Tensor:
        penalty.step = 0
        return penalty(batch).total

    is_right(compute, list(model.parameters()))
