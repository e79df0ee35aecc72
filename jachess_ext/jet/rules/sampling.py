"""``grid_sample`` at places that carry derivatives, and ``affine_grid``, which makes such places.

Formulas of torch's kernels (``GridSampler.h``), as composed of the other rules.  Places that are
constant are served by `rules/linear.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ...torch_private import functional as F
from ..registry import Rule, jet_rule, recognise
from ..tensor import JetTensor, primal_of
from .pointwise import wide

_CUBIC = -0.75  # torch's parameter of the cubic convolution (Keys 1981)


@recognise(F.grid_sample)
def grid_sample_by_places(
    rule: Rule,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor | None:
    """Sample ``[N, C, ...]``: between centres of pixels it is a polynomial of the places."""
    if not isinstance(grid, JetTensor):
        return None
    settings = mode, padding_mode, align_corners
    # Checks the call as torch does.  The nearest pixels do not change with the places.
    sampled = F.grid_sample(primal_of(input).detach(), grid.primal.detach(), *settings)
    if mode == "nearest" or not sampled.numel():
        return F.grid_sample(input, grid.primal, *settings)
    image, sizes = wide(input), input.shape[2:]
    flat, places = image.flatten(2), wide(grid).flatten(1, -2)
    linear, shift = mode == "bilinear", 0 if align_corners else 1
    taps = []
    # The last coordinate belongs to the first of the sizes.
    for place, size in zip(reversed(places.unbind(-1)), sizes, strict=True):
        # From [−1, 1] to pixels: ±1 are the centres of the outer ones; with a shift, their edges.
        place = ((place + 1) * (size - 1 + shift) - shift) / 2
        if linear:
            place = _padded(place, size, padding_mode, align_corners)
        base = primal_of(place).detach().floor()
        t = place - base
        weights = [1 - t, t] if linear else _cubic(t)
        pixels = [base + step for step in ((0, 1) if linear else (-1, 0, 1, 2))]
        if not linear:  # where each of the four pixels is padded, not the place
            pixels = [_padded(pixel, size, padding_mode, align_corners) for pixel in pixels]
        taps.append([*zip(weights, pixels, strict=True)])
    # Σ over the 2^d or 4^d pixels around a place of image(pixel) Π_k weight_k, with a pixel outside
    # of the image counted as 0; ``index`` is the pixel's in the flattened image.
    total = torch.zeros((), device=grid.device)
    for corner in product(*taps):
        index = torch.zeros((), dtype=torch.long, device=grid.device)
        inside = torch.ones((), dtype=torch.bool, device=grid.device)
        for (_, pixel), size in zip(corner, sizes, strict=True):
            inside = inside * ((pixel >= 0) & (pixel < size))
            index = index * size + pixel.nan_to_num().clamp(0, size - 1).long()
        weight = math.prod((weight for weight, _ in corner), start=inside)
        index = index.unsqueeze(1).expand(-1, flat.shape[1], -1)
        total = total + weight.unsqueeze(1) * torch.gather(flat, 2, index)
    return total.reshape(sampled.shape).to(sampled.dtype)


def _cubic(t: Tensor) -> list[Tensor]:
    """Return the weights of the pixels −1, 0, 1 and 2 from the one at or before a place, t behind
    it in [0, 1)."""
    a = _CUBIC

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _padded(place: Tensor, size: int, padding_mode: str, align_corners: bool | None) -> Tensor:
    """Reflect a place, in pixels, at the border, or clip it there, where torch's slope is 0."""
    if padding_mode == "zeros":
        return place
    if padding_mode == "reflection":
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if not span:
            return primal_of(place).detach() * 0
        # Beyond a border the place runs back, beyond two borders forth again: it is shifted after
        # an even number of flips, and mirrored after an odd one.
        at = primal_of(place).detach() - low
        flips = (at.abs() / span).floor()
        odd = flips.remainder(2) == 1
        sign = torch.where(odd, -1, 1) * torch.where(at < 0, -1, 1)
        offset = torch.where(odd, (flips + 1) * span, -flips * span)
        place = (place - low) * sign + offset + low
    at = primal_of(place).detach()
    # A tensor of the place's kind: what is clipped has no derivative.
    return torch.where((at > 0) & (at < size - 1), place, at.clamp(0, size - 1))


@jet_rule(F.affine_grid)
def affine_grid(
    theta: JetTensor, size: Sequence[int], align_corners: bool | None = None
) -> JetTensor:
    """Apply it to every stream: it is linear."""
    streams = theta.streams
    sizes = [len(streams) * size[0], *size[1:]]
    out = F.affine_grid(streams.flatten(0, 1), sizes, align_corners)
    return theta.with_streams(out.unflatten(0, (len(streams), -1)))
