"""Normalisations, whose nested forward mode is wrong in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..torch_private import functional as F
from .formulas import formula, result_dtype, wide

_LAYER = "jvp(jvp), vjp(jvp), jvp(jacrev)"
_BATCH = "jvp(jvp), vjp(jvp), jvp(vjp)"


@formula(torch.layer_norm, F.layer_norm, wrong=_LAYER)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Mean, centred values and root of the mean square, one by one."""
    out = _normalised(wide(input), range(-len(normalized_shape), 0), eps)
    return _affine(out, weight, bias).to(result_dtype(input, ["cuda"]))


@formula(torch.batch_norm, wrong=_BATCH)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """As `layer_norm`, over the batch; torch itself updates the running statistics."""
    x = wide(input)
    if training or running_mean is None:
        out = _normalised(x, (0, *range(2, x.ndim)), eps)
        _update(torch.batch_norm, input, running_mean, running_var, momentum, eps)
    else:
        out = _by_running(x, running_mean, running_var, eps)
    return _affine_of_channels(out, weight, bias).to(input.dtype)


@formula(torch.instance_norm, wrong=_BATCH)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """As `batch_norm`, for each sample."""
    x = wide(input)
    if use_input_stats or running_mean is None:
        out = _normalised(x, range(2, x.ndim), eps)
        _update(torch.instance_norm, input, running_mean, running_var, momentum, eps)
    else:
        out = _by_running(x, running_mean, running_var, eps)
    return _affine_of_channels(out, weight, bias).to(input.dtype)


def _normalised(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    dims = tuple(dims)
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _by_running(x: Tensor, mean: Tensor | None, variance: Tensor | None, eps: float) -> Tensor:
    assert mean is not None and variance is not None
    channels = (-1, *(1,) * (x.ndim - 2))
    return (x - mean.reshape(channels)) * (variance + eps).rsqrt().reshape(channels)


def _affine_of_channels(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    channels = (-1, *(1,) * (out.ndim - 2))
    weight, bias = (None if x is None else x.reshape(channels) for x in (weight, bias))
    return _affine(out, weight, bias)


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _update(
    torchs: Callable[..., Tensor],
    input: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    momentum: float,
    eps: float,
) -> None:
    # By torch's own kernel: within a transform it writes into a buffer from outside, where
    # operations on tensors may not.
    if mean is not None or variance is not None:
        with torch.no_grad():
            torchs(input.detach(), None, None, mean, variance, True, momentum, eps, False)
