"""Jets through layer norm and RMS norm, and the mean squares of a jet's streams.

With c = x − mean(x) (layer norm) or c = x (RMS norm), r = (mean(c_0²) + eps)^(−1/2), z = r c and
m = mean(z_0 z) of every stream (docs/how_it_works.md, norm):

    y_0 = z_0;   y_i = z_i − m_i z_0
    y_ij = z_ij − m_ij z_0 − m_i z_j − m_j z_i + (3 m_i m_j − mean(z_i z_j)) z_0

and w · y (+ bias on the primal).

The operators also take a residual: they then normalise x + residual and return the sum, too.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .library import (
    Context,
    Gradients,
    Streams,
    available,
    check_shape,
    contiguous_like,
    gradient_of_backward,
    in_passes,
    register,
    register_operator,
    streams_of,
    wide_dtype,
    widened,
)

Affine: TypeAlias = Sequence[Tensor | None]
"""Weight, and layer norm's bias."""


def normalised_jet(x: Tensor, eps: float, streams: Streams | None, centred: bool) -> Tensor:
    """Return the stack of c (mean c² + eps)^(−1/2) over the last dimension, without parameters.

    Args:
        x: [S, ..., D].
        streams: what x holds; None: a primal alone.
        centred: c = x − mean(x) (layer norm); else c = x (RMS norm).
    """
    streams = Streams(0, order=1) if streams is None else streams

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    # Split, not sliced: the gradient of a slice fills a stack with zeros.
    primal, tangents = (x - mean(x) if centred else x).split([1, len(x) - 1])
    # Divided by a constant close to the root first, so that its square does not overflow.
    near = (mean(primal.detach().square()) + eps).sqrt()
    near = torch.where(near == 0, 1, near)
    # A variance that has overflowed gives NaN, as torch's layer and group norm do: with 0 a
    # diverged model would look finite.  Of a mean square torch's RMS norm makes 0.
    near = near.masked_fill(near.isinf(), math.nan if centred else 1)
    r = torch.rsqrt(mean((primal / near).square()) + eps / near / near) / near
    y, z = primal * r, tangents * r
    m = mean(y * z)
    parts = (z - m * y).split([streams.directions, streams.seconds])
    # y_ij = z_ij − m_ij z_0, the last of `parts`, and what is bilinear in first order: −m_i z_j −
    # m_j z_i is `crossed`, and `bent` stands before z_0.
    if streams.seconds:
        (slope, _), (first, _) = (t.split([streams.directions, streams.seconds]) for t in (m, z))
        bent = 3 * streams.quadratic(slope, slope) - mean(streams.quadratic(first, first))
        parts = parts[0], parts[1] - streams.crossed(slope, first) + bent * y
    return torch.cat([y, *parts])


def layer_norm_jet_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int, summed: int = 0
) -> Tensor:
    """Push a jet as `layer_norm_jet`, in pure torch, on any device."""
    return _LAYER_NORM.reference(x, None, (weight, bias), eps, q, summed)[0]


def rms_norm_jet_reference(
    x: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0
) -> Tensor:
    """Push a jet as `rms_norm_jet`, in pure torch, on any device."""
    return _RMS_NORM.reference(x, None, (weight,), eps, q, summed)[0]


def add_layer_norm_jet_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    q: int,
    summed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Push jets as `add_layer_norm_jet`, in pure torch, on any device."""
    return _LAYER_NORM.reference(x, residual, (weight, bias), eps, q, summed)


def add_rms_norm_jet_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0
) -> tuple[Tensor, Tensor]:
    """Push jets as `add_rms_norm_jet`, in pure torch, on any device."""
    return _RMS_NORM.reference(x, residual, (weight,), eps, q, summed)


def layer_norm_jet(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int, summed: int = 0
) -> Tensor:
    """Push a 2-jet through layer normalisation over the last dimension.

    Args:
        x: a stacked jet [S, ..., D].
        weight: [D] or None; may have another dtype than x. Or [C, D] of x [S, ..., C, D], every row
            of which has its own, as the groups of a group norm.
        bias: of weight's shape ([D] without one) or None, added to the primal only; may have
            another dtype than x.
        eps: added to the variance.
        q, summed: as for `activation_jet`.

    Returns:
        [S, ..., D] of x's dtype.

    Examples:
        >>> x = torch.tensor([[1.0, 3.0], [1.0, 1.0]])  # x_1 shifts x_0: no effect
        >>> layer_norm_jet(x, None, None, 0.0, 1)
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """
    return _LAYER_NORM.push(x, None, (weight, bias), eps, q, summed)[0]


def add_layer_norm_jet(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    q: int,
    summed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Add two 2-jets and push the sum through layer normalisation, in one pass.

    Args:
        residual: a stacked jet of x's shape, dtype and device.
        x, weight, bias, eps, q, summed: as for `layer_norm_jet`.

    Returns:
        norm(x + residual), and the sum x + residual that a pre-norm model goes on with, both
        [S, ..., D] of x's dtype.

    Examples:
        >>> x, residual = torch.tensor([[1.0, 3.0], [1.0, 1.0]]), torch.zeros(2, 2)
        >>> add_layer_norm_jet(x, residual, None, None, 0.0, 1)[0]
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """
    return _LAYER_NORM.push(x, residual, (weight, bias), eps, q, summed)


