"""Jets through layer norm and RMS norm, and the mean squares of a jet's streams.

With c = x − mean(x) (layer norm) or c = x (RMS norm), r = (mean(c_0²) + eps)^(−1/2), z = r c and
m = mean(z_0 z) of every stream (docs/how_it_works.md, norm):

    y_0 = z_0;   y_i = z_i − m_i z_0
    y_ij = z_ij − m_ij z_0 − m_i z_j − m_j z_i + (3 m_i m_j − mean(z_i z_j)) z_0

and the result is w · y, with the bias added to the primal.

The operators also accept a residual: they then normalise x + residual, and return the sum, too.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .library import (
    OPS,
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
    """Return the jet of c (mean c² + eps)^(−1/2) over the last dimension, without weight and bias.

    Args:
        x: a stacked jet [S, ..., D].
        streams: layout of x's streams; None: x is a primal only, S = 1.
        centred: True: c = x − mean(x) (layer norm); False: c = x (RMS norm).
    """
    streams = Streams(0, order=1) if streams is None else streams

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    # Split, not sliced: the gradient of each slice would be a full stack, padded with zeros.
    primal, tangents = (x - mean(x) if centred else x).split([1, len(x) - 1])
    # Divided first by a constant close to the root mean square, so that squares do not overflow.
    rough_rms = (mean(primal.detach().square()) + eps).sqrt()
    rough_rms = torch.where(rough_rms == 0, 1, rough_rms)
    # An overflowed variance gives NaN, as in torch's layer and group norm: with 0 a diverged model
    # would look finite.  An overflowed mean square gives 0 in torch's RMS norm, and so here.
    rough_rms = rough_rms.masked_fill(rough_rms.isinf(), math.nan if centred else 1)
    r = torch.rsqrt(mean((primal / rough_rms).square()) + eps / rough_rms / rough_rms) / rough_rms
    y, z = primal * r, tangents * r
    m = mean(y * z)
    parts = (z - m * y).split([streams.directions, streams.num_second])
    # y_ij = z_ij − m_ij z_0, the last of `parts`, plus the terms bilinear in first order: `crossed`
    # gives −m_i z_j − m_j z_i, and `curvature` is the factor of z_0.
    if streams.num_second:
        (slope, _), (first, _) = (t.split([streams.directions, streams.num_second]) for t in (m, z))
        curvature = 3 * streams.quadratic(slope, slope) - mean(streams.quadratic(first, first))
        parts = parts[0], parts[1] - streams.crossed(slope, first) + curvature * y
    return torch.cat([y, *parts])


def layer_norm_jet_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int, summed: int = 0
) -> Tensor:
    """Compute `layer_norm_jet` in pure torch, on any device."""
    return _LAYER_NORM.reference(x, None, (weight, bias), eps, q, summed)[0]


def rms_norm_jet_reference(
    x: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0
) -> Tensor:
    """Compute `rms_norm_jet` in pure torch, on any device."""
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
    """Compute `add_layer_norm_jet` in pure torch, on any device."""
    return _LAYER_NORM.reference(x, residual, (weight, bias), eps, q, summed)


def add_rms_norm_jet_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm_jet` in pure torch, on any device."""
    return _RMS_NORM.reference(x, residual, (weight,), eps, q, summed)


