"""Softmax, its logarithm, and log-sum-exp (spec 03, "softmax").

With centred scores c_i = s_i − Σ p s_i:   p_i = p c_i,
    p_ij = p_j c_i + p (s_ij − Σ (p_j s_i + p s_ij)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import JetLayout
from ..registry import jet_rule
from ..tensor import JetTensor


def softmax_streams(streams: Tensor, layout: JetLayout, dim: int) -> Tensor:
    """Softmax of a stack along ``dim`` (negative); float32 or float64.

    Rows whose scores are all −inf give zeros, as torch's attention does.
    """
    scores = streams[0]
    primal = torch.softmax(scores, dim)
    hidden = torch.isneginf(scores).all(dim, keepdim=True)
    if hidden.any():
        primal = primal.masked_fill(hidden, 0)
    centred = _centred(streams, primal, dim, layout)
    first = primal * centred
    if not layout.pairs:
        return torch.cat([primal.unsqueeze(0), first])
    second = []
    for i, j, ij in layout.pair_streams():
        change = first[j - 1] * streams[i] + primal * streams[ij]
        row = streams[ij] - change.sum(dim, keepdim=True)
        second.append(first[j - 1] * centred[i - 1] + primal * row)
    return torch.cat([primal.unsqueeze(0), first, torch.stack(second)])


def _centred(streams: Tensor, primal: Tensor, dim: int, layout: JetLayout) -> Tensor:
    scores = streams[layout.first]
    return scores - (primal * scores).sum(dim, keepdim=True)


def _log_softmax_streams(streams: Tensor, layout: JetLayout, dim: int) -> Tensor:
    """l_i = c_i;  l_ij = s_ij − Σ (p_j s_i + p s_ij)."""
    logs = torch.log_softmax(streams[0], dim)
    probability = logs.exp()
    centred = _centred(streams, probability, dim, layout)
    second = []
    for i, j, ij in layout.pair_streams():
        change = probability * (centred[j - 1] * streams[i] + streams[ij])
        second.append(streams[ij] - change.sum(dim, keepdim=True))
    return torch.cat([logs.unsqueeze(0), centred, *[s.unsqueeze(0) for s in second]])


def _from_the_right(dim: int, ndim: int) -> int:
    """A negative index means the same dimension with and without the streams in front."""
    return dim if dim < 0 else dim - ndim


def _wide(streams: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The stack in the asked dtype, halves in float32 for the statistics."""
    streams = streams if dtype is None else streams.to(dtype)
    return streams.float() if streams.dtype in (torch.float16, torch.bfloat16) else streams


def _register(name: str, on_streams: Callable[[Tensor, JetLayout, int], Tensor]) -> None:
    @jet_rule(name)
    def rule(
        input: JetTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> JetTensor:
        streams = _wide(input.streams, dtype)
        out = on_streams(streams, input.jet_layout, _from_the_right(dim, input.ndim))
        return input.with_streams(out.to(dtype or input.dtype))


_register("softmax", softmax_streams)
_register("log_softmax", _log_softmax_streams)


@jet_rule("logsumexp")
def logsumexp(input: JetTensor, dim: Any, keepdim: bool = False) -> JetTensor:
    """log Σ exp s = s − log_softmax(s), read off at the largest score."""
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    place = input.primal.argmax(dim, keepdim=True)
    out = torch.gather(input - F.log_softmax(input, dim), dim, place)
    return out if keepdim else out.squeeze(dim)  # type: ignore[return-value]
