"""`grid_sample`, by formulas of torch's kernels (``GridSampler.h``)."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from ..ops.library import wide
from .formulas import formula, result_dtype

_CUBIC = -0.75  # torch's parameter of the cubic convolution (Keys 1981)
MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
_aten = torch.ops.aten


@formula(
    *(torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d),
    *(_aten.grid_sampler_2d, _aten.grid_sampler_3d),
    refuses="forward, mixed",
)
def grid_sample(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Sum the weighted pixels around each point of the grid: 1, 4 or 16 gathered tensors of the
    result's size, in three dimensions 1 or 8."""
    padding, is_cubic = PADDINGS[padding_mode], interpolation_mode == 2
    image, sizes = wide(input), input.shape[2:]
    flat, points = image.flatten(2), wide(grid).flatten(1, -2)
    shift = 0 if align_corners else 1
    taps_by_axis = []
    # A point's last coordinate is along the first of the sizes.
    for point, size in zip(reversed(points.unbind(-1)), sizes, strict=True):
        # From [−1, 1] to pixels: ±1 are the centres of the outer pixels; with a shift, their edges.
        point = ((point + 1) * (size - 1 + shift) - shift) / 2
        if not is_cubic:
            point = _fold_coordinate(point, size, padding, align_corners)
        if MODES[interpolation_mode] == "nearest":
            taps_by_axis.append([(torch.ones_like(point) + 0 * point, point.detach().round())])
            continue
        base = point.detach().floor()
        t = point - base
        weights = _cubic(t) if is_cubic else [1 - t, t]
        pixels = [base + step for step in ((-1, 0, 1, 2) if is_cubic else (0, 1))]
        if is_cubic:  # padding applies to the four pixels, not to the point
            pixels = [_fold_coordinate(pixel, size, padding, align_corners) for pixel in pixels]
        taps_by_axis.append([*zip(weights, pixels, strict=True)])
    # Σ image(pixel) Π_k weight_k over the pixels around a point, 0 for pixels outside of the image;
    # ``index`` is the pixel's position in the flattened image.
    total = torch.zeros((), dtype=image.dtype, device=grid.device)
    for corner in product(*taps_by_axis):
        index = torch.zeros((), dtype=torch.long, device=grid.device)
        is_inside = torch.ones((), dtype=torch.bool, device=grid.device)
        for (_, pixel), size in zip(corner, sizes, strict=True):
            pixel = pixel.detach()
            is_inside = is_inside & (pixel >= 0) & (pixel < size)
            index = index * size + pixel.nan_to_num().clamp(0, size - 1).long()
        weight = math.prod((weight for weight, _ in corner), start=is_inside)
        index = index.unsqueeze(1).expand(-1, flat.shape[1], -1)
        total = total + weight.unsqueeze(1) * torch.gather(flat, 2, index)
    return total.reshape(*input.shape[:2], *grid.shape[1:-1]).to(result_dtype(input, ["cpu"]))


def _cubic(t: Tensor) -> list[Tensor]:
    """Return the cubic convolution's weights of the pixels at −1, 0, 1 and 2 for a point t in
    [0, 1)."""

    def near_weight(x: Tensor) -> Tensor:
        return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1

    def far_weight(x: Tensor) -> Tensor:
        return _CUBIC * (((x - 5) * x + 8) * x - 4)

    return [far_weight(t + 1), near_weight(t), near_weight(1 - t), far_weight(2 - t)]


def _fold_coordinate(point: Tensor, size: int, padding: str, align_corners: bool) -> Tensor:
    """Return a coordinate, in pixels, reflected or clipped at the image's border, with slope 0
    where it is clipped, as in torch.

    Args:
        size: number of pixels.
        padding: one of `PADDINGS`; "zeros" changes nothing.
    """
    if padding == "zeros":
        return point
    position = point.detach()
    if padding == "reflection":
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if not span:
            return 0 * point
        # An even number of reflections shifts a point, an odd number mirrors it.
        position = position - low
        flips = (position.abs() / span).floor()
        is_odd = flips.remainder(2) == 1
        sign = torch.where(is_odd, -1, 1) * torch.where(position < 0, -1, 1)
        offset = torch.where(is_odd, (flips + 1) * span, -flips * span)
        point = (point - low) * sign + offset + low
        position = point.detach()
    return torch.where((position > 0) & (position < size - 1), point, position.clamp(0, size - 1))
