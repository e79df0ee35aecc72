"""`ComposedNorms`: values as torch's, and third derivatives against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jachess_ext.smoothness import reverse
from jachess_ext.smoothness.reverse import ComposedNorms

NORMS: dict[str, tuple[Callable, bool]] = {
    "layer_norm": (F.layer_norm, True),
    "rms_norm": (F.rms_norm, False),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make(name: str, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    function, biased = NORMS[name]
    extra = {"weight": random(*shape, seed=1), "eps": 1e-3}
    if biased:
        extra["bias"] = random(*shape, seed=2)
    return lambda x: function(x, shape, **extra)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor, order: int) -> Tensor:
    """∂(D^{order−1}(v·f)[u, ...])/∂x by repeated backward passes."""
    x = x.detach().requires_grad_()
    y = (function(x) * random(*x.shape, seed=3)).sum()
    for _ in range(order - 1):
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        y = (gradient * random(*x.shape, seed=4)).sum()
    return torch.autograd.grad(y, x)[0]


@pytest.mark.parametrize("shape", [(8,), (4, 8)])
@pytest.mark.parametrize("name", NORMS)
def test_derivatives(name: str, shape: tuple[int, ...]) -> None:
    x, norm = random(3, 4, 8, seed=5), make(name, shape)
    with ComposedNorms():
        composed = [norm(x)] + [derivative(norm, x, order) for order in (1, 2, 3)]
    plain = [norm(x)] + [derivative(norm, x, order) for order in (1, 2)]
    for ours, torchs in zip(composed, plain, strict=False):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)
    d, h = random(*x.shape, seed=6), 1e-4
    shifted = [derivative(norm, x + s * h * d, 2) for s in (1, -1, 2, -2)]
    narrow, wide = (shifted[0] - shifted[1]) / (2 * h), (shifted[2] - shifted[3]) / (4 * h)
    # D³ is symmetric: ∂²(D(v·f)[u])/∂x² along d, then along u.
    difference = ((4 * narrow - wide) / 3 * random(*x.shape, seed=4)).sum()
    along = (composed[3] * d).sum()
    torch.testing.assert_close(along, difference, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NORMS)
def test_halves_are_computed_in_single(name: str) -> None:
    function, _ = NORMS[name]
    x = random(5, 16, dtype=torch.bfloat16)
    weight = random(16, seed=1, dtype=torch.bfloat16)
    with ComposedNorms():
        ours = function(x, (16,), weight=weight)
    assert ours.dtype == torch.bfloat16
    expected = function(x.double(), (16,), weight=weight.double())
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=2**-8)


def test_a_module_uses_the_composed_form_within_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for function in list(reverse._COMPOSED):
        spy = lambda *a, f=reverse._COMPOSED[function], **k: (calls.append(1), f(*a, **k))[1]  # noqa: E731
        monkeypatch.setitem(reverse._COMPOSED, function, spy)
    norm = torch.nn.LayerNorm(8).double()
    outside = norm(random(2, 8))
    assert not calls
    with ComposedNorms():
        inside = norm(random(2, 8))
    assert len(calls) == 1
    torch.testing.assert_close(inside, outside)