def layer_norm_jet(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, q: int, summed: int = 0
) -> Tensor:
    """Return the 2-jet of layer normalisation over the last dimension.

    Args:
        x: a stacked jet [S, ..., D].
        weight: [D] or None; may have another dtype than x. For x [S, ..., C, D] also [C, E], with a
            row for each of the C rows, as for the groups of a group norm, and an entry for each
            D / E neighbouring elements, as for the positions of its channels.
        bias: of weight's shape ([D] if that is None) or None, added to the primal only; may have
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
    """Add two 2-jets, and return the 2-jet of the sum's layer normalisation, in one pass.

    Args:
        residual: a stacked jet of x's shape, dtype and device.
        x, weight, bias, eps, q, summed: as for `layer_norm_jet`.

    Returns:
        norm(x + residual), and the sum x + residual, which a pre-norm model also needs, both
        [S, ..., D] of x's dtype.

    Examples:
        >>> x, residual = torch.tensor([[1.0, 3.0], [1.0, 1.0]]), torch.zeros(2, 2)
        >>> add_layer_norm_jet(x, residual, None, None, 0.0, 1)[0]
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """
    return _LAYER_NORM.push(x, residual, (weight, bias), eps, q, summed)


def rms_norm_jet(x: Tensor, weight: Tensor | None, eps: float, q: int, summed: int = 0) -> Tensor:
    """Return the 2-jet of RMS normalisation over the last dimension.

    Args:
        weight: as for `layer_norm_jet`. For a model that scales by 1 + w, as Gemma, pass 1 + w.
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
    """Add two 2-jets, and return the 2-jet of the sum's RMS normalisation, in one pass.

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
    """Compute `jet_mean_squares` in pure torch, on any device; `index` may have repeated
    entries."""
    check_shape("mask", mask, x.shape[1:-1])

    def mean_square(streams: Tensor) -> Tensor:
        if mask is not None:  # zero at masked tokens, even if they are NaN
            streams = streams.masked_fill(mask.logical_not().unsqueeze(-1), 0)
        return streams.square().mean(0)

    streams = streams_of(x, q)
    _, first, second = widened(x).split([1, q, streams.num_second])
    second = second if streams.num_second else first[:1, ..., :0]
    if index is not None and streams.num_second:
        second = second.index_select(-1, index)
    return mean_square(first).sum(-1), mean_square(second)


def jet_mean_squares(
    x: Tensor, q: int, mask: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return for each token the mean over directions of ‖x_i‖², and for each token and dimension
    the mean over pairs of x_ij².

    For directions of identity covariance their expectations are ‖J_t‖² and ‖H_{t,j}‖²
    (docs/how_it_works.md).

    Args:
        x: a stacked jet [S, ..., D].
        q: number of directions, 1 to 4.
        mask: bool [...], true at the tokens to include; at the others the results and gradients are
            zero, even if x is NaN. None: all tokens.
        index: int64 [n], distinct indices of the last dimension; None: all dimensions. Repeated or
            out-of-range indices raise an error on the CPU; on CUDA, where a check would wait for
            the GPU, they give NaN.

    Returns:
        [...] and [..., n] in fp32 (fp64 for fp64); n = 0 if x has no pairs.

    Examples:
        >>> jet_mean_squares(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 1)[0]
        tensor(25.)
    """
    if not available("jet_mean_squares", x.device):
        return jet_mean_squares_reference(x, q, mask, index)
    return OPS.jet_mean_squares(x, mask, index, q)


# ---- registration --------------------------------------------------------------------------


