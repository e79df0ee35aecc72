"""The NTK of linear layers that share an input, form B (docs/ntk.md): per-sample gradients written
in pieces, multiplied and forgotten.

With inputs a_n ∈ R^{T×d} and cotangents δ^l_{n,c} ∈ R^{T×e_l} of layers l = 1..L,

    G^l_{n,c} = Σ_t δ^l_{n,c,t} a_{n,t}ᵀ,    K[c, n, c', m] = Σ_l ⟨G^l_{n,c}, G^l_{m,c'}⟩.

`jachess::ntk_materialised` keeps a piece of all gradients in the cache of the core that wrote it.
It has a CPU kernel only: elsewhere blocks of matrix products do (`jachess_ext.ntk.materialise`).
Its wrapper, its pure-torch reference and its fake kernel are here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ntk_operands import check_operands, fake_kernel, kernel_serves, widened
from .registration import register_without_derivative

WORKSPACE = 128 * 2**20


def ntk_materialised(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
    workspace: int = WORKSPACE,
) -> Tensor:
    """Form B, piece by piece; no gradient of a sample is ever whole.

    Positions whose cotangents are all zero (padding, or what no output depends on) add nothing,
    whatever their inputs hold, and cost nothing.

    Args:
        inputs: a, [N, T, d]; fp64, fp32, bf16 or fp16 (16-bit types are summed in fp32); any
            strides, any size including zero.
        cotangents: δ^l, each [C, N, T, e_l], of the layers that share these inputs; of a's dtype.
        other_inputs, other_cotangents: [M, T', d] and [C, M, T', e_l] of the right side; None:
            the left side itself, each pair computed once.
        workspace: bytes for packed operands and for the shares' sums, beside what each thread takes
            (a few MiB). Forty features of every position and one share's sums are taken in any
            case. It changes the last bits.

    Returns:
        K, [C, N, C, M], fp64 where the inputs are, else fp32; of the left side with itself exactly
        symmetric. The same whatever the number of threads. Where a gradient is asked for, and where
        no compiled kernel serves the device, the pure-torch reference is used.

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
    check_operands("ntk_materialised", inputs, cotangents, other_inputs, other_cotangents)
    if not kernel_serves("ntk_materialised", inputs, cotangents, other_inputs, other_cotangents):
        return ntk_materialised_reference(inputs, cotangents, other_inputs, other_cotangents)
    return torch.ops.jachess.ntk_materialised(
        inputs, list(cotangents), other_inputs, list(other_cotangents or []), workspace
    )


def ntk_materialised_reference(
    inputs: Tensor,
    cotangents: Sequence[Tensor],
    other_inputs: Tensor | None = None,
    other_cotangents: Sequence[Tensor] | None = None,
) -> Tensor:
    """Pure-torch reference of `ntk_materialised`, one layer's gradients at a time: any device, any
    number of backward passes.

    Args, returns and raises: as `ntk_materialised`.
    """
    check_operands("ntk_materialised", inputs, cotangents, other_inputs, other_cotangents)
    dtype = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    a, deltas = widened(inputs, cotangents, dtype)
    b, others = a, deltas
    if other_inputs is not None and other_cotangents is not None:
        b, others = widened(other_inputs, other_cotangents, dtype)
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


register_without_derivative("ntk_materialised", fake_kernel)
