"""Normalisations: compiled operators where they exist, else composed of the elementary rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import ops
from ..registry import jet_rule
from ..settings import operators_enabled
from ..tensor import JetTensor


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half-precision streams keep their normalisation statistics in float32 (spec 01)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@jet_rule("layer_norm")
def layer_norm(
    input: JetTensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **named: Any,
) -> JetTensor:
    one_dimension = len(normalized_shape) == 1
    if one_dimension and operators_enabled() and ops.available("layer_norm_jet", input.device):
        q = input.jet_layout.directions
        return input.with_streams(ops.layer_norm_jet(input.streams, weight, bias, eps, q))
    return composed_layer_norm(input, normalized_shape, weight, bias, eps)


def composed_layer_norm(
    input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> JetTensor:
    """(x − μ) (v + ε)^(−1/2) · w + b, written with functions that have rules of their own."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.to(_statistics_dtype(input.dtype))
    centred = x - x.mean(dims, keepdim=True)
    variance = (centred * centred).mean(dims, keepdim=True)
    out = centred * torch.rsqrt(variance + eps)
    return _affine(out, weight, bias, input.dtype)


@jet_rule("rms_norm")
def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> JetTensor:
    """x (mean x² + ε)^(−1/2) · w; ε defaults to the dtype's machine epsilon, as in torch."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.to(_statistics_dtype(input.dtype))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    return _affine(out, weight, None, input.dtype)


def _affine(out: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(dtype)


@jet_rule("normalize")
def normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **named: Any) -> Any:
    """x / max(‖x‖₂, ε)."""
    if p != 2:
        raise NotImplementedError(f"normalize has a jet rule for p=2 only, not p={p}")
    norm = torch.sqrt((input * input).sum(dim, keepdim=True))
    return input / norm.clamp_min(eps)


@jet_rule("var")
def var(
    input: Any, dim: Any = None, *, correction: int = 1, keepdim: bool = False, **named: Any
) -> Any:
    """Variance about the mean, divided by N − correction."""
    correction = int(named.get("unbiased", correction))
    dims = tuple(range(input.ndim)) if dim is None else dim
    centred = input - input.mean(dims, keepdim=True)
    count = input.shape.numel() // centred.primal.mean(dims).numel()
    return (centred * centred).sum(dims, keepdim=keepdim) / (count - correction)
