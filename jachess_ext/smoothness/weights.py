"""λ over layers, from the base model's Jacobian norms before fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Weighting = Literal["uniform", "inverse", "norm", "softmax", "raw_softmax"]
WEIGHTINGS = get_args(Weighting)


def layer_profile(weighting: Weighting, norms: Tensor, temperature: float = 1.0) -> Tensor:
    """λ^(k), positive and summing to 1.

    With j the K Jacobian norms of the base model (a smoother layer has the smaller j):

    - uniform: 1/K.
    - inverse: j_k / Σj; smoother layers get less.
    - norm: smoothness −j, shifted by the total and normalised: (Σj − j_k) / ((K−1) Σj).
    - softmax: softmax of −j, standardised over the layers and divided by ``temperature``; a raw
      softmax saturates when norms differ by orders of magnitude.
    - raw_softmax: softmax of −j / ``temperature`` as it is, which is what the paper's code does.

    Args:
        norms: ``[K]``, positive and finite.

    Raises:
        ValueError: an unknown name, norms that are not positive and finite, temperature ≤ 0.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weights is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}")
    if norms.ndim != 1 or not (torch.isfinite(norms).all() and (norms > 0).all()):
        raise ValueError(
            f"the base model's Jacobian norms are {norms.tolist()}; expected one positive, finite "
            "number per layer"
        )
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")
    count = len(norms)
    if weighting == "uniform" or count == 1:
        return torch.full_like(norms, 1 / count)
    if weighting == "inverse":
        return norms / norms.sum()
    if weighting == "norm":
        return (norms.sum() - norms) / ((count - 1) * norms.sum())
    if weighting == "raw_softmax":
        return torch.softmax(-norms / temperature, 0)
    spread = norms.std(correction=0)
    if spread == 0:
        return torch.full_like(norms, 1 / count)
    return torch.softmax((norms.mean() - norms) / (spread * temperature), 0)


def given_profile(weights: Sequence[float]) -> Tensor:
    """A user's own λ per layer.

    Raises:
        ValueError: negative or non-finite numbers.
    """
    profile = torch.as_tensor(list(weights), dtype=torch.float64)
    well = profile.ndim == 1 and len(profile) > 0 and torch.isfinite(profile).all()
    if not well or profile.lt(0).any():
        raise ValueError(f"weights is {list(weights)}; expected non-negative finite numbers")
    return profile


def same_profile(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two λ are equal up to rounding."""
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=1e-6, atol=0))
