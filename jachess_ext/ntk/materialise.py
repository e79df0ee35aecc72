"""Form B (spec 02): write a block of every per-sample gradient of a layer, multiply, forget it.

K[c, n, c', m] = Σ_{blocks of rows r} vec(G_{n,c}[r, :]) · vec(G_{m,c'}[r, :])
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contributions import Factors

_TRIANGLE = 4  # a symmetric product is computed in this many strips of its upper triangle
_SMALL = 64  # rows below which the strips cost more than they save


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
    row_bytes = max(1, vectors * columns * dtype.itemsize)
    step = max(1, min(rows, workspace // row_bytes))
    kernel = left.inputs.new_zeros(count * outputs, other_count * outputs, dtype=dtype)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        block = _gradients(left, part, dtype)
        if symmetric:
            _add_upper_triangle(kernel, block)
        else:
            kernel.addmm_(block, _gradients(right, part, dtype).T)
    if symmetric:
        kernel = kernel.triu() + kernel.triu(1).T
    return kernel.view(count, outputs, other_count, outputs).permute(1, 0, 3, 2)


def _gradients(factors: Factors, part: slice, dtype: torch.dtype) -> Tensor:
    """[n C, rows of the part × d_in], one batched product over samples."""
    delta = factors.cotangents[..., part].to(dtype)
    outputs, count, positions, rows = delta.shape
    delta = delta.permute(1, 0, 3, 2).reshape(count, outputs * rows, positions)
    return torch.bmm(delta, factors.inputs.to(dtype)).view(count * outputs, -1)


def _add_upper_triangle(kernel: Tensor, block: Tensor) -> None:
    size = kernel.shape[0]
    step = size if size < _SMALL else -(-size // _TRIANGLE)
    for start in range(0, size, step):
        strip = slice(start, start + step)
        kernel[strip, start:].addmm_(block[strip], block[start:].T)
