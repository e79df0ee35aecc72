"""Softmax, its logarithm, and log-sum-exp (docs/how_it_works.md, softmax).

c_i = s_i − Σ p s_i are centred scores. Where a product of two tangents is summed, both are centred:
what they share would cancel only after it has been squared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ..layout import JetLayout
from ..registry import jet_rule
from ..tensor import JetTensor
from .pointwise import wide
from .streamwise import behind_streams, behind_streams_all, varargs, without_dimensions


def softmax_streams(streams: Tensor, layout: JetLayout, dim: int, masked: bool = False) -> Tensor:
    """Softmax of a stack along ``dim`` (negative).

    Rows whose scores are all −inf give NaN, as torch's softmax does; masked: zeros, as its
    attention does.
    """
    if dim == -1 and not layout.composed:
        return ops.softmax_jet(streams, layout.directions, masked)
    return ops.softmax_jet_reference(streams, layout.directions, masked, dim)


def _centred(streams: Tensor, primal: Tensor, dim: int, layout: JetLayout) -> Tensor:
    scores = streams[layout.first]
    return scores - (primal * scores).sum(dim, keepdim=True)


def _log_softmax_streams(streams: Tensor, layout: JetLayout, dim: int) -> Tensor:
    """l_i = c_i;  l_ij = s_ij − Σ p (c_i c_j + s_ij)."""
    logs = torch.log_softmax(streams[0], dim)
    probability = logs.exp()
    centred = _centred(streams, probability, dim, layout)
    second = []
    for i, j, ij in layout.pair_streams():
        change = probability * (centred[j - 1] * centred[i - 1] + streams[ij])
        second.append(streams[ij] - change.sum(dim, keepdim=True))
    return torch.cat([logs.unsqueeze(0), centred, *[s.unsqueeze(0) for s in second]])


def _from_the_right(dim: int, ndim: int) -> int:
    """A negative index means the same dimension with and without the streams in front.

    Raises:
        IndexError: as torch does, if there is no such dimension.
    """
    return behind_streams(dim, ndim) - 1 - ndim if dim >= 0 else behind_streams(dim, ndim)


def _wide(streams: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The stack in the asked dtype, halves in float32 for the statistics."""
    streams = streams if dtype is None else streams.to(dtype)
    return wide(streams)


OnStreams = Callable[[Tensor, JetLayout, int], Tensor]


def along(
    input: JetTensor, dim: int, dtype: torch.dtype | None, on_streams: OnStreams
) -> JetTensor:
    """``on_streams`` along one dimension of a jet, computed in float32 for halves."""
    if input.ndim == 0:  # one entry: torch takes dim 0 and -1
        return along(input[None], -1, dtype, on_streams)[0]  # type: ignore
    streams = _wide(input.streams, dtype)
    out = on_streams(streams, input.jet_layout, _from_the_right(dim, input.ndim))
    return input.with_streams(out.to(dtype or input.dtype))


def _register(name: str, on_streams: OnStreams) -> None:
    # torch.nn.functional alone has a warning's stack level for its third argument.
    @jet_rule(getattr(F, name))
    def functional(
        input: JetTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> JetTensor:
        return along(input, dim, dtype, on_streams)

    @jet_rule(*(getattr(space, name) for space in (torch, Tensor, torch.special)))
    def method(input: JetTensor, dim: int, dtype: torch.dtype | None = None) -> JetTensor:
        return along(input, dim, dtype, on_streams)


_register("softmax", softmax_streams)
_register("log_softmax", _log_softmax_streams)


@jet_rule("logsumexp")
@without_dimensions
def logsumexp(input: JetTensor, dim: Any, keepdim: bool = False) -> JetTensor:
    """l = log Σ exp s;  l_i = m_i = Σ p s_i;  l_ij = Σ p (s_ij + (s_i − m_i) (s_j − m_j))."""
    dims = behind_streams_all(varargs(dim) or range(input.ndim), input.ndim)
    streams, layout = _wide(input.streams, None), input.jet_layout
    logs = torch.logsumexp(streams[:1], dims, keepdim=True)
    probability = (streams[:1] - logs).exp()
    first = streams[layout.first]
    means = (probability * first).sum(dims, keepdim=True)
    centred = first - means
    second = []
    for i, j, ij in layout.pair_streams():
        products = streams[ij : ij + 1] + centred[i - 1 : i] * centred[j - 1 : j]
        second.append((probability * products).sum(dims, keepdim=True))
    out = torch.cat([logs, means, *second])
    return input.with_streams((out if keepdim else out.squeeze(dims)).to(input.dtype))
