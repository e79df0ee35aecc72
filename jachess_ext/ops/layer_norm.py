"""Jets through layer normalisation: face, pure-torch twin, fake kernels and autograd of
`jachess::layer_norm_jet`.

Signature: [S, ..., D], weight [D]?, bias [D]?, eps, q -> [S, ..., D], with S = 1 + q (first order)
or 1 + q + q(q-1)/2 streams. With c = x − mean(x), v = mean(c²) and v^ = v_0 + eps (spec 03, norm):

    r_0 = v^(−1/2);   r_i = −½ r v_i/v^;   r_ij = −½ r v_ij/v^ + ¾ r v_i v_j/v^²
    y = w · c · r (+ bias on the primal), its streams by Leibniz' rule
"""

from typing import Any

import torch
from torch import Tensor

from .checks import check_channels, check_jet, widened
from .double_backward import gradient_of_backward
from .jet_formulas import mean_square_jet, product_jet, rsqrt_jet
from .library import available, loaded


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, q: int) -> None:
    check_jet("layer_norm_jet", x, q)
    if x.dim() < 2:
        raise ValueError(
            f"layer_norm_jet: x has shape {list(x.shape)}; expected [S, ..., D], streams in front "
            "and the normalised dimension last."
        )
    check_channels("layer_norm_jet", "weight", weight, x)
    check_channels("layer_norm_jet", "bias", bias, x)


def layer_norm_jet_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> Tensor:
    """Pure-torch twin of `layer_norm_jet`: any device, any number of backward passes.

    Args, returns and raises: as `layer_norm_jet`. 16-bit types are computed in fp32.
    """
    _check(x, weight, bias, q)
    wide = widened(x)
    c = list((wide - wide.mean(-1, keepdim=True)).unbind(0))
    y = torch.stack(product_jet(c, rsqrt_jet(mean_square_jet(c, q), eps, q), q))
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = torch.cat([y[:1] + bias.to(wide.dtype), y[1:]])
    return y.to(x.dtype)


def layer_norm_jet(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> Tensor:
    """Push a 2-jet through layer normalisation over the last dimension (spec 03, norm).

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
    _check(x, weight, bias, q)
    if not available("layer_norm_jet", x.device):
        return layer_norm_jet_reference(x, weight, bias, eps, q)
    return torch.ops.jachess.layer_norm_jet(x, weight, bias, eps, q)[0]


# ---- registrations: fake kernels and autograd ----------------------------------------------


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[:-1], dtype=widened(x).dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, statistics, torch.empty_like(statistics)


def _fake_backward(
    gy: Tensor,
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps, ctx.q = inputs
    _, mean, rstd = output
    # The statistics are saved values, not results: a gradient in them would be dropped.
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, gy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    need_weight, need_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    gx, gweight, gbias = torch.ops.jachess.layer_norm_jet_backward(
        gy, x, weight, ctx.eps, ctx.q, mean, rstd, need_weight or need_bias
    )
    return (
        gx,
        gweight.to(weight.dtype) if need_weight else None,
        gbias.to(ctx.bias_dtype) if need_bias else None,
        None,
        None,
    )


def _save_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    gy, x, weight, ctx.eps, ctx.q, _, _, ctx.need_weight = inputs
    ctx.save_for_backward(gy, x, weight)


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
    return ggy, gx, None if weight is None else gweight, None, None, None, None, None


if loaded():
    torch.library.register_fake("jachess::layer_norm_jet", _fake)
    torch.library.register_fake("jachess::layer_norm_jet_backward", _fake_backward)
    torch.library.register_autograd("jachess::layer_norm_jet", _backward, setup_context=_save)
    torch.library.register_autograd(
        "jachess::layer_norm_jet_backward", _backward_of_backward, setup_context=_save_backward
    )