def rms_norm_jet(x: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0) -> Tensor:
    """Push a 2-jet through RMS normalisation over the last dimension.

    Args:
        weight: as for `layer_norm_jet`. Where a model scales by 1 + w, as Gemma does, give 1 + w.
        eps: added to the mean square.
        x, q, summed: as for `layer_norm_jet`.

    Returns:
        [S, ..., D] of x's dtype.

    Examples:
        >>> x = torch.tensor([[2.0, 2.0], [1.0, 1.0]])  # x_1 scales x_0: no effect
        >>> rms_norm_jet(x, None, 0.0, 1)
        tensor([[1., 1.],
                [0., 0.]])
    """
    return _RMS_NORM.push(x, None, (weight,), eps, q, summed)[0]


def add_rms_norm_jet(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0
) -> tuple[Tensor, Tensor]:
    """Add two 2-jets and push the sum through RMS normalisation, in one pass.

    Arguments and results are those of `add_layer_norm_jet`, without a bias.

    Examples:
        >>> x = torch.ones(2, 3)
        >>> add_rms_norm_jet(x, x, None, 0.0, 1)[1]
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    return _RMS_NORM.push(x, residual, (weight,), eps, q, summed)


# ---- mean squares --------------------------------------------------------------------------


def jet_mean_squares_reference(
    x: Tensor, q: int, mask: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum as `jet_mean_squares`, in pure torch, on any device; `index` may repeat numbers."""
    check_shape("mask", mask, x.shape[1:-1])

    def mean_square(streams: Tensor) -> Tensor:
        if mask is not None:  # zero at masked tokens, whatever stood there
            streams = streams.masked_fill(mask.logical_not().unsqueeze(-1), 0)
        return streams.square().mean(0)

    streams = streams_of(x, q)
    _, first, second = widened(x).split([1, q, streams.seconds])
    second = second if streams.seconds else first[:1, ..., :0]
    if index is not None and streams.seconds:
        second = second.index_select(-1, index)
    return mean_square(first).sum(-1), mean_square(second)


