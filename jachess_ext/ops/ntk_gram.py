"""The NTK of linear layers that share an input, form A (docs/ntk.md): the Gram matrix of the inputs
times the Gram matrix of the output cotangents, summed over positions.

With inputs a_n ∈ R^{T×d} and cotangents δ^l_{n,c} ∈ R^{T×e_l} of layers l = 1..L,

    K[c, n, c', m] = Σ_{t,t'} (a_{n,t}·a_{m,t'}) Σ_l (δ^l_{n,c,t}·δ^l_{m,c',t'}).

`jachess::ntk_gram` multiplies and sums the two while their tiles are in registers or cache; its
wrapper, its pure-torch reference and its fake kernel are here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import available
from .ntk_operands import check_operands, differentiated, fake_kernel, wide_dtype, widened
from .registration import register_without_derivative

_TILE_POSITIONS = 512  # a side of a tile of the reference: its Gram matrices stay in cache


def ntk_gram(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Form A, tile by tile; no [N T, M T'] matrix is ever whole.

    Positions whose cotangents are all zero (padding, or what no output depends on) add nothing,
    whatever their inputs hold; on the CPU they cost nothing either.

    Args:
        inputs: a, [N, T, d]; fp64, fp32, bf16 or fp16 (16-bit types are summed in fp32); any
            strides, any size including zero.
        cotangents: δ^l, each [C, N, T, e_l], of the layers that share these inputs; of a's dtype.
        other_inputs, other_cotangents: [M, T', d] and [C, M, T', e_l] of the right side; None:
            the left side itself, each pair computed once.

    Returns:
        K, [C, N, C, M], fp64 where the inputs are, else fp32; of the left side with itself exactly
        symmetric. The same whatever the number of threads. Where a gradient is asked for, and where
        no compiled kernel serves the device, the pure-torch reference is used.

    Raises:
        ValueError: shapes or devices that do not fit together; one side of the right given without
            the other.
        TypeError: a dtype other than the four, or several.
    """
    operands = (inputs, cotangents, other_inputs, other_cotangents)
    check_operands("ntk_gram", *operands)
    if not available("ntk_gram", inputs.device) or differentiated(*operands):
        return ntk_gram_reference(*operands)
    return torch.ops.jachess.ntk_gram(
        inputs, list(cotangents), other_inputs, list(other_cotangents or [])
    )


def ntk_gram_reference(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Pure-torch reference of `ntk_gram`: any device, any number of backward passes.

    Args, returns and raises: as `ntk_gram`.
    """
    check_operands("ntk_gram", inputs, cotangents, other_inputs, other_cotangents)
    symmetric = other_inputs is None
    right = inputs if other_inputs is None else other_inputs
    right_cotangents = cotangents if other_cotangents is None else other_cotangents
    outputs, count, positions, _ = cotangents[0].shape
    other_count, other_positions = right.shape[:2]
    kernel = inputs.new_zeros(outputs, count, outputs, other_count, dtype=wide_dtype(inputs))
    if not positions or not other_positions:
        return kernel
    step = max(1, _TILE_POSITIONS // positions)
    other_step = max(1, _TILE_POSITIONS // other_positions)
    for i in range(0, count, step):
        rows = slice(i, i + step)
        a, deltas = _flat(inputs, cotangents, rows)
        for j in range(i if symmetric else 0, other_count, other_step):
            columns = slice(j, j + other_step)
            b, others = _flat(right, right_cotangents, columns)
            tile = _tile(a, deltas, b, others, positions, other_positions)
            if symmetric and i == j:
                tile = (tile + tile.permute(2, 3, 0, 1)) / 2  # round-off leaves the last bits apart
            kernel[:, rows, :, columns] = tile
            if symmetric and i != j:
                kernel[:, columns, :, rows] = tile.permute(2, 3, 0, 1)
    return kernel


def _tile(
    a: Tensor,
    deltas: list[Tensor],
    b: Tensor,
    others: list[Tensor],
    positions: int,
    other_positions: int,
) -> Tensor:
    """[C, rows, C, columns]; the input Gram matrix serves every pair of outputs."""
    gram = a @ b.T
    outputs = deltas[0].shape[0]
    shape = (a.shape[0] // positions, positions, b.shape[0] // other_positions, other_positions)
    tile = gram.new_empty(outputs, shape[0], outputs, shape[2])
    for c in range(outputs):
        for d in range(outputs):
            product = deltas[0][c] @ others[0][d].T
            for delta, other in zip(deltas[1:], others[1:], strict=True):
                product = torch.addmm(product, delta[c], other[d].T)
            tile[c, :, d] = (product * gram).view(shape).sum(3).sum(1)
    return tile


def _flat(inputs: Tensor, cotangents: Sequence[Tensor], rows: slice) -> tuple[Tensor, list[Tensor]]:
    """Samples and positions as one dimension, of these rows."""
    a, deltas = widened(inputs[rows], [delta[:, rows] for delta in cotangents])
    return a.flatten(0, 1), [delta.flatten(1, 2) for delta in deltas]


register_without_derivative("ntk_gram", fake_kernel)
