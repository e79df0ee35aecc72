"""Normalisations: compiled operators where they exist, else the formula of their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from ...ops.norm import normalised_jet
from ..registry import calling_modules, jet_rule, missing_rule
from ..tensor import JetTensor
from .patterns import Sum, fusable
from .pointwise import wide
from .reduce import euclidean_norm


@jet_rule("layer_norm")
def layer_norm(
    input: JetTensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> JetTensor:
    simple = len(normalized_shape) == 1 and isinstance(input, JetTensor)
    simple = simple and not isinstance(weight, JetTensor) and not isinstance(bias, JetTensor)
    if simple and _has_operator("layer_norm_jet", input):
        settings = (weight, bias, eps, input.jet_layout.directions)
        return _fused(input, ops.layer_norm_jet, ops.add_layer_norm_jet, *settings)
    out = _normalised(input, len(normalized_shape), eps, centred=True)
    return _affine(out, weight, bias, input.dtype)


def _has_operator(name: str, input: JetTensor) -> bool:
    return fusable(name, input)


def _fused(
    input: JetTensor,
    alone: Callable[..., Tensor],
    with_sum: Callable[..., tuple[Tensor, Tensor]],
    *settings: Any,
) -> JetTensor:
    """Call the operator; a deferred residual sum is computed by the operator that includes it."""
    pending = input.pattern
    if isinstance(pending, Sum):
        out, total = with_sum(pending.a.streams, pending.b.streams, *settings)
        input.settle(total)
        return input.with_streams(out)
    return input.with_streams(alone(input.streams, *settings))


def _normalised(input: Any, dimensions: int, eps: float, centred: bool) -> Any:
    """Normalise a jet or a plain tensor over the last dimensions, without parameters; halves in
    float32."""
    is_jet = isinstance(input, JetTensor)
    streams = wide(input.streams if is_jet else input.unsqueeze(0))
    layout = input.jet_layout if is_jet else None
    out = normalised_jet(streams.flatten(-dimensions), eps, layout, centred).reshape(streams.shape)
    return input.with_streams(out) if is_jet else out[0]


@jet_rule("rms_norm")
def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> JetTensor:
    """Compute x (mean x² + ε)^(−1/2) · w; by default ε is the machine epsilon, as in torch."""
    eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps if eps is None else eps
    simple = len(normalized_shape) == 1 and isinstance(input, JetTensor)
    simple = simple and not isinstance(weight, JetTensor)
    simple = simple and not (weight is not None and weight.is_complex())
    if simple and _has_operator("rms_norm_jet", input):
        return rms_norm_operator(input, weight, eps)
    out = _normalised(input, len(normalized_shape), eps, centred=False)
    return _affine(out, weight, None, input.dtype)


def rms_norm_operator(input: JetTensor, weight: Tensor | None, eps: float) -> JetTensor:
    """Call the RMS norm's operator; also used by the spellings that `fused.py` recognises."""
    settings = (weight, eps, input.jet_layout.directions)
    return _fused(input, ops.rms_norm_jet, ops.add_rms_norm_jet, *settings)


def _affine(out: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def _affine_of_channels(out: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    """Scale and shift the channels of ``[N, C, ...]``."""
    channels = (-1, *(1,) * (out.ndim - 2))
    scale, shift = (None if v is None else v.reshape(channels) for v in (weight, bias))
    return _affine(out, scale, shift, dtype)


@jet_rule("normalize")
def normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Compute x / max(‖x‖, ε), which is x / ε around x = 0."""
    return _unit(input, dim, eps, p).to(input.dtype)


def _unit(x: Any, dim: int, eps: float, p: float = 2.0) -> Any:
    """Return x / max(‖x‖, ε), of halves in float32."""
    if p == 2:
        norm: Any = euclidean_norm(wide(x), dim, True, least=eps)
    else:
        norm = torch.linalg.vector_norm(wide(x), p, dim, True)
    return wide(x) / norm.clamp_min(eps)


@jet_rule("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Compute x1 · x2 / (max(‖x1‖, ε) max(‖x2‖, ε)), dividing each first, as torch does."""
    x1, x2 = torch.broadcast_tensors(x1, x2)  # before the norms, which depend on it
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    return (_unit(x1, dim, eps) * _unit(x2, dim, eps)).sum(dim).to(dtype)


@jet_rule("group_norm")
def group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise each group of channels of ``[N, C, ...]``, then scale and shift each channel."""
    x = wide(input).reshape(input.shape[0], num_groups, -1)
    out = _normalised(x, 1, eps, centred=True).reshape(input.shape)
    return _affine_of_channels(out, weight, bias, input.dtype)


@jet_rule("instance_norm")
def instance_norm(input: Any, *args: Any, **named: Any) -> Any:
    """Normalise every channel of ``[N, C, ...]`` by its own, or by the running, statistics."""
    names = ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | named
    use_input_stats, eps = given.get("use_input_stats", True), given.get("eps", 1e-5)
    mean, variance = given.get("running_mean"), given.get("running_var")
    weight, bias = given.get("weight"), given.get("bias")
    if any(isinstance(t, Tensor) and t.is_complex() for t in (mean, variance, weight, bias)):
        raise missing_rule(F.instance_norm, "complex numbers")
    if not use_input_stats:
        return batch_norm(input, mean, variance, weight, bias, eps=eps)
    if mean is not None or variance is not None:
        raise missing_rule(F.instance_norm, "running statistics; use evaluation mode")
    return group_norm(input, input.shape[1], weight, bias, eps)


@jet_rule(torch.instance_norm)
def native_instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """torch.instance_norm has another order of arguments than F.instance_norm."""
    return instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def _uncount_the_batch() -> None:
    """Undo the count of batches that a torch.nn module increased before a call that is refused."""
    module: Any = next(iter(calling_modules()), None)
    counted = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    if counted and module.num_batches_tracked is not None:
        module.num_batches_tracked.sub_(1)


@jet_rule(F.batch_norm)
def batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *unused: Any,
) -> Any:
    """Normalise channels of ``[N, C, ...]``; with running statistics, an affine map."""
    if training and running_mean is None and running_var is None:
        out = _normalised(input.transpose(0, 1).flatten(1), 1, eps, centred=True)
        out = out.unflatten(1, (input.shape[0], *input.shape[2:])).transpose(0, 1)
        return _affine_of_channels(out, weight, bias, input.dtype)
    if training or running_mean is None or running_var is None:
        _uncount_the_batch()
        said = "it would change the running statistics; use eval mode or track_running_stats=False"
        raise missing_rule(F.batch_norm, said)
    channels = (-1, *(1,) * (input.ndim - 2))
    spread = torch.rsqrt(wide(running_var) + eps).reshape(channels)
    out = (wide(input) - wide(running_mean).reshape(channels)) * spread
    return _affine_of_channels(out, weight, bias, input.dtype)


@jet_rule(torch.batch_norm)
def native_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """torch.batch_norm has another order of arguments than F.batch_norm."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
