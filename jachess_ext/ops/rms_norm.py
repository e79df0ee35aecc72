"""Jets through root-mean-square normalisation: faces, pure-torch twins, fake kernels and autograd
of `jachess::rms_norm_jet`.

Signature: [S, ..., D], weight [D]?, eps, q -> [S, ..., D], with S = 1 + q (first order) or
1 + q + q(q-1)/2 streams; with a residual, x + residual is normalised and returned, too. It is the
norm rule of docs/how_it_works.md without centring: with v = mean(x²) and v^ = v_0 + eps

    r_0 = v^(−1/2);   r_i = −½ r v_i/v^;   r_ij = −½ r v_ij/v^ + ¾ r v_i v_j/v^²
    y = w · x · r, its streams by Leibniz' rule
"""

from typing import Any

import torch
from torch import Tensor

from .checks import check_channels, check_jet, check_normalised, widened
from .double_backward import gradient_of_backward
from .jet_formulas import mean_square_jet, product_jet, rsqrt_jet
from .library import available, loaded


def _check(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, q: int) -> None:
    check_jet(op, x, q)
    check_normalised(op, x, residual)
    check_channels(op, "weight", weight, x)


def rms_norm_jet_reference(x: Tensor, weight: Tensor | None, eps: float, q: int) -> Tensor:
    """Pure-torch twin of `rms_norm_jet`: any device, any number of backward passes.

    Args, returns and raises: as `rms_norm_jet`. 16-bit types are computed in fp32.
    """
    _check("rms_norm_jet", x, None, weight, q)
    streams = list(widened(x).unbind(0))
    y = torch.stack(product_jet(streams, rsqrt_jet(mean_square_jet(streams, q), eps, q), q))
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype)


def add_rms_norm_jet_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor]:
    """Pure-torch twin of `add_rms_norm_jet`.

    Args, returns and raises: as `add_rms_norm_jet`.
    """
    _check("add_rms_norm_jet", x, residual, weight, q)
    total = x + residual
    return rms_norm_jet_reference(total, weight, eps, q), total


def rms_norm_jet(x: Tensor, weight: Tensor | None, eps: float, q: int) -> Tensor:
    """Push a 2-jet through RMS normalisation over the last dimension (docs/how_it_works.md, norm).

    Args:
        x: [S, ..., D] stacked streams, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32, bf16 or fp16
            (the 16-bit types are computed in fp32); any strides, any size including zero.
        weight: [D] or None; may have another dtype than x. Where a model scales by 1 + w, as
            Gemma does, give 1 + w.
        eps: added to the mean square.
        q: number of directions, 1 to 4.

    Returns:
        [S, ..., D] of x's dtype; differentiable any number of times in x and weight. Where no
        compiled kernel serves x's device, the pure-torch twin is used.

    Raises:
        ValueError: q outside 1..4, S that does not match q, or a weight that is not [D] on x's
            device.
        TypeError: a dtype other than the four.
    """
    _check("rms_norm_jet", x, None, weight, q)
    if not available("rms_norm_jet", x.device):
        return rms_norm_jet_reference(x, weight, eps, q)
    return torch.ops.jachess.rms_norm_jet(x, None, weight, eps, q)[0]


def add_rms_norm_jet(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor]:
    """Add two 2-jets and push the sum through RMS normalisation, in one pass.

    Args:
        x: as of `rms_norm_jet`.
        residual: as x, of the same shape and dtype, on the same device.
        weight, eps, q: as of `rms_norm_jet`.

    Returns:
        y = norm(x + residual) and the sum x + residual that a pre-norm model goes on with, both
        [S, ..., D] of x's dtype and differentiable any number of times. The sum is rounded to x's
        dtype before it is normalised, and is all that is kept for the backward.

    Raises:
        ValueError, TypeError: as `rms_norm_jet`, and for a residual that is not like x.
    """
    _check("add_rms_norm_jet", x, residual, weight, q)
    if not available("rms_norm_jet", x.device):
        return add_rms_norm_jet_reference(x, residual, weight, eps, q)
    y, total, _ = torch.ops.jachess.rms_norm_jet(x, residual, weight, eps, q)
    return y, total


# ---- registrations: fake kernels and autograd ----------------------------------------------


def _fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x.new_empty(0) if residual is None else torch.empty_like(y)
    return y, total, x.new_empty(x.shape[:-1], dtype=widened(x).dtype)


def _fake_backward(
    gy: Tensor,
    gsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    q: int,
    rstd: Tensor,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return gx, x.new_empty(x.shape[-1] if need_weight else 0, dtype=rstd.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, ctx.eps, ctx.q = inputs
    _, total, rstd = output
    # The statistic is a saved value, not a result: a gradient in it would be dropped. An unused
    # sum has no gradient, and none must be made for it.
    ctx.mark_non_differentiable(rstd, *((total,) if residual is None else ()))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else total, weight, rstd)
    ctx.has_residual = residual is not None


def _backward(
    ctx: Any, gy: Tensor | None, gsum: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if gy is None:  # only the sum was used
        return gsum, gsum if ctx.has_residual else None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    need_weight = ctx.needs_input_grad[2]
    gx, gweight = torch.ops.jachess.rms_norm_jet_backward(
        gy, gsum, x, weight, ctx.eps, ctx.q, rstd, need_weight
    )
    return (
        gx,
        gx if ctx.has_residual else None,
        gweight.to(weight.dtype) if need_weight else None,
        None,
        None,
    )


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gy, gsum, x, weight, ctx.eps, ctx.q, _, ctx.need_weight = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gy, x, weight)
    ctx.has_gsum = gsum is not None


def _backward_of_backward(
    ctx: Any, cot_x: Tensor | None, cot_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    gy, x, weight = ctx.saved_tensors
    scale = x.new_ones(x.shape[-1], dtype=widened(x).dtype) if weight is None else weight
    ggy, gx, gweight = gradient_of_backward(
        lambda x, w: rms_norm_jet_reference(x, w, ctx.eps, ctx.q),
        [x, scale],
        gy,
        [cot_x, cot_weight if ctx.need_weight else None],
    )
    ggsum = cot_x if ctx.has_gsum else None
    return ggy, ggsum, gx, None if weight is None else gweight, None, None, None, None


if loaded():
    torch.library.register_fake("jachess::rms_norm_jet", _fake)
    torch.library.register_fake("jachess::rms_norm_jet_backward", _fake_backward)
    torch.library.register_autograd("jachess::rms_norm_jet", _backward, setup_context=_save)
    torch.library.register_autograd(
        "jachess::rms_norm_jet_backward", _backward_of_backward, setup_context=_save_backward
    )
