"""Random directions with identity covariance, for the forward estimator (spec 01)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Distribution = Literal["gaussian", "rademacher"]


def make_generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator seeded with ``seed``; None (torch's own, global one) for None."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def draw_directions(
    like: Tensor,
    count: int,
    *,
    mask: Tensor | None = None,
    distribution: Distribution = "gaussian",
    generator: torch.Generator | None = None,
) -> Tensor:
    """``count`` independent directions for embeddings ``like``.

    Real positions are numbered row by row and draw in that order, so padding on either side
    changes neither the random numbers nor which token gets which.

    Args:
        like: ``[B, T, d]`` embeddings; gives shape, dtype and device.
        mask: ``[B, T]``, true at real tokens; padded positions carry no direction.
        distribution: both have identity covariance; Rademacher entries are ±1.

    Returns:
        ``[count, B, T, d]``, zero at padded positions.
    """
    real = torch.ones(like.shape[:-1], dtype=torch.bool, device=like.device)
    real = real if mask is None else mask.to(like.device).bool()
    shape = (int(real.sum()), count, like.shape[-1])
    # Halves are drawn in float32 so that a seed means the same directions in every precision.
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if distribution == "gaussian":
        numbers = torch.randn(shape, dtype=dtype, device=like.device, generator=generator)
    elif distribution == "rademacher":
        bits = torch.randint(0, 2, shape, device=like.device, generator=generator)
        numbers = (2 * bits - 1).to(dtype)
    else:
        raise ValueError(f"distribution is {distribution!r}; expected 'gaussian' or 'rademacher'")
    directions = like.new_zeros(*real.shape, count, like.shape[-1])
    directions[real] = numbers.to(like.dtype)
    return directions.movedim(-2, 0).contiguous()
