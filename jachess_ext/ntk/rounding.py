"""Limits of the difference by rounding alone between two ways of computing a value."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import as_real

PROBED = 2  # samples; with a single one, an output without samples would look the same
# Relative error between two ways of computing a value: far above round-off (that of float32 even in
# float64 models, since transformers' softmax and norms often compute in float32), and below the
# error that a missing call would cause.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_TOLERANCE_16 = 0.1
_SMALL = 0.3  # times √eps


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which a difference is round-off."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16)


def round_off(dtype: torch.dtype) -> float:
    """Return the fraction of a gradient's norm that changes the kernel by less than eps."""
    return _SMALL * torch.finfo(dtype).eps ** 0.5


def negligible_norm(gradient: Tensor, total_norm: float, noise: float) -> float:
    """Return the norm up to which a difference from a parameter's gradient is round-off.

    Args:
        gradient: of the parameter.
        total_norm: of the gradient by all parameters; a difference below √eps of it changes the
            kernel by less than eps.
        noise: as of `Probe`.
    """
    dtype = gradient.dtype
    return max(tolerance(dtype) * norm_of(gradient), round_off(dtype) * total_norm, noise)


def norm_of(values: Tensor) -> float:
    """Return ‖values‖, in double only if needed, since gradients are as large as the model."""
    values = as_real(values)
    if values.dtype in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(values))
        if norm < float("inf"):
            return norm
    return float(values.double().norm())  # squares beyond float32 are no infinite gradient