class _Norm:
    """Layer norm (centred; it also has a bias, and saves the mean) or RMS norm.

    The operators have these arguments and results, in this order; layer norm also has the ones in
    brackets:

        forward    x, residual, weight, [bias], eps, q, summed -> y, sum, [mean], rstd
        backward   gy, gsum, x, weight, eps, q, [mean], rstd, need_channels, summed
                   -> gx, gweight, [gbias]
    """

    def __init__(self, name: str, *, centred: bool) -> None:
        self.name, self.centred = name, centred
        self.parameters = 2 if centred else 1  # weight, bias; also the number of statistics
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
        """Return the norm of x + residual, and that sum, by the operator if it is available."""
        if not available(self.name, x.device, sums=summed > 0):
            return self.reference(x, residual, affine, eps, q, summed)
        operator, affine_and_eps = getattr(OPS, self.name), (*affine, eps)
        if residual is None:

            def run(x: Tensor, q: int) -> Tensor:
                return operator(x, None, *affine_and_eps, q, summed)[0]  # type: ignore[no-any-return]

            return in_passes(run, [x], q, any_number=True), x

        def run_sum(x: Tensor, residual: Tensor, q: int) -> tuple[Tensor, Tensor]:
            return operator(x, residual, *affine_and_eps, q, summed)[:2]  # type: ignore[no-any-return]

        return in_passes(run_sum, [x, residual], q, any_number=True)

    def reference(
        self, x: Tensor, residual: Tensor | None, affine: Affine, eps: float, q: int, summed: int
    ) -> tuple[Tensor, Tensor]:
        """Compute `push` in pure torch."""
        if residual is not None:
            check_shape("residual", residual, x.shape)
            x = x + residual
        weight, bias = (*affine, None)[:2]
        channels: Sequence[int] = x.shape[-1:]
        if weight is not None and weight.ndim == 2 and x.ndim > 2:
            # Weights [C, E], a row for each of the C rows, as in the compiled operators.
            fits = weight.shape[1] > 0 and x.shape[-1] % weight.shape[1] == 0
            channels = (x.shape[-2], weight.shape[1] if fits else x.shape[-1])
        y = normalised_jet(widened(x), eps, streams_of(x, q, summed), self.centred)
        check_shape("weight", weight, channels)
        check_shape("bias", bias, channels)
        repeats = x.shape[-1] // max(channels[-1], 1)
        scale, shift = (
            None if p is None else widened(p).to(y.dtype).repeat_interleave(repeats, -1)
            for p in (weight, bias)
        )
        if scale is not None:
            y = y * scale
        if shift is not None:
            y = torch.cat([y[:1] + shift, y[1:]])
        return y.to(x.dtype), x

    def _fake(self, x: Tensor, residual: Tensor | None, *_: object) -> tuple[Tensor, ...]:
        y = contiguous_like(x)
        total = x.new_empty(0) if residual is None else torch.empty_like(y)
        dtype = wide_dtype(x.dtype)
        return y, total, *(x.new_empty(x.shape[:-1], dtype=dtype) for _ in range(self.parameters))

    def _fake_backward(
        self, gy: Tensor, gsum: Tensor | None, x: Tensor, weight: Tensor | None, *settings: object
    ) -> tuple[Tensor, ...]:
        need_channels = settings[2 + self.parameters]  # after eps, q and the statistics
        shape = x.shape[-1:] if weight is None else weight.shape
        size = shape if need_channels else (0,)
        dtype = wide_dtype(x.dtype)
        return contiguous_like(x), *(x.new_empty(size, dtype=dtype) for _ in range(self.parameters))

    def _save(self, ctx: Context, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        x, residual, *affine, eps, q, summed = inputs
        _, total, *statistics = output
        # Statistics are saved values, through which no gradient flows. The gradient of an unused
        # sum stays None.
        ctx.mark_non_differentiable(*statistics, *((total,) if residual is None else ()))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else total, affine[0], *statistics)
        dtypes = [None if parameter is None else parameter.dtype for parameter in affine]
        ctx.constants = eps, q, summed, residual is not None, dtypes

    def _backward(
        self, ctx: Context, gy: Tensor | None, gsum: Tensor | None, *_: object
    ) -> Gradients:
        eps, q, summed, has_residual, dtypes = ctx.constants
        needs_grads = ctx.needs_input_grad[2 : 2 + self.parameters]
        if gy is None:  # only the sum was used
            gx, channels = gsum, [None] * self.parameters
        else:
            x, weight, *statistics = ctx.saved_tensors
            operator = getattr(OPS, f"{self.name}_backward")
            gx, *sums = operator(gy, gsum, x, weight, eps, q, *statistics, any(needs_grads), summed)
            channels = [
                g.to(dtype) if need else None
                for g, dtype, need in zip(sums, dtypes, needs_grads, strict=True)
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
        # No gradient depends on the bias: zeros are used for it.
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
    num_columns = x.shape[-1] if index is None else index.shape[0]
    num_columns = 0 if x.shape[0] == 1 + q else num_columns
    token_means = x.new_empty(x.shape[1:-1], dtype=wide_dtype(x.dtype))
    return token_means, token_means.new_empty((*token_means.shape, num_columns))


register_operator(
    "jet_mean_squares",
    lambda x, mask, index, q: jet_mean_squares_reference(x, q, mask, index),
    tensors=3,
    fake=_fake_squares,
)
