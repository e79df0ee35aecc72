"""``x Wᵀ + b`` for a whole stack: one product with S times the rows, the bias on the primal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.gemm import rows_times
from ...ops.library import transformed
from .streamwise import add_to_primal


class _StackedLinear(torch.autograd.Function):
    """The bias goes in place into stream 0: no copy of the stack.

    The backward is differentiable where gradients are enabled, so a further derivative is right.
    """

    @staticmethod
    def forward(ctx: Any, streams: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(streams, weight)
        out = rows_times(streams, weight)
        if bias is not None:
            out[0].add_(bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        streams, weight = ctx.saved_tensors
        needs_streams, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_streams = grad_weight = grad_bias = None
        if needs_streams:
            product = torch.matmul if torch.is_grad_enabled() else _rows_by
            grad_streams = product(rows, weight.conj()).reshape(streams.shape)
        if needs_weight:
            grad_weight = rows.mT @ streams.flatten(0, -2).conj()
        if needs_bias:
            grad_bias = grad[0].sum_to_size(grad.shape[-1])
        return grad_streams, grad_weight, grad_bias


def _rows_by(rows: Tensor, matrix: Tensor) -> Tensor:
    return rows_times(rows, matrix.mT)


def stacked_linear(streams: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[S, ..., k]`` times ``[n, k]``ᵀ, plus ``[n]`` on stream 0: ``[S, ..., n]``."""
    if transformed():  # torch's own functions, which forward mode and vmap know
        out = torch.nn.functional.linear(streams, weight)
        return out if bias is None else add_to_primal(out, bias)
    return _StackedLinear.apply(streams, weight, bias)
