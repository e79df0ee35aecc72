"""Linear maps and matrix products: one product for all streams, with the bias added to the primal
only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...ops.gemm import rows_times
from ...ops.library import dispatch_modes, transformed
from ...torch_private import functional as F
from ..engine.layout import JetLayout
from ..engine.registry import jet_rule
from ..engine.tensor import JetTensor
from ..engine.types import Dims
from .streamwise import (
    accept_scalars,
    add_to_fresh_primal,
    add_to_primal,
    bilinear,
    reduced_dims,
    stack_dim,
    stack_dims,
    write_in_place,
)


@jet_rule("linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # If the weight is a jet (in jx.jvp by parameters, or if a layer computes its weight from the
    # input), this is a product of two jets.
    weight_is_jet = isinstance(weight, JetTensor)
    if weight_is_jet or not isinstance(input, JetTensor) or weight.layout is not torch.strided:
        out = torch.matmul(input, weight.mT if weight.ndim > 1 else weight)
        return out if bias is None else out + bias
    if weight.ndim == 1:
        row = None if bias is None else bias.reshape(1)
        return linear(input, weight.unsqueeze(0), row).squeeze(-1)
    if isinstance(bias, JetTensor):
        return linear(input, weight) + bias
    return input.with_streams(stacked_linear(input.streams, weight, bias))


@jet_rule("addmm")
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Compute ``beta·input + alpha·mat1 @ mat2``, as in GPT-2's Conv1D."""
    is_linear = not isinstance(input, JetTensor) and not isinstance(mat2, JetTensor)
    if is_linear and alpha == beta == 1 and input.ndim == 1:
        return linear(mat1, mat2.mT, input)
    return beta * input + alpha * torch.matmul(mat1, mat2)


@jet_rule("baddbmm")
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = alpha * torch.bmm(batch1, batch2)
    return product if beta == 0 else beta * input + product  # 0 · NaN counts as 0, as in torch


@jet_rule("matmul", "bmm", "mm", "mv", "dot", "__matmul__")
def matmul(input: Tensor, other: Tensor) -> Tensor:
    for jet, factor in ((other, input), (input, other)):
        if not isinstance(factor, JetTensor) and factor.layout is not torch.strided:
            # A constant sparse matrix, of which torch has no product with a batch.
            jet = cast(JetTensor, jet)
            streams = [
                torch.matmul(s, factor) if factor is other else torch.matmul(factor, s)
                for s in jet.streams
            ]
            return jet.with_streams(torch.stack(streams))
    if input.ndim < 2 or other.ndim < 2:
        return _matmul_with_vector(input, other)
    if isinstance(input, JetTensor):
        if not isinstance(other, JetTensor) and other.ndim == 2:
            return linear(input, other.mT)
        if isinstance(other, JetTensor) and products_fuse(input, other):
            return matmul_jets(input, other)
    return bilinear(torch.matmul, input, other, ndim=max(input.ndim, other.ndim))


def _matmul_with_vector(a: Tensor, b: Tensor) -> Tensor:
    """Multiply vectors as matrices, and drop the extra dimensions."""
    row = a.unsqueeze(0) if a.ndim == 1 else a
    column = b.unsqueeze(-1) if b.ndim == 1 else b
    extra_dims = [dim for dim, factor in ((-2, a), (-1, b)) if factor.ndim == 1]
    return matmul(row, column).squeeze(extra_dims)


jet_rule(torch.Tensor.__rmatmul__)(lambda self, other: matmul(other, self))


