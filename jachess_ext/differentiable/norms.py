"""Normalisations, whose nested forward mode is wrong in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import wide
from ..torch_private import functional as F
from .formulas import formula, result_dtype


@formula(
    *(torch.layer_norm, F.layer_norm),
    wrong="jvp(jvp), vjp(jvp), jvp(jacrev), vjp(vjp(vjp))",
    third=lambda *args, **kwargs: True,
)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute the mean, the centred values and the root of their mean square by plain steps."""
    out = _normalise(wide(input), range(-len(normalized_shape), 0), eps)
    return _affine(out, weight, bias).to(result_dtype(input, ["cuda"]))


def _has_no_statistics(
    input: Tensor, weight: object, bias: object, running_mean: object, *_: object, **__: object
) -> bool:
    """Return whether a norm has no running statistics.

    A second run in the backward would update running statistics again.
    """
    return running_mean is None


def _channel_norm(function: Callable[..., Tensor], text: str, dims: Sequence[int]) -> None:
    """Register the formula of `torch.batch_norm` or `torch.instance_norm`.

    Args:
        text: what is computed, a sentence for the table.
        dims: dimensions over which the statistics are computed, besides all from 2 on.
    """

    def norm(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
        *,
        use_input_stats: bool = False,  # as instance norm calls `training`
    ) -> Tensor:
        x, channels = wide(input), (-1, *(1,) * (input.ndim - 2))
        if training or use_input_stats or running_mean is None or running_var is None:
            out = _normalise(x, (*dims, *range(2, x.ndim)), eps)
            # By torch's own kernel, since within a transform only it may write into a buffer from
            # outside of the transform.
            if running_mean is not None or running_var is not None:
                with torch.no_grad():
                    statistics = None, None, running_mean, running_var
                    function(input.detach(), *statistics, True, momentum, eps, False)
        else:
            centred = x - running_mean.reshape(channels)
            out = centred * (running_var + eps).rsqrt().reshape(channels)
        weight, bias = (None if y is None else y.reshape(channels) for y in (weight, bias))
        return _affine(out, weight, bias).to(input.dtype)

    norm.__name__, norm.__doc__ = function.__name__, text
    wrong = "jvp(jvp), vjp(jvp), jvp(vjp), vjp(vjp(vjp))"
    formula(function, wrong=wrong, third=_has_no_statistics)(norm)


_BATCH = "Normalise as `layer_norm` does, over the batch; torch updates the running statistics."
_channel_norm(torch.batch_norm, _BATCH, [0])
_channel_norm(torch.instance_norm, "Normalise each sample as `batch_norm` does.", [])


@formula(torch_private.find("torch._weight_norm"), refuses="forward, mixed", wrong="vjp(vjp)")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Multiply v by g / ‖v‖, the norm over all dimensions except ``dim``."""
    return v * (g / (v.norm() if dim == -1 else torch.norm_except_dim(v, 2, dim)))


def _normalise(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    dims = tuple(dims)
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias
