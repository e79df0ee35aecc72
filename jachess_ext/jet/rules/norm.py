"""Normalisations: by compiled operators if there are any for the jet, else by the formulas of
`ops/norm.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ... import ops
from ...ops.norm import normalised_jet
from ...torch_private import functional as F
from ..engine.errors import calling_modules, missing_rule
from ..engine.registry import jet_rule
from ..engine.tensor import JetTensor
from ..engine.types import Function
from .patterns import Sum, fusable
from .pointwise import wide
from .reduce import euclidean_norm


@jet_rule("layer_norm")
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    # The operators take plain weights and biases; jets scale and shift the result afterwards.
    is_plain = not isinstance(weight, JetTensor) and not isinstance(bias, JetTensor)
    is_covered = is_plain and len(normalized_shape) == 1
    if is_covered and isinstance(input, JetTensor) and fusable("layer_norm_jet", input):
        return _call_operator(input, ops.layer_norm_jet, ops.add_layer_norm_jet, weight, bias, eps)
    out = _normalise(input, len(normalized_shape), eps, is_centred=True)
    return _affine(out, weight, bias, input.dtype)


def _call_operator(
    input: JetTensor,
    operator: Callable[..., Tensor],
    sum_operator: Callable[..., tuple[Tensor, Tensor]],
    *settings: object,
) -> JetTensor:
    """Call the operator of a norm; for a deferred residual sum, call ``sum_operator``, which also
    computes and returns the sum.

    Args:
        settings: the operators' arguments after the input: weight, bias (layer norm) and ε.
    """
    settings = (*settings, input.jet_layout.directions, input.jet_layout.squares)
    pattern = input.pattern
    if isinstance(pattern, Sum):
        out, total = sum_operator(pattern.a.streams, pattern.b.streams, *settings)
        input.set_streams(total)
        return input.with_streams(out)
    return input.with_streams(operator(input.streams, *settings))


def _normalise(input: Tensor, num_dims: int, eps: float, is_centred: bool) -> Tensor:
    """Normalise over the last ``num_dims`` dimensions, without weight and bias; 16-bit dtypes in
    float32.

    Args:
        input: a jet, or a plain tensor if the weight or bias is a jet.
        is_centred: whether to subtract the mean: a layer norm, else an RMS norm.
    """
    x = wide(input).flatten(-num_dims)
    name = "layer_norm_jet" if is_centred else "rms_norm_jet"
    if isinstance(x, JetTensor) and fusable(name, x):
        operator, sum_operator = getattr(ops, name), getattr(ops, f"add_{name}")
        out = _call_operator(x, operator, sum_operator, *([None] * (1 + is_centred)), eps)
        return out.reshape(input.shape)
    # The closed form (`ops.norm`), not the rules of mean, square and rsqrt: it passes over the
    # streams less often, and divides before it squares, so that no square overflows.
    layout = x.jet_layout if isinstance(x, JetTensor) else None
    streams = x.streams if isinstance(x, JetTensor) else x.unsqueeze(0)
    stack = normalised_jet(streams, eps, layout, is_centred)
    result = x.with_streams(stack) if isinstance(x, JetTensor) else stack[0]
    return result.reshape(input.shape)


@jet_rule("rms_norm")
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute x (mean x² + ε)^(−1/2) · w; by default ε is the machine epsilon, as in torch."""
    eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps if eps is None else eps
    is_real = weight is None or not (isinstance(weight, JetTensor) or weight.is_complex())
    is_covered = is_real and len(normalized_shape) == 1
    if is_covered and isinstance(input, JetTensor) and fusable("rms_norm_jet", input):
        return rms_norm_operator(input, weight, eps)
    out = _normalise(input, len(normalized_shape), eps, is_centred=False)
    return _affine(out, weight, None, input.dtype)


def rms_norm_operator(input: JetTensor, weight: Tensor | None, eps: float) -> JetTensor:
    """Call the operator of the RMS norm."""
    return _call_operator(input, ops.rms_norm_jet, ops.add_rms_norm_jet, weight, eps)


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def _affine_channels(
    out: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Scale and shift the channels of ``[N, C, ...]``."""
    channels = (-1, *(1,) * (out.ndim - 2))
    scale, shift = (None if v is None else v.reshape(channels) for v in (weight, bias))
    return _affine(out, scale, shift, dtype)


@jet_rule("normalize")
def normalize(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    """Compute x / max(‖x‖, ε), which is x / ε near x = 0."""
    return _divide_by_norm(input, dim, eps, p).to(input.dtype)


def _divide_by_norm(x: Tensor, dim: int, eps: float, p: float = 2.0) -> Tensor:
    """Return x / max(‖x‖, ε); in float32 for 16-bit dtypes."""
    x = wide(x)
    if p == 2:
        # Below ε the result is x / ε, without the norm, whose curvature 1 / ‖x‖ would overflow.
        norm = euclidean_norm(x, dim, True, floor=eps)
    else:
        norm = torch.linalg.vector_norm(x, p, dim, True)
    return x / norm.clamp_min(eps)


@jet_rule("cosine_similarity")
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Compute x1 · x2 / (max(‖x1‖, ε) max(‖x2‖, ε)): as in torch, each is divided first."""
    x1, x2 = torch.broadcast_tensors(x1, x2)  # first, since it changes the norms along ``dim``
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    return (_divide_by_norm(x1, dim, eps) * _divide_by_norm(x2, dim, eps)).sum(dim).to(dtype)


@jet_rule("group_norm")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise each group of channels of ``[N, C, ...]``, then scale and shift each channel."""
    x = input.unflatten(1, (num_groups, -1)).flatten(2)
    has_jets = isinstance(weight, JetTensor) or isinstance(bias, JetTensor)
    is_covered = weight is not None and not has_jets
    if is_covered and isinstance(x, JetTensor) and fusable("layer_norm_jet", x):
        # A group is a row of the layer norm's operator, with a weight and a bias for each channel.
        scale, shift = (None if v is None else v.reshape(num_groups, -1) for v in (weight, bias))
        settings = (eps, x.jet_layout.directions, x.jet_layout.squares)
        out = ops.layer_norm_jet(x.streams, scale, shift, *settings)
        return x.with_streams(out).reshape(input.shape)
    out = _normalise(wide(x), 1, eps, is_centred=True).reshape(input.shape)
    return _affine_channels(out, weight, bias, input.dtype)


@jet_rule("instance_norm")
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise each channel of ``[N, C, ...]`` by the statistics of each sample, or by running
    statistics."""
    constants = (running_mean, running_var, weight, bias)
    if any(t is not None and t.is_complex() for t in constants):
        raise missing_rule(F.instance_norm, "complex numbers")
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None or running_var is not None:
        raise missing_rule(F.instance_norm, "running statistics; use evaluation mode")
    return group_norm(input, input.shape[1], weight, bias, eps)


def _undo_batch_count() -> None:
    """Decrease ``num_batches_tracked`` of the calling batch norm: the module has increased it
    before the call that is now refused."""
    for module in calling_modules()[:1]:
        is_training = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        if is_training and isinstance(module.num_batches_tracked, Tensor):
            module.num_batches_tracked.sub_(1)


@jet_rule(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise each channel of ``[N, C, ...]``; with running statistics this is an affine map."""
    if training and running_mean is None and running_var is None:
        # Statistics of the batch depend on the input: a layer norm of rows ``[C, N ...]``.
        out = _normalise(input.transpose(0, 1).flatten(1), 1, eps, is_centred=True)
        out = out.unflatten(1, (input.shape[0], *input.shape[2:])).transpose(0, 1)
        return _affine_channels(out, weight, bias, input.dtype)
    if training or running_mean is None or running_var is None:
        _undo_batch_count()
        advice = (
            "it would change the running statistics; use eval mode or track_running_stats=False"
        )
        raise missing_rule(F.batch_norm, advice)
    channels = (-1, *(1,) * (input.ndim - 2))
    inverse_std = torch.rsqrt(wide(running_var) + eps).reshape(channels)
    out = (wide(input) - wide(running_mean).reshape(channels)) * inverse_std
    return _affine_channels(out, weight, bias, input.dtype)


def register_parameters_first(function: Function, rule: Callable[..., Tensor]) -> None:
    """Register the rule of a C++ function, whose weight and bias precede the running statistics."""

    @jet_rule(function)
    def parameters_first(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *settings: object,
        **kwargs: object,
    ) -> Tensor:
        return rule(input, running_mean, running_var, weight, bias, *settings, **kwargs)


register_parameters_first(torch.instance_norm, instance_norm)
register_parameters_first(torch.batch_norm, batch_norm)