@jet_rule("einsum")
def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Contract one or two operands stream by stream; with more operands, contract the first two,
    and then the result with the others."""
    if len(operands) > 2:
        inputs, arrow, output = equation.replace(" ", "").partition("->")
        dots = "..." if "." in inputs else ""
        if not arrow:  # the output has the dots, then the indices that occur once, sorted
            output = dots + "".join(n for n in sorted({*inputs} - {*",."}) if inputs.count(n) == 1)
        left, right, *tail = inputs.split(",")
        # The first contraction keeps the indices of the other operands and of the output.
        remaining = "".join(tail) + output
        all_indices = dict.fromkeys((left + right).replace(".", ""))
        indices = dots + "".join(n for n in all_indices if n in remaining)
        contraction = torch.einsum(f"{left},{right}->{indices}", *operands[:2])
        return torch.einsum(f"{','.join([indices, *tail])}->{output}", contraction, *operands[2:])
    contract: Callable[..., Tensor] = partial(torch.einsum, equation)
    if len(operands) == 1:
        jet = cast(JetTensor, operands[0])
        return jet.with_streams(torch.stack([contract(stream) for stream in jet.streams]))
    return bilinear(partial(_rowwise_product, contract), operands[0], operands[1])


def _rowwise_product(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Return the stack of products of corresponding rows of two stacks, each ``[N, ...]`` or
    ``[1, ...]``, which is broadcast."""
    count = max(len(a), len(b))
    return torch.stack([product(a[i % len(a)], b[i % len(b)]) for i in range(count)])


def _fold_streams(function: Callable[[Tensor], Tensor], jet: JetTensor, has_batch: bool) -> Tensor:
    """Apply a linear function of images ``[N, C, ...]`` to all streams, folded into the batch
    dimension: ``[S N, C, ...]``.

    Args:
        has_batch: whether the jet is ``[N, C, ...]``; else it is one image ``[C, ...]``.
    """
    if not has_batch:
        return function(jet.streams)
    return function(jet.streams.flatten(0, 1)).unflatten(0, (len(jet.streams), -1))


def register_convolution(name: str) -> None:
    """Register a convolution or transposed convolution."""
    function: Callable[..., Tensor] = getattr(F, name)

    @jet_rule(name)
    def rule(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: object, **kwargs: object
    ) -> Tensor:
        def convolve(x: Tensor, w: Tensor = weight) -> Tensor:
            return function(x, w, None, *args, **kwargs)

        if isinstance(weight, JetTensor):  # streams with different weights form no batch
            out: Tensor = bilinear(partial(_rowwise_product, convolve), input, weight)
        elif isinstance(input, JetTensor):
            out = input.with_streams(_fold_streams(convolve, input, input.ndim == weight.ndim))
        else:
            out = convolve(input)
        if bias is None:
            return out
        bias = bias.reshape(-1, *(1,) * (weight.ndim - 2))
        if isinstance(out, JetTensor) and not isinstance(bias, JetTensor):
            return out.with_streams(add_to_primal(out.streams, bias))
        return out + bias


for _name in (f"conv{_kind}{_n}d" for _kind in ("", "_transpose") for _n in (1, 2, 3)):
    register_convolution(_name)


def register_average_pooling(name: str, num_dims: int) -> None:
    """Register an average pooling over the last ``num_dims`` dimensions."""
    function: Callable[..., Tensor] = getattr(F, name)

    @jet_rule(name)
    def rule(input: JetTensor, *args: object, **kwargs: object) -> JetTensor:
        streams = input.streams.reshape(-1, 1, *input.shape[-num_dims:])
        out = function(streams, *args, **kwargs)
        shape = (len(input.streams), *input.shape[:-num_dims], *out.shape[2:])
        return input.with_streams(out.reshape(shape))


for _name in (f"{_kind}avg_pool{_n}d" for _kind in ("", "adaptive_") for _n in (1, 2, 3)):
    register_average_pooling(_name, int(_name[-2]))


def register_reduction(name: str) -> None:
    """Register ``sum`` or ``mean``."""
    function: Callable[..., Tensor] = getattr(torch, name)

    @jet_rule(name)
    @accept_scalars
    def rule(
        input: JetTensor,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        axis: Dims = None,
        keepdims: bool = False,
    ) -> JetTensor:
        # torch also accepts NumPy's names ``axis`` and ``keepdims``.
        dims = reduced_dims(dim if axis is None else axis, input.ndim)
        stack_axes = stack_dims(dims, input.ndim)
        out = function(input.streams, stack_axes, keepdim=keepdim or keepdims, dtype=dtype)
        return input.with_streams(out)


for _name in ("sum", "mean"):
    register_reduction(_name)


@jet_rule("cumsum")
@accept_scalars
def cumsum(input: JetTensor, dim: int, *, dtype: torch.dtype | None = None) -> JetTensor:
    return input.with_streams(input.streams.cumsum(stack_dim(dim, input.ndim), dtype=dtype))


