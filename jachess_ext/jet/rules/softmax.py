"""Softmax, its logarithm, and log-sum-exp (docs/how_it_works.md, softmax).

s are the scores, p the probabilities, and c_i = s_i − Σ p s_i the centred tangents of the scores.
Products of two tangents use the centred ones, since a common shift would be squared before it
cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import ops
from ...ops.softmax import softmax_stack
from ...torch_private import functional as F
from ..engine.layout import JetLayout
from ..engine.registry import jet_rule
from ..engine.tensor import JetTensor
from .pointwise import wide
from .streamwise import accept_scalars, stack_dim, stack_dims, varargs


def softmax_streams(streams: Tensor, layout: JetLayout, dim: int, masked: bool = False) -> Tensor:
    """Return the streams of the softmax along ``dim``, a negative index.

    If all scores of a row are −inf, its softmax is NaN, as in torch's softmax; if ``masked``, it
    is 0, as in torch's attention.
    """
    # The operator covers only the last dimension.
    if dim == -1 and not layout.composed and layout.has_operators:
        return ops.softmax_jet(streams, layout.directions, masked, layout.squares)
    return softmax_stack(streams, layout, masked, dim)


def _log_softmax_streams(streams: Tensor, layout: JetLayout, dim: int) -> Tensor:
    """Return the streams of l = ln p along ``dim``: l_i = c_i;
    l_ij = s_ij − Σ p (c_i c_j + s_ij)."""
    logs = torch.log_softmax(streams[0], dim)
    probability = logs.exp()
    scores, second = streams[layout.first], streams[layout.second]
    centred = scores - (probability * scores).sum(dim, keepdim=True)
    if layout.num_second:
        # Σ p c_i c_j is the covariance of s_i and s_j under p, Σ p s_ij the mean of s_ij.
        terms = probability * (layout.quadratic(centred, centred) + second)
        second = second - terms.sum(dim, keepdim=True)
    return torch.cat([logs.unsqueeze(0), centred, second])


def _negative_dim(dim: int, ndim: int) -> int:
    """Return a dimension as a negative index, which is the same for the primal and the stack.

    Raises:
        IndexError: ``dim`` is outside ``[-ndim, ndim)``.
    """
    return stack_dim(dim, ndim) - 1 - ndim if dim >= 0 else stack_dim(dim, ndim)


StreamFunction = Callable[[Tensor, JetLayout, int], Tensor]
"""Maps the stack ``[S, ...]`` of a jet, its layout and a negative dimension to the stack of the
result."""


@accept_scalars
def softmax_along(
    input: JetTensor, dim: int, dtype: torch.dtype | None, stream_function: StreamFunction
) -> JetTensor:
    """Apply ``stream_function`` along one dimension of a jet, in float32 for 16-bit dtypes."""
    streams = input.streams if dtype is None else input.streams.to(dtype)
    out = stream_function(wide(streams), input.jet_layout, _negative_dim(dim, input.ndim))
    return input.with_streams(out.to(dtype or input.dtype))


def register_softmax(name: str, stream_function: StreamFunction) -> None:
    """Register the spellings of ``softmax`` or ``log_softmax``."""

    # In torch.nn.functional the third argument is a stack level for a warning; elsewhere the dtype.
    @jet_rule(getattr(F, name))
    def functional(
        input: JetTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> JetTensor:
        return softmax_along(input, dim, dtype, stream_function)

    @jet_rule(*(getattr(space, name) for space in (torch, Tensor, torch.special)))
    def method(input: JetTensor, dim: int, dtype: torch.dtype | None = None) -> JetTensor:
        return softmax_along(input, dim, dtype, stream_function)


register_softmax("softmax", softmax_streams)
register_softmax("log_softmax", _log_softmax_streams)


@jet_rule("logsumexp")
@accept_scalars
def logsumexp(input: JetTensor, dim: int | Sequence[int], keepdim: bool = False) -> JetTensor:
    """Compute l = ln Σ exp s: l_i = m_i with the means m_i = Σ p s_i;
    l_ij = Σ p (s_ij + (s_i − m_i) (s_j − m_j))."""
    dims = stack_dims(varargs(dim) or range(input.ndim), input.ndim)
    streams, layout = wide(input.streams), input.jet_layout
    logs = torch.logsumexp(streams[:1], dims, keepdim=True)
    # Not exp(s − l): if scores are large, rounding of l loses the logarithm of their number.
    scores = streams[:1].detach()
    largest = (scores.real if scores.is_complex() else scores).amax(dims, keepdim=True)
    exponentials = (streams[:1] - largest.masked_fill(largest.isinf(), 0)).exp()
    probability = exponentials / exponentials.sum(dims, keepdim=True)
    first = streams[layout.first]
    means = (probability * first).sum(dims, keepdim=True)
    centred = first - means
    results = [logs, means]
    if layout.num_second:
        products = streams[layout.second] + layout.quadratic(centred, centred)
        results.append((probability * products).sum(dims, keepdim=True))
    out = torch.cat(results)
    return input.with_streams((out if keepdim else out.squeeze(dims)).to(input.dtype))
