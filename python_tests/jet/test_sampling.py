"""`grid_sample` by its places: in every mode, against differences, and at kinks against torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jachess_ext as jx

from ..models import oracles

PADDINGS = ("zeros", "border", "reflection")
CASES = [
    *product(("bilinear", "bicubic"), PADDINGS, (False, True), ((5, 4),)),
    *product(("bilinear",), PADDINGS, (False, True), ((3, 4, 5),)),
    ("nearest", "zeros", False, (5, 4)),
    ("nearest", "reflection", True, (3, 4, 5)),
]
STEPS = oracles.Steps(1e-4, 1e-3)


def _images(*sizes: int) -> Tensor:
    return torch.randn(2, 2, *sizes, dtype=torch.float64)


def _sampler(image: Tensor, mode: str, padding: str, aligned: bool) -> Callable[[Any], Any]:
    return lambda places: F.grid_sample(image, places, mode, padding, aligned)


def _places(sizes: tuple[int, ...], aligned: bool) -> Tensor:
    """Inside, beyond the border and far from it, at least a tenth of a pixel off every kink."""
    shift = 0 if aligned else 1
    columns = []
    for size in reversed(sizes):
        pixel = (torch.randint(-4, size + 4, (2, 6)) + 0.1 + 0.3 * torch.rand(2, 6)).double()
        columns.append((2 * pixel + shift) / (size - 1 + shift) - 1)
    places = torch.stack(columns, -1)
    return places.reshape(2, *[1] * (len(sizes) - 2), 2, 3, len(sizes))


@pytest.mark.parametrize("mode, padding, aligned, sizes", CASES)
def test_by_places(mode: str, padding: str, aligned: bool, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    sample = _sampler(_images(*sizes), mode, padding, aligned)
    places = _places(sizes, aligned)
    u, v = directions = torch.randn(2, *places.shape, dtype=torch.float64)
    jet = jx.jet(sample, places, directions)
    torch.testing.assert_close(jet.primal, sample(places), rtol=1e-12, atol=1e-12)
    outputs = lambda x: (sample(x),)  # noqa: E731
    for tangent, direction in zip(jet.first, directions, strict=True):
        (expected,) = oracles.first_difference(outputs, places, direction, STEPS)
        torch.testing.assert_close(tangent, expected, rtol=1e-7, atol=1e-7)
    (expected,) = oracles.mixed_difference(outputs, places, u, v, STEPS)
    torch.testing.assert_close(jet.second[0], expected, rtol=1e-5, atol=1e-5)
    if mode == "nearest":
        assert not jet.streams[1:].any()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_slopes_at_kinks_are_torchs(mode: str, padding: str, aligned: bool) -> None:
    """At the centres of pixels and where the image ends, whichever side torch takes."""
    torch.manual_seed(0)
    sample = _sampler(_images(5, 5), mode, padding, aligned)
    steps = torch.arange(-4, 9).double() / 2 - 1 if aligned else torch.arange(-9, 10).double() / 5
    places = torch.cartesian_prod(steps, steps).expand(2, 1, -1, 2)
    tangents = torch.randn(places.shape, dtype=torch.float64)
    moved = places.clone().requires_grad_()
    slopes = torch.autograd.grad(sample(moved)[:, 0].sum(), moved)[0]
    tangent = jx.jvp(sample, (places,), (tangents,))[1][:, 0, 0]
    torch.testing.assert_close(tangent, (slopes * tangents).sum(-1)[:, 0], rtol=1e-11, atol=1e-11)


def test_no_finite_number_for_a_place_that_is_nan() -> None:
    image, x = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 1, 2)
    for mode, padding in product(("bilinear", "bicubic"), PADDINGS):
        sample = _sampler(image, mode, padding, True)
        jet = jx.jet(lambda p: sample(p * torch.nan), x, x[None], second="squares")  # noqa: B023
        assert jet.primal.isnan().all()


def test_compiled() -> None:
    torch.manual_seed(0)
    image = _images(5, 4)[:1]
    places = _places((5, 4), False)[:1]

    class Sampled(torch.nn.Module):
        def forward(self, p: Any) -> Any:
            linear = F.grid_sample(image, p, "bilinear", "border", False)
            return linear * F.grid_sample(image, p, "bicubic", "border", False)

    module = Sampled()
    compiled = torch.compile(lambda p: jx.jvp(module, (p,), (p.cos(),)), backend="aot_eager")
    torch.testing.assert_close(compiled(places), jx.jvp(module, (places,), (places.cos(),)))