@jet_rule("dropout")
def dropout(
    input: JetTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> JetTensor:
    """Multiply all streams by one mask, which is drawn as torch draws it for the primal.

    Args:
        train: the name that torch.dropout has for ``training``.
    """
    if not (training and train) or p == 0:
        return input
    mask = F.dropout(torch.ones_like(input.primal), p, True)
    out = input.with_streams(input.streams * mask)
    return write_in_place(input, out) if inplace else out


# ---- a linear layer on a whole stack ---------------------------------------------------------


class _StackedLinear(torch.autograd.Function):
    """Compute ``x Wᵀ + b``, with the rows of all streams in one product; the bias is in stream 0.

    The backward is differentiable if gradients are enabled: it then calls torch's own product
    instead of `rows_times`, which has no derivative.
    """

    @staticmethod
    def forward(ctx: Any, streams: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(streams, weight)
        return _linear_streams(streams, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        streams, weight = ctx.saved_tensors
        needs_streams, needs_weight, needs_bias = ctx.needs_input_grad
        # Not `flatten`, which fails for batched cotangents (`is_grads_batched`).
        rows, columns = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (grad, streams))
        grad_streams = grad_weight = grad_bias = None
        if needs_streams:
            product = torch.matmul if torch.is_grad_enabled() else _rows_times_matrix
            grad_streams = product(rows, weight.conj()).reshape(streams.shape)
        if needs_weight:
            grad_weight = rows.mT @ columns.conj()
        if needs_bias:
            grad_bias = grad[0].sum_to_size(grad.shape[-1])
        return grad_streams, grad_weight, grad_bias


def _rows_times_matrix(rows: Tensor, matrix: Tensor) -> Tensor:
    return rows_times(rows, matrix.mT)


def stacked_linear(streams: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product ``[S, ..., n]`` of streams ``[S, ..., k]`` and the transpose of a weight
    ``[n, k]``, with the bias ``[n]`` added to stream 0."""
    if transformed():  # forward mode and vmap need torch's own functions
        out = F.linear(streams, weight)
        return out if bias is None else add_to_primal(out, bias)
    product = _StackedLinear.apply if torch.is_grad_enabled() else _linear_streams
    return product(streams, weight, bias)


def _linear_streams(streams: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = rows_times(streams, weight)
    return out if bias is None else add_to_fresh_primal(out, bias)


# ---- products of two jets --------------------------------------------------------------------
#
# These have a hand-written backward.  In the backward of `streamwise.bilinear` every slice of the
# stack costs a zero-filled stack and an addition; here each of the 1 + 2q + 4P products is added in
# place, unless a dispatch mode may keep the sum, or a backward is itself differentiated.


def leibniz_terms(layout: JetLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (stream of the product, stream of a, stream of b) for each term of Leibniz' rule."""
    yield 0, 0, 0
    for stream in range(1, layout.streams):
        yield stream, stream, 0
        yield stream, 0, stream
    for i, j, ij in layout.terms():
        yield ij, i, j
        yield ij, j, i


def _accumulate(
    terms: list[tuple[int, int, int]], a: Tensor, b: Tensor, alpha: float, grad_like: Tensor
) -> Tensor:
    """Return a stack of sums of products: stream o is alpha Σ a[i] b[j], over all terms (o, i, j).

    Args:
        terms: triples (o, i, j) of streams of the result, of a and of b.
        grad_like: the tensor, a or b, from which the result is allocated.  If one of them is a
            gradient, it has to be this one, as vmap may batch it.
    """
    shape = len(a), a.shape[1], a.shape[-2], b.shape[-1]
    if dispatch_modes() or transformed() or torch.is_grad_enabled():
        sums = [a.new_zeros(shape[1:])] * len(a)
        # Not slices, whose backward would allocate a stack for each.
        streams_a, streams_b = a.unbind(), b.unbind()
        for o, i, j in terms:
            sums[o] = sums[o].baddbmm(streams_a[i], streams_b[j], alpha=alpha)
        return torch.stack(sums)
    out = grad_like.new_empty(shape)
    betas = [0] * len(out)
    for o, i, j in terms:
        out[o].baddbmm_(a[i], b[j], beta=betas[o], alpha=alpha)  # 0 ignores uninitialised memory
        betas[o] = 1
    return out


class _MatmulJets(torch.autograd.Function):
    """Compute alpha · a b for stacks ``[S, ..., m, k]`` and ``[S, ..., k, n]``; a bias is added to
    the primal.

    The backward is differentiable any number of times.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, alpha: float, layout: JetLayout
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.alpha, ctx.layout = alpha, layout
        ctx.bias_shape = None if bias is None else bias.shape
        rows, columns = a.flatten(1, -3), b.flatten(1, -3)
        out = _accumulate(list(leibniz_terms(layout)), rows, columns, alpha, rows)
        # No view, since autograd forbids writes into a view that a Function returns.
        out = torch.ops.aten._unsafe_view(out, [len(a), *a.shape[1:-1], b.shape[-1]])
        return out if bias is None else add_to_fresh_primal(out, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        flat_a, flat_b, flat_grad = (
            t.reshape(len(t), math.prod(t.shape[1:-2]), *t.shape[-2:]) for t in (a, b, grad)
        )
        # The term out_o += α a_i b_j has the gradients ∂a_i += α ∂out_o b_jᴴ and
        # ∂b_j += α a_iᴴ ∂out_o: the same kind of sum, with the streams exchanged.
        terms = list(leibniz_terms(ctx.layout))
        grad_a = grad_b = grad_bias = None
        if ctx.needs_input_grad[0]:
            terms_a = [(i, o, j) for o, i, j in terms]
            grad_a = _accumulate(terms_a, flat_grad, flat_b.mH, ctx.alpha, flat_grad).view(a.shape)
        if ctx.needs_input_grad[1]:
            terms_b = [(j, i, o) for o, i, j in terms]
            grad_b = _accumulate(terms_b, flat_a.mH, flat_grad, ctx.alpha, flat_grad).view(b.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = grad[0].sum_to_size(ctx.bias_shape)
        return grad_a, grad_b, grad_bias, None, None


def products_fuse(a: JetTensor, b: JetTensor) -> bool:
    """Return whether `matmul_jets` takes two jets: they have the same dtype, layout and batch
    dimensions."""
    return (
        a.jet_layout == b.jet_layout
        and a.ndim == b.ndim >= 3
        and a.shape[:-2] == b.shape[:-2]
        and a.dtype == b.dtype
        and not transformed()
    )


def matmul_jets(
    a: JetTensor, b: JetTensor, *, alpha: float = 1.0, bias: Tensor | None = None
) -> JetTensor:
    """Return alpha · a b, with ``bias`` (broadcast to the product's shape) added to the primal.

    Args:
        a, b: jets ``[..., m, k]`` and ``[..., k, n]`` for which `products_fuse` is true.
    """
    return a.with_streams(_MatmulJets.apply(a.streams, b.streams, bias, alpha, a.jet_layout))


# ---- patches and resampling of images and signals --------------------------------------------


def register_image_map(function: Callable[..., Tensor], batch_ndim: int) -> None:
    """Register a linear function of images ``[N, C, ...]`` or of one image ``[C, ...]``.

    Args:
        batch_ndim: an input with at least this many dimensions has the batch dimension N.
    """

    @jet_rule(function)
    def rule(input: JetTensor, *args: object, **kwargs: object) -> JetTensor:
        return input.with_streams(
            _fold_streams(lambda x: function(x, *args, **kwargs), input, input.ndim >= batch_ndim)
        )


register_image_map(F.unfold, 4)
register_image_map(F.fold, 3)
register_image_map(F.interpolate, 3)  # every mode is linear


@jet_rule(F.grid_sample)
def grid_sample(input: JetTensor, grid: Tensor, *args: Any, **kwargs: Any) -> JetTensor:
    """Sample images ``[N, C, ...]`` at a constant grid, with the streams as more channels.

    `sampling.py` has the rule for a grid that is a jet.
    """
    out = F.grid_sample(input.streams.transpose(0, 1).flatten(1, 2), grid, *args, **kwargs)
    return input.with_streams(out.unflatten(1, (len(input.streams), -1)).transpose(0, 1))
