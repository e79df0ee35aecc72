"""Jets through layer and root-mean-square normalisation: wrappers, pure-torch references, fake
kernels and autograd of `jachess::layer_norm_jet` and `jachess::rms_norm_jet`.

Signature: [S, ..., D], weight [D]?, bias [D]? (layer norm only), eps, q -> [S, ..., D], with
S = 1 + q (first order) or 1 + q + q(q-1)/2 streams; with a residual, x + residual is normalised and
returned, too. With c = x − mean(x) (layer norm) or c = x (RMS norm), v = mean(c²), v^ = v_0 + eps
(docs/how_it_works.md, norm):

    r_0 = v^(−1/2);   r_i = −½ r v_i/v^;   r_ij = −½ r v_ij/v^ + ¾ r v_i v_j/v^²
    y = w · c · r (+ bias on the primal), its streams by Leibniz' rule
"""

from typing import Any

import torch
from torch import Tensor

from .checks import check_channels, check_jet, check_same, widened
from .jet_formulas import mean_square_jet, product_jet, rsqrt_jet
from .library import available
from .registration import contiguous_like, gradient_of_backward, register


def _check(op: str, x: Tensor, residual: Tensor | None, q: int, **channels: Tensor | None) -> None:
    """`channels`: weight and, of a layer norm, bias."""
    check_jet(op, x, q, last="the normalised dimension")
    if residual is not None:
        check_same(op, "residual", residual, x)
    for name, parameter in channels.items():
        check_channels(op, name, parameter, x)


def _reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int, centred: bool
) -> Tensor:
    wide = widened(x)
    c = list((wide - wide.mean(-1, keepdim=True) if centred else wide).unbind(0))
    y = torch.stack(product_jet(c, rsqrt_jet(mean_square_jet(c, q), eps, q), q))
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = torch.cat([y[:1] + bias.to(wide.dtype), y[1:]])
    return y.to(x.dtype)


def layer_norm_jet_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> Tensor:
    """Pure-torch reference of `layer_norm_jet`: any device, any number of backward passes.

    Args, returns and raises: as `layer_norm_jet`. 16-bit types are computed in fp32.
    """
    _check("layer_norm_jet", x, None, q, weight=weight, bias=bias)
    return _reference(x, weight, bias, eps, q, centred=True)


def rms_norm_jet_reference(x: Tensor, weight: Tensor | None, eps: float, q: int) -> Tensor:
    """Pure-torch reference of `rms_norm_jet`: any device, any number of backward passes.

    Args, returns and raises: as `rms_norm_jet`. 16-bit types are computed in fp32.
    """
    _check("rms_norm_jet", x, None, q, weight=weight)
    return _reference(x, weight, None, eps, q, centred=False)


def add_layer_norm_jet_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor]:
    """Pure-torch reference of `add_layer_norm_jet`.

    Args, returns and raises: as `add_layer_norm_jet`.
    """
    _check("add_layer_norm_jet", x, residual, q, weight=weight, bias=bias)
    total = x + residual
    return _reference(total, weight, bias, eps, q, centred=True), total


def add_rms_norm_jet_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, q: int
) -> tuple[Tensor, Tensor]:
    """Pure-torch reference of `add_rms_norm_jet`.

    Args, returns and raises: as `add_rms_norm_jet`.
    """
    _check("add_rms_norm_jet", x, residual, q, weight=weight)
    total = x + residual
    return _reference(total, weight, None, eps, q, centred=False), total


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
        no compiled kernel serves x's device, the pure-torch reference is used.

    Raises:
        ValueError: q outside 1..4, S that does not match q, or a weight or bias that is not [D]
            on x's device.
        TypeError: a dtype other than the four.
    """
    _check("layer_norm_jet", x, None, q, weight=weight, bias=bias)
    if not available("layer_norm_jet", x.device):
        return _reference(x, weight, bias, eps, q, centred=True)
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
    _check("add_layer_norm_jet", x, residual, q, weight=weight, bias=bias)
    if not available("layer_norm_jet", x.device):
        return add_layer_norm_jet_reference(x, residual, weight, bias, eps, q)
    y, total, _, _ = torch.ops.jachess.layer_norm_jet(x, residual, weight, bias, eps, q)
    return y, total


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
        compiled kernel serves x's device, the pure-torch reference is used.

    Raises:
        ValueError: q outside 1..4, S that does not match q, or a weight that is not [D] on x's
            device.
        TypeError: a dtype other than the four.
    """
    _check("rms_norm_jet", x, None, q, weight=weight)
    if not available("rms_norm_jet", x.device):
        return _reference(x, weight, None, eps, q, centred=False)
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
    _check("add_rms_norm_jet", x, residual, q, weight=weight)
    if not available("rms_norm_jet", x.device):
        return add_rms_norm_jet_reference(x, residual, weight, eps, q)
    y, total, _ = torch.ops.jachess.rms_norm_jet(x, residual, weight, eps, q)
    return y, total


