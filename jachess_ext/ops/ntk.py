"""The NTK of linear layers that share an input, in two forms (docs/ntk.md).

With inputs a_n ∈ R^{T×d} and cotangents δ^l_{n,c} ∈ R^{T×e_l} of layers l = 1..L:

    A   K[c, n, c', m] = Σ_{t,t'} (a_{n,t}·a_{m,t'}) Σ_l (δ^l_{n,c,t}·δ^l_{m,c',t'})
    B   G^l_{n,c} = Σ_t δ^l_{n,c,t} a_{n,t}ᵀ;
        K[c, n, c', m] = Σ_l Σ_{blocks of rows r} ⟨G^l_{n,c}[r], G^l_{m,c'}[r]⟩

A, `jachess::ntk_gram`, multiplies the two Gram matrices while their tiles are in registers or
cache; on a GPU torch's matrix products are used for single positions and wide layers, where writing
the tiles costs less (`tiles_by_torch`). B writes a block of rows of every per-sample gradient,
small enough for the cache, and multiplies it by torch's matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .gemm import rows_times
from .library import (
    OPS,
    available,
    check_shape,
    register_without_derivative,
    transformed,
    wide_dtype,
    widened,
)

# Rows (outputs times positions) along a side of a tile of form A in torch: few enough for a CPU's
# cache, and many enough for all multiprocessors of a GPU.
_TILE_ROWS, _GPU_TILE_ROWS = 512, 4096
_FEW_PAIRS = 4  # of positions: up to this number the kernel's sums cost more than its products
_WIDE = 2000  # features: from this number on, 16-bit products take longer than writing the tiles
WORKSPACE = 128 * 2**20
# On a Zen 4 core (1 MiB of L2, 32 MiB of L3), blocks of 3 to 6 MiB are written at 75 to 90 % of the
# rate of large products and multiplied at 100 %; 36 MiB of fresh memory at 28 and 80 %.
_CACHE_BYTES = 6 * 2**20
_LEAST_ROWS = 32  # with fewer, products of single samples are too small: 4 run at half the rate
_STRIP = 32  # rows of a strip of the upper triangle of a symmetric product


# ---- operands of one or two sides ----------------------------------------------------------


def _needs_derivative(*operands: Tensor | Sequence[Tensor] | None) -> bool:
    """Return whether autograd or a transform of torch.func differentiates any of the operands."""
    tensors = [t for x in operands for t in ([x] if isinstance(x, Tensor) else x or [])]
    return transformed() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _checked(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None,
    other_cotangents: Sequence[Tensor] | None,
) -> tuple[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]]:
    """Check and return both sides' operands; the left side replaces a missing right side.

    Raises:
        ValueError: shapes do not match; or only one of other_inputs and other_cotangents is given.
        TypeError: the operands have several dtypes, or not float64, float32, bfloat16 or float16.
    """
    if (other_inputs is None) != (other_cotangents is None):
        raise ValueError("pass both other_inputs and other_cotangents, or neither.")
    _check_side(inputs, cotangents)
    if other_inputs is None or other_cotangents is None:
        return inputs, cotangents, inputs, cotangents
    _check_side(other_inputs, other_cotangents)
    if inputs.dtype != other_inputs.dtype:
        raise TypeError(
            f"inputs has dtype {inputs.dtype} and other_inputs {other_inputs.dtype}; expected the "
            "same for all: convert one with .to()."
        )
    features = [[inputs.shape[-1], *(d.shape[::3] for d in cotangents)]]
    features += [[other_inputs.shape[-1], *(d.shape[::3] for d in other_cotangents)]]
    if features[0] != features[1]:
        raise ValueError(
            "left and right differ in their feature sizes, or in their numbers of outputs or "
            "layers: give the cotangents of the same layers in the same order."
        )
    return inputs, cotangents, other_inputs, other_cotangents


def _check_side(inputs: Tensor, cotangents: Sequence[Tensor]) -> None:
    if inputs.dim() != 3 or not cotangents or cotangents[0].dim() != 4:
        raise ValueError(
            f"inputs have shape {list(inputs.shape)} and cotangents "
            f"{[list(delta.shape) for delta in cotangents]}; expected [N, T, d] and at least one "
            "[C, N, T, e]."
        )
    wide_dtype(inputs.dtype)
    for delta in cotangents:
        check_shape("a cotangent", delta, (len(cotangents[0]), *inputs.shape[:2], delta.shape[-1]))
        if delta.dtype != inputs.dtype:
            raise TypeError(
                f"a cotangent has dtype {delta.dtype} and inputs {inputs.dtype}; expected the same "
                "for all: convert one with .to()."
            )


def _sides(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None,
    other_cotangents: Sequence[Tensor] | None,
) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Return the operands of both sides, checked by `_checked` and converted to the dtype of sums,
    with infinite and NaN inputs at unused positions set to 0."""
    a, deltas, b, right_deltas = _checked(inputs, cotangents, other_inputs, other_cotangents)
    left = _widened(a, deltas)
    return *left, *(left if other_inputs is None else _widened(b, right_deltas))


