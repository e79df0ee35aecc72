"""The NTK of linear layers that share an input, form A (spec 02): the Gram matrix of the inputs
times the Gram matrix of the output cotangents, summed over positions.

With inputs a_n ∈ R^{T×d} and cotangents δ^l_{n,c} ∈ R^{T×e_l} of layers l = 1..L,

    K[c, n, c', m] = Σ_{t,t'} (a_{n,t}·a_{m,t'}) Σ_l (δ^l_{n,c,t}·δ^l_{m,c',t'}).

This is the pure-torch twin; the fused operator `jachess::ntk_gram` will take its place where a
compiled kernel serves the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TILE_POSITIONS = 512  # positions a side of one tile: its Gram matrices stay in the cache


def ntk_gram(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Form A, tile by tile; no [N T, M T'] matrix is ever whole.

    Args:
        inputs: a, [N, T, d]; fp64, fp32, bf16 or fp16 (16-bit types are computed in fp32).
        cotangents: δ^l, each [C, N, T, e_l], of the layers that share these inputs.
        other_inputs, other_cotangents: [M, T', d] and [C, M, T', e_l] of the right side; None:
            the left side itself, each pair computed once.

    Returns:
        K, [C, N, C, M], fp64 where the inputs are, else fp32.

    Raises:
        ValueError: shapes that do not fit together; one side of the right given without the other.
    """
    if (other_inputs is None) != (other_cotangents is None):
        raise ValueError("ntk_gram: pass both other_inputs and other_cotangents, or neither.")
    symmetric = other_inputs is None
    right = inputs if other_inputs is None else other_inputs
    right_cotangents = cotangents if other_cotangents is None else other_cotangents
    _check(inputs, cotangents)
    _check(right, right_cotangents)
    if [d.shape[-1] for d in cotangents] != [d.shape[-1] for d in right_cotangents] or (
        inputs.shape[-1] != right.shape[-1]
    ):
        raise ValueError("ntk_gram: left and right differ in their feature sizes.")
    return ntk_gram_reference(inputs, cotangents, right, right_cotangents, symmetric)


def ntk_gram_reference(
    left: Tensor,
    left_cotangents: Sequence[Tensor],
    right: Tensor,
    right_cotangents: Sequence[Tensor],
    symmetric: bool,
) -> Tensor:
    """Pure-torch twin of `ntk_gram`; ``symmetric`` says that right is left."""
    outputs, count, positions, _ = left_cotangents[0].shape
    other_count, other_positions = right.shape[:2]
    dtype = torch.float64 if left.dtype == torch.float64 else torch.float32
    kernel = left.new_zeros(outputs, count, outputs, other_count, dtype=dtype)
    if not positions or not other_positions:
        return kernel
    step = max(1, _TILE_POSITIONS // positions)
    other_step = max(1, _TILE_POSITIONS // other_positions)
    for i in range(0, count, step):
        rows = slice(i, i + step)
        a, deltas = _flat(left, left_cotangents, rows, dtype)
        for j in range(i if symmetric else 0, other_count, other_step):
            columns = slice(j, j + other_step)
            b, others = _flat(right, right_cotangents, columns, dtype)
            tile = _tile(a, deltas, b, others, positions, other_positions)
            kernel[:, rows, :, columns] = tile
            if symmetric:
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
    product = torch.empty_like(gram)
    for c in range(outputs):
        for d in range(outputs):
            torch.mm(deltas[0][c], others[0][d].T, out=product)
            for delta, other in zip(deltas[1:], others[1:], strict=True):
                product.addmm_(delta[c], other[d].T)
            tile[c, :, d] = product.mul_(gram).view(shape).sum(3).sum(1)
    return tile


def _flat(
    inputs: Tensor, cotangents: Sequence[Tensor], rows: slice, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Samples and positions as one dimension, of these rows."""
    a = inputs[rows].to(dtype).flatten(0, 1)
    return a, [delta[:, rows].to(dtype).flatten(1, 2) for delta in cotangents]


def _check(inputs: Tensor, cotangents: Sequence[Tensor]) -> None:
    if inputs.dim() != 3 or not cotangents:
        raise ValueError(
            f"ntk_gram: inputs have shape {list(inputs.shape)} and there are {len(cotangents)} "
            "cotangents; expected [N, T, d] and at least one [C, N, T, e]."
        )
    for delta in cotangents:
        if delta.dim() != 4 or delta.shape[1:3] != inputs.shape[:2]:
            raise ValueError(
                f"ntk_gram: a cotangent has shape {list(delta.shape)}; expected "
                f"[C, {inputs.shape[0]}, {inputs.shape[1]}, e]."
            )
