"""Matrix product of two jets with a hand-written backward.

Composed of torch functions (`streamwise.bilinear`), every slice of the stack costs a zero-filled
stack and an addition in the backward; here each of the 1 + 2q + 4P products is accumulated where
it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.library import transformed
from ..layout import JetLayout
from ..tensor import JetTensor


def leibniz_terms(layout: JetLayout) -> Iterator[tuple[int, int, int]]:
    """(stream of the product, stream of a, stream of b) of every term of Leibniz' rule."""
    yield 0, 0, 0
    for stream in range(1, layout.streams):
        yield stream, stream, 0
        yield stream, 0, stream
    for i, j, ij in layout.pair_streams():
        yield ij, i, j
        yield ij, j, i


def _accumulate(
    out: Tensor, terms: list[tuple[int, int, int]], a: Tensor, b: Tensor, alpha: float
) -> Tensor:
    """out[o] = alpha Σ a[i] b[j] over the terms (o, i, j); out is not read."""
    started = [False] * len(out)
    for o, i, j in terms:
        out[o].baddbmm_(a[i], b[j], beta=1 if started[o] else 0, alpha=alpha)
        started[o] = True
    return out


class _MatmulJets(torch.autograd.Function):
    """alpha · a b (+ bias on the primal) for stacks ``[S, N, m, k]``, ``[S, N, k, n]``."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        alpha: float,
        layout: JetLayout,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.alpha, ctx.layout = alpha, layout
        ctx.bias_shape = None if bias is None else bias.shape
        batch = a.shape[1:-2]
        flat_a, flat_b = a.flatten(1, -3), b.flatten(1, -3)
        # A view of the result, not the result of a view: autograd forbids writing into the latter.
        out = a.new_empty(len(a), *batch, a.shape[-2], b.shape[-1])
        _accumulate(out.flatten(1, -3), list(leibniz_terms(layout)), flat_a, flat_b, alpha)
        if bias is not None:
            out[0].add_(bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        flat_a, flat_b, flat_grad = (t.flatten(1, -3) for t in (a, b, grad))
        terms = list(leibniz_terms(ctx.layout))
        grad_a = grad_b = grad_bias = None
        if ctx.needs_input_grad[0]:
            into_a = [(i, o, j) for o, i, j in terms]
            grad_a = torch.empty_like(flat_a, memory_format=torch.contiguous_format)
            grad_a = _accumulate(grad_a, into_a, flat_grad, flat_b.mH, ctx.alpha).view(a.shape)
        if ctx.needs_input_grad[1]:
            into_b = [(j, i, o) for o, i, j in terms]
            grad_b = torch.empty_like(flat_b, memory_format=torch.contiguous_format)
            grad_b = _accumulate(grad_b, into_b, flat_a.mH, flat_grad, ctx.alpha).view(b.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = grad[0].sum_to_size(ctx.bias_shape)
        return grad_a, grad_b, grad_bias, None, None


def products_fuse(a: Any, b: Any) -> bool:
    """Whether `matmul_jets` covers these factors: two jets, batched alike, of one dtype."""
    return (
        isinstance(a, JetTensor)
        and isinstance(b, JetTensor)
        and a.jet_layout == b.jet_layout
        and a.ndim == b.ndim >= 3
        and a.shape[:-2] == b.shape[:-2]
        and a.dtype == b.dtype
        and not transformed()
    )


def matmul_jets(
    a: JetTensor, b: JetTensor, *, alpha: float = 1.0, bias: Tensor | None = None
) -> JetTensor:
    """alpha · a b, with ``bias`` (broadcast to the product's shape) added to the primal.

    Args:
        a, b: ``[..., m, k]`` and ``[..., k, n]``, for which `products_fuse` holds.
    """
    return a.with_streams(_MatmulJets.apply(a.streams, b.streams, bias, alpha, a.jet_layout))
