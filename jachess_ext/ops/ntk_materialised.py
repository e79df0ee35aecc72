"""The NTK of linear layers that share an input, form B (docs/ntk.md): a block of rows of every
per-sample gradient is written, multiplied and forgotten, by torch's matrix products.

With inputs a_n ∈ R^{T×d} and cotangents δ^l_{n,c} ∈ R^{T×e_l} of layers l = 1..L,

    G^l_{n,c} = Σ_t δ^l_{n,c,t} a_{n,t}ᵀ,
    K[c, n, c', m] = Σ_l Σ_{blocks of rows r} ⟨G^l_{n,c}[r], G^l_{m,c'}[r]⟩.

A block is as small as the cache, so that it need not go to main memory and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .gemm import rows_times
from .ntk_operands import check_operands, differentiated, widened_sides

WORKSPACE = 128 * 2**20
# Measured on a Zen 4 core (1 MiB of L2, 32 MiB of L3), of the rate of large products: blocks of 3
# to 6 MiB are written at 75 to 90 % and multiplied at all of it; 36 MiB of fresh memory at 28 and
# 80 %.
_CACHE_BYTES = 6 * 2**20
_LEAST_ROWS = 32  # fewer make the products of single samples too small: 4 run at half the rate
_STRIP = 32  # rows of a strip of the upper triangle of a symmetric product


def ntk_materialised(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
    workspace: int = WORKSPACE,
) -> Tensor:
    """Form B, block by block; no gradient of a sample is ever whole.

    Positions whose cotangents are all zero (padding, or what no output depends on) add nothing,
    whatever their inputs hold.

    Args:
        inputs: a, [N, T, d]; fp64, fp32, bf16 or fp16 (16-bit types are summed in fp32); any
            strides, any size including zero.
        cotangents: δ^l, each [C, N, T, e_l], of the layers that share these inputs; of a's dtype.
        other_inputs, other_cotangents: [M, T', d] and [C, M, T', e_l] of the right side; None:
            the left side itself, each pair computed once.
        workspace: bytes that the blocks of gradients may take; one row of every gradient is taken
            in any case. It changes the last bits.

    Returns:
        K, [C, N, C, M], fp64 where the inputs are, else fp32; of the left side with itself exactly
        symmetric. Where a gradient is asked for, `ntk_materialised_reference` is used.

    Raises:
        ValueError: shapes or devices that do not fit together; one side of the right given without
            the other; a workspace below 1.
        TypeError: a dtype other than the four, or several.
    """
    if workspace < 1:
        raise ValueError(
            f"ntk_materialised: workspace is {workspace}; expected bytes that it may take, at "
            "least 1."
        )
    operands = (inputs, cotangents, other_inputs, other_cotangents)
    check_operands("ntk_materialised", *operands)
    if differentiated(*operands):
        return ntk_materialised_reference(*operands)
    a, deltas, b, others = widened_sides(*operands)
    symmetric = other_inputs is None
    outputs, count, other_count = deltas[0].shape[0], a.shape[0], b.shape[0]
    kernel = a.new_zeros(count * outputs, other_count * outputs)
    for delta, other in zip(deltas, others, strict=True):
        vectors = outputs * (count if symmetric else count + other_count)
        row_bytes = max(1, vectors * a.shape[-1] * a.itemsize)
        step = min(max(_LEAST_ROWS, _CACHE_BYTES // row_bytes), workspace // row_bytes)
        step = max(1, min(step, delta.shape[-1]))
        # written into the same memory again and again: fresh pages would cost more than the product
        mine = a.new_empty(outputs * count * step * a.shape[-1])
        theirs = mine if symmetric else a.new_empty(outputs * other_count * step * a.shape[-1])
        for start in range(0, delta.shape[-1], step):
            block = _rows(a, delta[..., start : start + step], mine)
            if symmetric:
                _add_upper_triangle(kernel, block)
            else:
                beside = _rows(b, other[..., start : start + step], theirs)
                kernel += rows_times(block, beside, _STRIP)
    if symmetric:
        kernel = kernel.triu() + kernel.triu(1).T
    return kernel.view(count, outputs, other_count, outputs).permute(1, 0, 3, 2)


def _rows(a: Tensor, delta: Tensor, memory: Tensor) -> Tensor:
    """[N C, rows d]: these rows of every gradient, one batched product over samples."""
    outputs, count, positions, rows = delta.shape
    turned = delta.permute(1, 0, 3, 2).reshape(count, outputs * rows, positions)
    shape = (count, outputs * rows, a.shape[-1])
    out = memory[: math.prod(shape)].view(shape)
    torch.bmm(turned, a, out=out)
    return out.view(count * outputs, rows * a.shape[-1])


def _add_upper_triangle(kernel: Tensor, block: Tensor) -> None:
    for start in range(0, kernel.shape[0], _STRIP):
        strip = block[start : start + _STRIP]
        kernel[start : start + _STRIP, start:] += rows_times(strip, block[start:], len(strip))


def ntk_materialised_reference(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """`ntk_materialised` one layer's gradients at a time: any number of backward passes.

    Args, returns and raises: as `ntk_materialised`.
    """
    operands = (inputs, cotangents, other_inputs, other_cotangents)
    check_operands("ntk_materialised", *operands)
    a, deltas, b, others = widened_sides(*operands)
    outputs, count, other_count = deltas[0].shape[0], a.shape[0], b.shape[0]
    kernel = a.new_zeros(outputs * count, outputs * other_count)
    for delta, other in zip(deltas, others, strict=True):
        left = _gradients(a, delta)
        kernel = kernel + left @ (left if other_inputs is None else _gradients(b, other)).T
    if other_inputs is None:
        kernel = (kernel + kernel.T) / 2  # round-off leaves the last bits apart
    return kernel.view(outputs, count, outputs, other_count)


def _gradients(a: Tensor, delta: Tensor) -> Tensor:
    """[C n, e d]"""
    return torch.einsum("cntr,ntk->cnrk", delta, a).flatten(2).flatten(0, 1)
