"""Jets through layer normalisation: faces, pure-torch twins, fake kernels and autograd of
`jachess::layer_norm_jet`.

Signature: [S, ..., D], weight [D]?, bias [D]?, eps, q -> [S, ..., D], with S = 1 + q (first order)
or 1 + q + q(q-1)/2 streams; with a residual, x + residual is normalised and returned, too. With
c = x − mean(x), v = mean(c²) and v^ = v_0 + eps (docs/how_it_works.md, norm):

    r_0 = v^(−1/2);   r_i = −½ r v_i/v^;   r_ij = −½ r v_ij/v^ + ¾ r v_i v_j/v^²
    y = w · c · r (+ bias on the primal), its streams by Leibniz' rule
"""

from typing import Any

import torch
from torch import Tensor

from .checks import check_channels, check_jet, check_normalised, widened
from .double_backward import gradient_of_backward
from .jet_formulas import mean_square_jet, product_jet, rsqrt_jet
from .library import available, loaded


def _check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    q: int,
) -> None:
    check_jet(op, x, q)
    check_normalised(op, x, residual)
    check_channels(op, "weight", weight, x)
    check_channels(op, "bias", bias, x)


def layer_norm_jet_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> Tensor:
    """Pure-torch twin of `layer_norm_jet`: any device, any number of backward passes.

    Args, returns and raises: as `layer_norm_jet`. 16-bit types are computed in fp32.
    """
    _check("layer_norm_jet", x, None, weight, bias, q)
    wide = widened(x)
    c = list((wide - wide.mean(-1, keepdim=True)).unbind(0))
    y = torch.stack(product_jet(c, rsqrt_jet(mean_square_jet(c, q), eps, q), q))
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = torch.cat([y[:1] + bias.to(wide.dtype), y[1:]])
    return y.to(x.dtype)


def add_layer_norm_jet_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor]:
    """Pure-torch twin of `add_layer_norm_jet`.

    Args, returns and raises: as `add_layer_norm_jet`.
    """
    _check("add_layer_norm_jet", x, residual, weight, bias, q)
    total = x + residual
    return layer_norm_jet_reference(total, weight, bias, eps, q), total


def layer_norm_jet(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> Tensor:
    """Push a 2-jet through layer normalisation over the last dimension (module docstring).

    Args:
        x: [S, ..., D] stacked streams, S = 1 + q or 1 + q + q(q-1)/2; fp64, fp32, bf16 or fp16
            (the 16-bit types are computed in fp32); any strides, any size including zero.
        weight: [D] or None; may have another dtype than x.
        bias: [D] or None, added to the primal only; may have another dtype than x.
        eps: added to the variance.
        q: number of directions, 1 to 4.

    Returns:
        [S, ..., D] of x's dtype; differentiable any number of times in x, weight and bias. Where
        no compiled kernel serves x's device, the pure-torch twin is used.

    Raises:
        ValueError: q outside 1..4, S that does not match q, or a weight or bias that is not [D]
            on x's device.
        TypeError: a dtype other than the four.
    """
    _check("layer_norm_jet", x, None, weight, bias, q)
    if not available("layer_norm_jet", x.device):
        return layer_norm_jet_reference(x, weight, bias, eps, q)
    return torch.ops.jachess.layer_norm_jet(x, None, weight, bias, eps, q)[0]


def add_layer_norm_jet(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor]:
    """Add two 2-jets and push the sum through layer normalisation, in one pass.

    Args:
        x: as of `layer_norm_jet`.
        residual: as x, of the same shape and dtype, on the same device.
        weight, bias, eps, q: as of `layer_norm_jet`.

    Returns:
        y = norm(x + residual) and the sum x + residual that a pre-norm model goes on with, both
        [S, ..., D] of x's dtype and differentiable any number of times. The sum is rounded to x's
        dtype before it is normalised, and is all that is kept for the backward.

    Raises:
        ValueError, TypeError: as `layer_norm_jet`, and for a residual that is not like x.
    """
    _check("add_layer_norm_jet", x, residual, weight, bias, q)
    if not available("layer_norm_jet", x.device):
        return add_layer_norm_jet_reference(x, residual, weight, bias, eps, q)
    y, total, _, _ = torch.ops.jachess.layer_norm_jet(x, residual, weight, bias, eps, q)
    return y, total


# ---- registrations: fake kernels and autograd ----------------------------------------------


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    q: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[:-1], dtype=widened(x).dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x.new_empty(0) if residual is None else torch.empty_like(y)
    return y, total, statistics, torch.empty_like(statistics)


def _fake_backward(
    gy: Tensor,
    gsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    q: int,
    mean: Tensor,
    rstd: Tensor,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[-1] if need_weight else 0, dtype=mean.dtype)
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return gx, channels, torch.empty_like(channels)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, ctx.eps, ctx.q = inputs
    _, total, mean, rstd = output
    # The statistics are saved values, not results: a gradient in them would be dropped. An unused
    # sum has no gradient, and none must be made for it.
    ctx.mark_non_differentiable(mean, rstd, *((total,) if residual is None else ()))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.has_residual = residual is not None
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(
    ctx: Any, gy: Tensor | None, gsum: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if gy is None:  # only the sum was used
        return gsum, gsum if ctx.has_residual else None, None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    need_weight, need_bias = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
    gx, gweight, gbias = torch.ops.jachess.layer_norm_jet_backward(
        gy, gsum, x, weight, ctx.eps, ctx.q, mean, rstd, need_weight or need_bias
    )
    return (
        gx,
        gx if ctx.has_residual else None,
        gweight.to(weight.dtype) if need_weight else None,
        gbias.to(ctx.bias_dtype) if need_bias else None,
        None,
        None,
    )


def _save_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    gy, gsum, x, weight, ctx.eps, ctx.q, _, _, ctx.need_weight = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gy, x, weight)
    ctx.has_gsum = gsum is not None


def _backward_of_backward(
    ctx: Any, cot_x: Tensor | None, cot_weight: Tensor | None, cot_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    gy, x, weight = ctx.saved_tensors
    # The bias' own value does not enter any gradient; zeros stand in, so that gbias has its term.
    bias = torch.zeros(x.shape[-1], dtype=widened(x).dtype, device=x.device)
    scale = torch.ones_like(bias) if weight is None else weight
    cotangents = [cot_x, cot_weight, cot_bias] if ctx.need_weight else [cot_x, None, None]
    ggy, gx, gweight, _ = gradient_of_backward(
        lambda x, w, b: layer_norm_jet_reference(x, w, b, ctx.eps, ctx.q),
        [x, scale, bias],
        gy,
        cotangents,
    )
    ggsum = cot_x if ctx.has_gsum else None
    return ggy, ggsum, gx, None if weight is None else gweight, None, None, None, None, None


if loaded():
    torch.library.register_fake("jachess::layer_norm_jet", _fake)
    torch.library.register_fake("jachess::layer_norm_jet_backward", _fake_backward)
    torch.library.register_autograd("jachess::layer_norm_jet", _backward, setup_context=_save)
    torch.library.register_autograd(
        "jachess::layer_norm_jet_backward", _backward_of_backward, setup_context=_save_backward
    )
