"""Limits of the difference by rounding alone between two ways of computing a value."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import as_real

# Number of probed samples: with one, an output without a dimension of samples would look the same.
PROBED = 2
# Relative error between two ways of computing a value: far above round-off (that of float32 even in
# float64 models, since transformers' softmax and norms often compute in float32), and below the
# error that a missing call would cause.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_TOLERANCE_16 = 0.1
_ROUND_OFF = 0.3  # in units of √eps


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which a difference is round-off."""
    return _TOLERANCE.get(dtype, _TOLERANCE_16)


def round_off(dtype: torch.dtype) -> float:
    """Return the relative error of a gradient that changes the kernel by less than eps."""
    return _ROUND_OFF * torch.finfo(dtype).eps ** 0.5


def negligible_norm(gradient: Tensor, total_norm: float, noise: float) -> float:
    """Return the norm below which an error of a parameter's gradient counts as round-off.

    Args:
        gradient: the parameter's gradient.
        total_norm: norm of the gradient with respect to all parameters; an error below √eps of it
            changes the kernel by less than eps.
        noise: see `Probe`.
    """
    dtype = gradient.dtype
    return max(tolerance(dtype) * norm_of(gradient), round_off(dtype) * total_norm, noise)


def norm_of(values: Tensor) -> float:
    """Return ‖values‖, computed in double only if float32 overflows: gradients are large."""
    values = as_real(values)
    if values.dtype in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(values))
        if norm < float("inf"):
            return norm
    return float(values.double().norm())  # squares may overflow float32 though values are finite
