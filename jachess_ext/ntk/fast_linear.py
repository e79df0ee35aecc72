"""Linear layers of a recorded pass: their inputs' gradients alone, through the faster library.

A capture asks for gradients of calls' outputs, never of weights, so that a linear layer's backward
is one product, g W.  On processors where oneDNN beats torch's own choice (`ops.gemm`) both passes
take it.  Calls that this does not serve stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.gemm import onednn_serves, rows_times


class _InputLinear(torch.autograd.Function):
    """x Wᵀ + b with a derivative by x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return rows_times(x, weight, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled() or not onednn_serves(grad, weight):
            return grad @ weight, None, None
        return rows_times(grad.contiguous(), weight.mT), None, None


def fast_linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """``func(*args, **kwargs)`` where it is a linear layer that this serves, else None.

    Served are leaf weights, which nothing but a parameter's own gradient depends on, and inputs
    through which gradients pass.
    """
    if func is not F.linear or not 2 <= len(args) + len(kwargs) <= 3:
        return None
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    leaves = [weight] if bias is None else [weight, bias]
    if (
        not all(type(value) in (Tensor, nn.Parameter) and value.is_leaf for value in leaves)
        or type(x) is not Tensor
        or not x.requires_grad
        or weight.dim() != 2
        or torch.is_autocast_enabled("cpu")
        or (bias is not None and bias.dtype != torch.float32)
        or not onednn_serves(x, weight)
    ):
        return None
    detached = [value.detach() for value in leaves]
    result = _InputLinear.apply(x, detached[0], None if bias is None else detached[1])
    assert isinstance(result, Tensor)
    return result