# ---- registrations: fake kernels and autograd ----------------------------------------------


def _register(centred: bool) -> None:
    """Of either operator: a layer norm has a bias and keeps the mean, too."""
    name = "layer_norm_jet" if centred else "rms_norm_jet"
    parameters = 2 if centred else 1  # weight, bias; also of the statistics mean, 1 / deviation

    def fake(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
        y = contiguous_like(x)
        total = x.new_empty(0) if residual is None else torch.empty_like(y)
        dtype = widened(x).dtype
        return y, total, *(x.new_empty(x.shape[:-1], dtype=dtype) for _ in range(parameters))

    def fake_backward(
        gy: Tensor, gsum: Tensor | None, x: Tensor, weight: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        size = x.shape[-1] if rest[-1] else 0
        dtype = widened(x).dtype
        return contiguous_like(x), *(x.new_empty(size, dtype=dtype) for _ in range(parameters))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, *given, ctx.eps, ctx.q = inputs
        _, total, *statistics = output
        # The statistics are saved values, not results: a gradient in them would be dropped. An
        # unused sum has no gradient, and none must be made for it.
        ctx.mark_non_differentiable(*statistics, *((total,) if residual is None else ()))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else total, given[0], *statistics)
        ctx.has_residual = residual is not None
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in given]

    def backward(
        ctx: Any, gy: Tensor | None, gsum: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2 : 2 + parameters]
        if gy is None:  # only the sum was used
            gx, channels = gsum, [None] * parameters
        else:
            x, weight, *statistics = ctx.saved_tensors
            operator = getattr(torch.ops.jachess, f"{name}_backward")
            gx, *found = operator(gy, gsum, x, weight, ctx.eps, ctx.q, *statistics, any(needed))
            channels = [
                g.to(dtype) if need else None
                for g, dtype, need in zip(found, ctx.dtypes, needed, strict=True)
            ]
        return gx, gx if ctx.has_residual else None, *channels, None, None

    def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        gy, gsum, x, weight, ctx.eps, ctx.q, *_, ctx.need_channels = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gy, x, weight)
        ctx.has_gsum = gsum is not None

    def double_backward(
        ctx: Any, cot_x: Tensor | None, *cot_channels: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gy, x, weight = ctx.saved_tensors
        # The bias' own value does not enter any gradient; zeros stand in, so that its gradient has
        # its term.
        ones = x.new_ones(x.shape[-1], dtype=widened(x).dtype)
        given = [ones if weight is None else weight, torch.zeros_like(ones)][:parameters]

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return _reference(x, weight, bias, ctx.eps, ctx.q, centred)

        cotangents = cot_channels if ctx.need_channels else [None] * parameters
        ggy, gx, gweight, *_ = gradient_of_backward(
            forward, [x, *given], [gy], [cot_x, *cotangents]
        )
        gweight = None if weight is None else gweight
        ggsum = cot_x if ctx.has_gsum else None
        return ggy, ggsum, gx, gweight, *([None] * (3 + parameters))

    register(
        name,
        fake=fake,
        fake_backward=fake_backward,
        save=save,
        backward=backward,
        save_backward=save_backward,
        double_backward=double_backward,
    )


_register(centred=True)
_register(centred=False)
