"""Form B (docs/ntk.md) as blocked matrix products, where `jachess::ntk_materialised` has no kernel
(on GPUs, and without the compiled operators): write a block of every per-sample gradient of a
layer, multiply, forget it.

K[c, n, c', m] = Σ_{blocks of rows r} vec(G_{n,c}[r, :]) · vec(G_{m,c'}[r, :])

A block is as small as the cache, so that it need not go to main memory and back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.gemm import rows_times
from .contributions import Factors

# Measured on a Zen 4 core (1 MiB of L2, 32 MiB of L3), of the rate of large products: blocks of 3
# to 6 MiB are written at 75 to 90 % and multiplied at all of it; 36 MiB of fresh memory at 28 and
# 80 %.
_CACHE_BYTES = 6 * 2**20
_LEAST_ROWS = 32  # fewer make the products of single samples too small: 4 run at half the rate
_STRIP = 32  # rows of a strip of the upper triangle of a symmetric product


def contract_materialised(
    left: Factors, right: Factors, symmetric: bool, workspace: int, dtype: torch.dtype
) -> Tensor:
    """[C, N, C, M] of ``dtype``; ``symmetric`` says that right is left.

    Args:
        workspace: bytes that the blocks of gradients may take.
        dtype: in which it is computed: float64 or float32.
    """
    outputs, count = left.cotangents.shape[:2]
    other_count = right.cotangents.shape[1]
    if not left.inputs.shape[1] or not right.inputs.shape[1]:
        return left.inputs.new_zeros(outputs, count, outputs, other_count, dtype=dtype)
    rows, columns = left.cotangents.shape[-1], left.inputs.shape[-1]
    vectors = outputs * (count if symmetric else count + other_count)
    step = min(rows, _rows_a_block(max(1, vectors * columns * dtype.itemsize), workspace))
    mine = _Blocks(left, step, dtype)
    theirs = mine if symmetric else _Blocks(right, step, dtype)
    kernel = left.inputs.new_zeros(count * outputs, other_count * outputs, dtype=dtype)
    for start in range(0, rows, step):
        block = mine.write(start)
        if symmetric:
            _add_upper_triangle(kernel, block)
        else:
            kernel += rows_times(block, theirs.write(start), _STRIP)
    if symmetric:
        kernel = kernel.triu() + kernel.triu(1).T
    return kernel.view(count, outputs, other_count, outputs).permute(1, 0, 3, 2)


def _rows_a_block(row_bytes: int, workspace: int) -> int:
    in_cache = max(_LEAST_ROWS, _CACHE_BYTES // row_bytes)
    return max(1, min(in_cache, workspace // row_bytes))


class _Blocks:
    """Rows of every gradient of one side, written into the same memory again and again."""

    def __init__(self, factors: Factors, step: int, dtype: torch.dtype) -> None:
        self._step = step
        self._inputs = factors.inputs.to(dtype)
        self._cotangents = factors.cotangents
        self._outputs, self._count = factors.cotangents.shape[:2]
        columns = self._inputs.shape[-1]
        self._memory = self._inputs.new_empty(self._count * self._outputs * step * columns)

    def write(self, start: int) -> Tensor:
        """[n C, rows of the block × d_in], one batched product over samples."""
        delta = self._cotangents[..., start : start + self._step].to(self._inputs.dtype)
        rows, columns = delta.shape[-1], self._inputs.shape[-1]
        delta = delta.permute(1, 0, 3, 2).reshape(self._count, self._outputs * rows, -1)
        memory = self._memory[: self._count * self._outputs * rows * columns]
        out = memory.view(self._count, self._outputs * rows, columns)
        torch.bmm(delta, self._inputs, out=out)
        return memory.view(self._count * self._outputs, rows * columns)


def _add_upper_triangle(kernel: Tensor, block: Tensor) -> None:
    for start in range(0, kernel.shape[0], _STRIP):
        strip = block[start : start + _STRIP]
        kernel[start : start + _STRIP, start:] += rows_times(strip, block[start:], len(strip))