def _widened(inputs: Tensor, cotangents: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    a, deltas = widened(inputs), [widened(delta) for delta in cotangents]
    # Finite inputs at unused positions are kept: the gradient of a zero cotangent depends on them.
    return a.masked_fill(_unused_positions(deltas) & ~a.isfinite(), 0), deltas


def _unused_positions(cotangents: Sequence[Tensor]) -> Tensor:
    """Return [N, T, 1] bool, True at positions where all cotangents are zero.

    They contribute nothing to the kernel, even if the input is infinite, where 0 · ∞ would be NaN.
    """
    return ~torch.stack([delta.ne(0).any(-1).any(0) for delta in cotangents]).any(0)[..., None]


# ---- form A --------------------------------------------------------------------------------


def ntk_gram(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the kernel K computed in form A tile by tile, without an [N T, M T'] matrix.

    Positions whose cotangents are all zero (padding, or positions that no output depends on)
    contribute nothing, even if their inputs are infinite or NaN; on the CPU they take no time. On a
    GPU there is no kernel for fp64.

    Args:
        inputs: a, [N, T, d]; fp64, fp32, bf16 or fp16 (16-bit types are summed in fp32); any
            strides, any size including zero.
        cotangents: δ^l, [C, N, T, e_l] each, of the layers that share these inputs; of a's dtype.
        other_inputs, other_cotangents: [M, T', d] and [C, M, T', e_l] of the right side; None:
            those of the left side, with each pair computed once.

    Returns:
        K, [C, N, C, M], fp64 for fp64 inputs, else fp32; exactly symmetric without a right side,
        and independent of the number of threads. If a derivative is needed, the reference computes
        it.

    Examples:
        >>> inputs, cotangents = torch.ones(2, 3, 4), [torch.ones(1, 2, 3, 5)]
        >>> ntk_gram(inputs, cotangents)[0, :, 0]  # 3² pairs of positions times 4 times 5
        tensor([[180., 180.],
                [180., 180.]])
    """
    operands = (inputs, cotangents, other_inputs, other_cotangents)
    has_kernel = available("ntk_gram", inputs.device) and not _needs_derivative(*operands)
    if not has_kernel or (inputs.is_cuda and inputs.dtype == torch.float64):
        return ntk_gram_reference(*operands)
    if inputs.is_cuda:
        a, deltas, b, right_deltas = _checked(*operands)
        if tiles_by_torch(a, deltas, b):
            return _gram_by_torch(a, deltas, b, right_deltas)
    return OPS.ntk_gram(inputs, list(cotangents), other_inputs, list(other_cotangents or []))


def _gram_by_torch(
    a: Tensor, deltas: Sequence[Tensor], b: Tensor, right_deltas: Sequence[Tensor]
) -> Tensor:
    """Compute `ntk_gram` by torch's products, in the operands' dtype; not differentiable."""
    left = a.masked_fill(_unused_positions(deltas), 0)
    symmetric = b is a and right_deltas is deltas
    right = left if symmetric else b.masked_fill(_unused_positions(right_deltas), 0)
    return _tiles(left, deltas, right, right_deltas, _GPU_TILE_ROWS)


def tiles_by_torch(inputs: Tensor, cotangents: Sequence[Tensor], other_inputs: Tensor) -> bool:
    """Return whether torch's products on a GPU compute form A faster than the kernel.

    Args:
        inputs, cotangents: operands of the left side, as for `ntk_gram`.
        other_inputs: inputs of the right side.

    Examples:
        >>> single = torch.empty(8, 1, 384), torch.empty(2, 8, 1, 384), torch.empty(5, 4, 384)
        >>> tiles_by_torch(single[0], [single[1]], single[2])  # 1 by 4 positions
        True
    """
    pairs = inputs.shape[1] * other_inputs.shape[1]
    features = inputs.shape[-1] + sum(delta.shape[-1] for delta in cotangents)
    if not all(tensor.numel() for tensor in (inputs, other_inputs, *cotangents)):
        return False
    return pairs <= _FEW_PAIRS or (features > _WIDE and inputs.itemsize == 2)


def ntk_gram_reference(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Compute `ntk_gram` in pure torch, on any device."""
    return _tiles(*_sides(inputs, cotangents, other_inputs, other_cotangents), _TILE_ROWS)


def _tiles(
    left: Tensor, deltas: Sequence[Tensor], right: Tensor, right_deltas: Sequence[Tensor], most: int
) -> Tensor:
    """Return K, computed in tiles of at most ``most`` rows a side, but at least one sample.

    Args:
        left, right: inputs of both sides; the same tensor for a symmetric K, whose cotangents are
            then also the same.
        deltas, right_deltas: cotangents of both sides.
    """
    is_symmetric = right is left
    delta = _side_by_side(deltas)
    right_delta = delta if is_symmetric else _side_by_side(right_deltas)
    out_dim, count, positions, _ = delta.shape
    other_count, other_positions = right.shape[:2]
    kernel = left.new_zeros(out_dim, count, out_dim, other_count, dtype=wide_dtype(left.dtype))
    if not positions or not other_positions or not out_dim:
        return kernel
    step = max(1, most // (positions * out_dim))
    other_step = max(1, most // (other_positions * out_dim))
    for i in range(0, count, step):
        rows = slice(i, i + step)
        for j in range(i if is_symmetric else 0, other_count, other_step):
            columns = slice(j, j + other_step)
            tile = _tile(left[rows], delta[:, rows], right[columns], right_delta[:, columns])
            if is_symmetric and i == j:
                tile = (tile + tile.permute(2, 3, 0, 1)) / 2  # exactly symmetric
            kernel[:, rows, :, columns] = tile
            if is_symmetric and i != j:
                kernel[:, columns, :, rows] = tile.permute(2, 3, 0, 1)
    return kernel


def _side_by_side(cotangents: Sequence[Tensor]) -> Tensor:
    """Return the layers' cotangents concatenated, [C, N, T, Σ e_l]; inner products of the
    concatenation are the sums of the layers' inner products."""
    return torch.cat(list(cotangents), -1) if len(cotangents) > 1 else cotangents[0]


def _tile(a: Tensor, delta: Tensor, b: Tensor, right_delta: Tensor) -> Tensor:
    """Return the kernel [C, n, C, m] of n samples and m samples.

    Args:
        a, delta: inputs [n, T, d] and cotangents [C, n, T, e] of the n samples.
        b, right_delta: inputs [m, T', d] and cotangents [C, m, T', e] of the m samples.
    """
    gram = _products(a.flatten(0, 1), b.flatten(0, 1))
    products = _products(delta.flatten(0, 2), right_delta.flatten(0, 2))
    # [C, n, T, C, m, T'] times the inputs' products, which are the same for all pairs of outputs.
    products = products.view(*delta.shape[:3], *right_delta.shape[:3])
    return (products * gram.view(*a.shape[:2], 1, *b.shape[:2])).sum((2, 5))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, [m, n], of a [m, k] and b [n, k], in the dtype of sums."""
    if a.is_cuda and a.itemsize == 2:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return widened(a) @ widened(b).T


def _fake(
    inputs: Tensor,
    cotangents: list[Tensor],
    other_inputs: Tensor | None,
    *_: object,
) -> Tensor:
    out_dim, count = cotangents[0].shape[:2]
    other_count = count if other_inputs is None else other_inputs.shape[0]
    return inputs.new_empty(out_dim, count, out_dim, other_count, dtype=wide_dtype(inputs.dtype))


register_without_derivative("ntk_gram", _fake)

# ---- form B --------------------------------------------------------------------------------


def ntk_materialised(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
    workspace: int = WORKSPACE,
) -> Tensor:
    """Return the kernel K computed in form B block by block, without full per-sample gradients.

    Args:
        inputs, cotangents, other_inputs, other_cotangents: as for `ntk_gram`.
        workspace: number of bytes for the blocks of gradients, which have at least one row of every
            gradient. It changes the rounding of the result.

    Returns:
        K, as for `ntk_gram`. If a derivative is needed, `ntk_materialised_reference` computes it.

    Raises:
        ValueError: shapes do not match; only one of other_inputs and other_cotangents is given; or
            ``workspace`` is below 1.
        TypeError: the operands have several dtypes, or not float64, float32, bfloat16 or float16.
        RuntimeError: the operands are on several devices.

    Examples:
        >>> inputs, cotangents = torch.ones(2, 3, 4), [torch.ones(1, 2, 3, 5)]
        >>> ntk_materialised(inputs, cotangents)[0, :, 0]
        tensor([[180., 180.],
                [180., 180.]])
    """
    if workspace < 1:
        raise ValueError(
            f"ntk_materialised: workspace is {workspace}; expected bytes that it may take, at "
            "least 1."
        )
    operands = (inputs, cotangents, other_inputs, other_cotangents)
    if _needs_derivative(*operands):
        return ntk_materialised_reference(*operands)
    a, deltas, b, right_deltas = _sides(*operands)
    symmetric = other_inputs is None
    out_dim, count, other_count = deltas[0].shape[0], a.shape[0], b.shape[0]
    kernel = a.new_zeros(count * out_dim, other_count * out_dim)
    for delta, right_delta in zip(deltas, right_deltas, strict=True):
        vectors = out_dim * (count if symmetric else count + other_count)
        row_bytes = max(1, vectors * a.shape[-1] * a.itemsize)
        step = min(max(_LEAST_ROWS, _CACHE_BYTES // row_bytes), workspace // row_bytes)
        step = max(1, min(step, delta.shape[-1]))
        # All blocks use the same memory: page faults of fresh memory would cost more than a
        # product.
        memory = a.new_empty(out_dim * count * step * a.shape[-1])
        other_memory = a.new_empty(0 if symmetric else out_dim * other_count * step * a.shape[-1])
        for start in range(0, delta.shape[-1], step):
            block = _rows(a, delta[..., start : start + step], memory)
            if symmetric:
                _add_upper_triangle(kernel, block)
            else:
                right_block = _rows(b, right_delta[..., start : start + step], other_memory)
                kernel += rows_times(block, right_block, _STRIP)
    if symmetric:
        kernel = kernel.triu() + kernel.triu(1).T
    return kernel.view(count, out_dim, other_count, out_dim).permute(1, 0, 3, 2)


def _rows(a: Tensor, delta: Tensor, memory: Tensor) -> Tensor:
    """Return some rows of all per-sample gradients, [N C, rows · d], by one batched product.

    Args:
        a: inputs, [N, T, d].
        delta: the rows' cotangents, [C, N, T, rows].
        memory: a buffer for the result.
    """
    out_dim, count, positions, rows = delta.shape
    transposed = delta.permute(1, 0, 3, 2).reshape(count, out_dim * rows, positions)
    shape = (count, out_dim * rows, a.shape[-1])
    out = memory[: math.prod(shape)].view(shape)
    torch.bmm(transposed, a, out=out)
    return out.view(count * out_dim, rows * a.shape[-1])


def _add_upper_triangle(kernel: Tensor, block: Tensor) -> None:
    """Add the upper triangle of the matrix product block · blockᵀ to the kernel, strip by strip."""
    for start in range(0, kernel.shape[0], _STRIP):
        strip = block[start : start + _STRIP]
        kernel[start : start + _STRIP, start:] += rows_times(strip, block[start:], len(strip))


def ntk_materialised_reference(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Compute `ntk_materialised` in pure torch, from one layer's full gradients at a time."""
    a, deltas, b, right_deltas = _sides(inputs, cotangents, other_inputs, other_cotangents)
    out_dim, count, other_count = deltas[0].shape[0], a.shape[0], b.shape[0]
    kernel = a.new_zeros(out_dim * count, out_dim * other_count)
    for delta, right_delta in zip(deltas, right_deltas, strict=True):
        left = _gradients(a, delta)
        kernel = kernel + left @ (left if other_inputs is None else _gradients(b, right_delta)).T
    if other_inputs is None:
        kernel = (kernel + kernel.T) / 2  # exactly symmetric
    return kernel.view(out_dim, count, out_dim, other_count)


def _gradients(a: Tensor, delta: Tensor) -> Tensor:
    """Return the per-sample gradients δᵀ a as rows, [C n, e d]."""
    return torch.einsum("cntr,ntk->cnrk", delta, a).flatten(2).flatten(0, 1)
