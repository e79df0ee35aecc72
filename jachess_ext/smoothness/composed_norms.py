"""Normalisations whose third derivative is right, for the engines that train through a Hessian.

torch's layer norm saves its statistics as constants of the double backward, so that a third
derivative drops the terms through them, in silence (torch 2.13: parameter gradients of ‖H‖ off by
up to a third against finite differences in float64; first and second derivatives are right).
RMS norm is right on the CPU; its fused CUDA kernel saves a statistic too, so it is composed here
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.library import wide_dtype, widened
from ..ops.norm import normalised_jet


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """(x − μ) (v + ε)^(−1/2) w + b (docs/how_it_works.md, norm), composed of plain operations."""
    y = _normalised(input, len(normalized_shape), eps, centred=True)
    y = y if weight is None else y * weight
    return _as_torch_returns(y if bias is None else y + bias, input)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """x (mean x² + ε)^(−1/2) w, composed of plain operations."""
    eps = torch.finfo(wide_dtype(input.dtype)).eps if eps is None else eps
    y = _normalised(input, len(normalized_shape), eps, centred=False)
    return _as_torch_returns(y if weight is None else y * weight, input)


def _normalised(input: Tensor, dimensions: int, eps: float, centred: bool) -> Tensor:
    rows = widened(input).flatten(-dimensions)
    return normalised_jet([rows], eps, 0, centred)[0].reshape(input.shape)


def _as_torch_returns(y: Tensor, input: Tensor) -> Tensor:
    """Under autocast torch's norms return float32."""
    return y if torch.is_autocast_enabled(input.device.type) else y.to(input.dtype)


_COMPOSED: dict[Any, Callable] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}


class ComposedNorms(TorchFunctionMode):
    """Within this mode torch's layer and RMS norms are the composed forms above."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))
