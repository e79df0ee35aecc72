"""Squares of a jet's streams: wrapper, pure-torch reference, fake kernel and autograd of
`jachess::jet_mean_squares`, and `jet_norms`, plain torch.

Both take streams x [S, ..., D], S = 1 + q (first order) or 1 + q + P with P = q(q-1)/2 pairs:

    jet_norms           [S − 1, ...]:  Σ_j x_sj²  for every stream s but the primal
    jet_mean_squares    [...]:         1/q Σ_i Σ_j x_ij²
                        [..., |D'|]:   1/P Σ_{i<i'} x_{ii',j}²  for the dimensions j in D'

The second is what the estimator needs (docs/how_it_works.md): with directions of identity
covariance its two results have the expectations ‖J_t‖² and ‖H_{t,j}‖².  Sums of 16-bit types are
kept in fp32.
"""

import torch
from torch import Tensor

from .checks import check_jet, widened
from .library import available
from .registration import register_operator


def _check(op: str, x: Tensor, q: int, mask: Tensor | None, index: Tensor | None = None) -> None:
    check_jet(op, x, q, last="the dimension to sum over")
    if mask is not None and (mask.shape != x.shape[1:-1] or mask.dtype != torch.bool):
        raise ValueError(
            f"{op}: mask is {mask.dtype} {list(mask.shape)}; expected bool "
            f"{list(x.shape[1:-1])}: x's shape without its first and last dimension, true where a "
            "token counts."
        )
    if index is not None and (index.dim() != 1 or index.dtype != torch.int64):
        raise ValueError(
            f"{op}: index is {index.dtype} {list(index.shape)}; expected int64 [n], distinct "
            "numbers of x's last dimension."
        )
    for name, tensor in (("mask", mask), ("index", index)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but x is on {x.device}: move it with "
                ".to(x.device)."
            )


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """In the accumulation dtype, zero at masked tokens, whatever stood there."""
    wide = widened(x)
    return wide if mask is None else wide.masked_fill(~mask.unsqueeze(-1), 0)


def jet_mean_squares_reference(
    x: Tensor, q: int, mask: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pure-torch reference of `jet_mean_squares`: any device, any number of backward passes.

    Args, returns and raises: as `jet_mean_squares`, but numbers of ``index`` may repeat, and one
    out of range is torch's IndexError.
    """
    _check("jet_mean_squares", x, q, mask, index)
    first = _masked(x[1 : 1 + q], mask).square().sum(-1).mean(0)
    if x.shape[0] == 1 + q:
        return first, _masked(x[0, ..., :0], mask)
    second = x[1 + q :] if index is None else x[1 + q :].index_select(-1, index)
    return first, _masked(second, mask).square().mean(0)


def jet_norms(x: Tensor, q: int, mask: Tensor | None = None) -> Tensor:
    """Sums of squares of a jet's derivative streams over the last dimension.

    Args:
        x: [S, ..., D] stacked streams, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32, bf16 or fp16; any
            strides, any size including zero.
        q: number of directions, 1 to 4.
        mask: bool [...], true where a token counts; elsewhere the result and the gradient are zero,
            and what x holds is not looked at. None: every token counts.

    Returns:
        [S − 1, ...] in fp32 (fp64 for fp64): of streams 1 to S − 1. Differentiable any number of
        times.

    Raises:
        ValueError: q outside 1..4, S that does not match q, no dimension behind the streams, a mask
            of another shape, dtype or device.
        TypeError: a dtype other than the four.
    """
    _check("jet_norms", x, q, mask)
    return _masked(x[1:], mask).square().sum(-1)


jet_norms_reference = jet_norms  # a compiled operator's, once


def jet_mean_squares(
    x: Tensor, q: int, mask: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Per token, the mean over directions of ‖x_i‖², and the mean over pairs of x_ij² for every
    dimension in ``index``.

    Args:
        x, q, mask: as for `jet_norms`.
        index: int64 [n], distinct numbers of the last dimension; None: all of them. The CPU refuses
            repeated or impossible numbers; CUDA, which must not wait for them, gives NaN there.

    Returns:
        [...] and [..., n] in fp32 (fp64 for fp64); n = 0 where x has no pairs. Differentiable any
        number of times. Where no compiled kernel serves x's device, the reference is used.

    Raises:
        ValueError, TypeError: as `jet_norms`; an index of another shape, dtype or device.
        RuntimeError: on the CPU, an index that repeats a number or is out of range.
    """
    if not available("jet_mean_squares", x.device):
        return jet_mean_squares_reference(x, q, mask, index)
    _check("jet_mean_squares", x, q, mask, index)
    return torch.ops.jachess.jet_mean_squares(x, mask, index, q)


def _per_token(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _fake_squares(
    x: Tensor, mask: Tensor | None, index: Tensor | None, q: int
) -> tuple[Tensor, Tensor]:
    chosen = x.shape[-1] if index is None else index.shape[0]
    chosen = 0 if x.shape[0] == 1 + q else chosen
    return _per_token(x, *x.shape[1:-1]), _per_token(x, *x.shape[1:-1], chosen)


register_operator(
    "jet_mean_squares",
    lambda x, mask, index, q: jet_mean_squares_reference(x, q, mask, index),
    tensors=3,
    fake=_fake_squares,
)