def jet_mean_squares(
    x: Tensor, q: int, mask: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return per token the mean over directions of ‖x_i‖², and over pairs of x_ij² by dimension.

    Along directions of identity covariance their expectations are ‖J_t‖² and ‖H_{t,j}‖²
    (docs/how_it_works.md).

    Args:
        x: a stacked jet [S, ..., D].
        q: number of directions, 1 to 4.
        mask: bool [...], true where a token counts; elsewhere result and gradient are zero whatever
            x holds. None: every token counts.
        index: int64 [n], distinct indices of the last dimension; None: all of them. The CPU refuses
            repeated or impossible indices; CUDA, where looking would mean waiting, gives NaN.

    Returns:
        [...] and [..., n] in fp32 (fp64 for fp64); n = 0 where x has no pairs.

    Examples:
        >>> jet_mean_squares(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 1)[0]
        tensor(25.)
    """
    if not available("jet_mean_squares", x.device):
        return jet_mean_squares_reference(x, q, mask, index)
    return torch.ops.jachess.jet_mean_squares(x, mask, index, q)


# ---- registration --------------------------------------------------------------------------


class _Norm:
    """Layer norm (centred), which also has a bias and keeps the mean, or RMS norm.

    The operators' arguments and results in order, those in brackets of layer norm alone:

        forward    x, residual, weight, [bias], eps, q, summed -> y, sum, [mean], rstd
        backward   gy, gsum, x, weight, eps, q, [mean], rstd, need_channels, summed
                   -> gx, gweight, [gbias]
    """

    def __init__(self, name: str, *, centred: bool) -> None:
        self.name, self.centred = name, centred
        self.parameters = 2 if centred else 1  # weight, bias; there are as many statistics
        register(
            name,
            fake=self._fake,
            fake_backward=self._fake_backward,
            save=self._save,
            backward=self._backward,
            save_backward=self._save_backward,
            double_backward=self._double_backward,
        )

    def push(
        self, x: Tensor, residual: Tensor | None, affine: Affine, eps: float, q: int, summed: int
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum, by the operator where there is one."""
        if not available(self.name, x.device, sums=summed > 0):
            return self.reference(x, residual, affine, eps, q, summed)
        operator, settings = getattr(torch.ops.jachess, self.name), (*affine, eps)
        if residual is None:

            def run(x: Tensor, q: int) -> Tensor:
                return operator(x, None, *settings, q, summed)[0]  # type: ignore[no-any-return]

            return in_passes(run, [x], q, any_number=True), x

        def run_sum(x: Tensor, residual: Tensor, q: int) -> tuple[Tensor, Tensor]:
            return operator(x, residual, *settings, q, summed)[:2]  # type: ignore[no-any-return]

        return in_passes(run_sum, [x, residual], q, any_number=True)

    def reference(
        self, x: Tensor, residual: Tensor | None, affine: Affine, eps: float, q: int, summed: int
    ) -> tuple[Tensor, Tensor]:
        """Return what `push` does, in pure torch."""
        if residual is not None:
            check_shape("residual", residual, x.shape)
            x = x + residual
        weight, bias = (*affine, None)[:2]
        # A weight for each row of a sample, as of the compiled operators.
        by_row = weight is not None and weight.ndim == 2 and x.ndim > 2
        channels = x.shape[-2:] if by_row else x.shape[-1:]
        y = normalised_jet(widened(x), eps, streams_of(x, q, summed), self.centred)
        check_shape("weight", weight, channels)
        check_shape("bias", bias, channels)
        if weight is not None:
            y = y * widened(weight).to(y.dtype)
        if bias is not None:
            y = torch.cat([y[:1] + widened(bias).to(y.dtype), y[1:]])
        return y.to(x.dtype), x

    def _fake(self, x: Tensor, residual: Tensor | None, *_: object) -> tuple[Tensor, ...]:
        y = contiguous_like(x)
        total = x.new_empty(0) if residual is None else torch.empty_like(y)
        dtype = wide_dtype(x.dtype)
        return y, total, *(x.new_empty(x.shape[:-1], dtype=dtype) for _ in range(self.parameters))

    def _fake_backward(
        self, gy: Tensor, gsum: Tensor | None, x: Tensor, weight: Tensor | None, *settings: object
    ) -> tuple[Tensor, ...]:
        need_channels = settings[2 + self.parameters]  # behind eps, q and the statistics
        shape = x.shape[-1:] if weight is None else weight.shape
        size = shape if need_channels else (0,)
        dtype = wide_dtype(x.dtype)
        return contiguous_like(x), *(x.new_empty(size, dtype=dtype) for _ in range(self.parameters))

    def _save(self, ctx: Context, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        x, residual, *affine, eps, q, summed = inputs
        _, total, *statistics = output
        # Statistics are saved values: a gradient in them would be dropped. That of an unused sum
        # stays None.
        ctx.mark_non_differentiable(*statistics, *((total,) if residual is None else ()))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else total, affine[0], *statistics)
        dtypes = [None if parameter is None else parameter.dtype for parameter in affine]
        ctx.constants = eps, q, summed, residual is not None, dtypes

    def _backward(
        self, ctx: Context, gy: Tensor | None, gsum: Tensor | None, *_: object
    ) -> Gradients:
        eps, q, summed, has_residual, dtypes = ctx.constants
        needed = ctx.needs_input_grad[2 : 2 + self.parameters]
        if gy is None:  # only the sum was used
            gx, channels = gsum, [None] * self.parameters
        else:
            x, weight, *statistics = ctx.saved_tensors
            operator = getattr(torch.ops.jachess, f"{self.name}_backward")
            gx, *sums = operator(gy, gsum, x, weight, eps, q, *statistics, any(needed), summed)
            channels = [
                g.to(dtype) if need else None
                for g, dtype, need in zip(sums, dtypes, needed, strict=True)
            ]
        return gx, gx if has_residual else None, *channels, None, None, None

    def _save_backward(self, ctx: Context, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        gy, gsum, x, weight, eps, q, *_, need_channels, summed = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gy, x, weight)
        ctx.constants = eps, q, summed, need_channels, gsum is not None

    def _double_backward(
        self, ctx: Context, cot_x: Tensor | None, *cot_channels: Tensor | None
    ) -> Gradients:
        gy, x, weight = ctx.saved_tensors
        eps, q, summed, need_channels, has_gsum = ctx.constants
        # No gradient depends on the bias; zeros stand in for it.
        ones = x.new_ones(x.shape[-1], dtype=wide_dtype(x.dtype))
        scale = ones if weight is None else weight
        affine = [scale, torch.zeros_like(scale, dtype=ones.dtype)][: self.parameters]

        def forward(x: Tensor, *affine: Tensor) -> Tensor:
            return self.reference(x, None, affine, eps, q, summed)[0]

        cotangents = cot_channels if need_channels else [None] * self.parameters
        ggy, gx, gweight, *_ = gradient_of_backward(
            forward, [x, *affine], [gy], [cot_x, *cotangents]
        )
        gweight = None if weight is None else gweight
        ggsum = cot_x if has_gsum else None  # the backward adds gsum to gx
        return ggy, ggsum, gx, gweight, *([None] * (4 + self.parameters))


_LAYER_NORM = _Norm("layer_norm_jet", centred=True)
_RMS_NORM = _Norm("rms_norm_jet", centred=False)


def _fake_squares(
    x: Tensor, mask: Tensor | None, index: Tensor | None, q: int
) -> tuple[Tensor, Tensor]:
    chosen = x.shape[-1] if index is None else index.shape[0]
    chosen = 0 if x.shape[0] == 1 + q else chosen
    first = x.new_empty(x.shape[1:-1], dtype=wide_dtype(x.dtype))
    return first, first.new_empty((*first.shape, chosen))


register_operator(
    "jet_mean_squares",
    lambda x, mask, index, q: jet_mean_squares_reference(x, q, mask, index),
    tensors=3,
    fake=_fake_squares,
)
