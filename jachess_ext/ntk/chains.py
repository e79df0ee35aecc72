"""Outputs without a dimension of samples that are given one later: T5's relative position bias is
an embedding [T, T, heads], permuted, then put in front of every sample by ``unsqueeze(0)``.

The call's output is followed through operations that only move numbers.  Where a first dimension of
size 1 appears, it is expanded to one row a sample, so that cotangents stay apart; they are carried
back to the call's output through the same operations' own backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .calls import Call

FOLLOWED = ("linear", "embedding")  # kinds of calls
_MOVES = {
    Tensor.permute,
    Tensor.transpose,
    Tensor.contiguous,
    Tensor.view,
    Tensor.reshape,
    torch.permute,
    torch.transpose,
}
_INSERTS = {Tensor.unsqueeze, torch.unsqueeze}


@dataclass
class _Link:
    tensor: Tensor  # held, so that its id stays its own
    call: Call
    start: GradientEdge


class Chains:
    """The open chains of one forward pass."""

    def __init__(self) -> None:
        self._open: dict[int, _Link] = {}
        self._waiting: dict[int, Call] = {}

    def start(self, call: Call, output: Tensor) -> None:
        """Follow a call's output."""
        self._open[id(output)] = _Link(output, call, get_gradient_edge(output))
        self._waiting[id(call)] = call

    def unfinished(self) -> list[Call]:
        """Calls whose output never got a dimension of samples."""
        return list(self._waiting.values())

    def follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> tuple[Call | None, Call | None]:
        """(a call whose chain ends here with one row a sample, a call that must be given up)."""
        if not self._open:
            return None, None
        values = [*args, *kwargs.values()]
        link = next((self._open[id(v)] for v in values if id(v) in self._open), None)
        if link is None or not isinstance(output, Tensor) or not output.requires_grad:
            return None, None
        if func in _INSERTS and kwargs.get("dim", args[1] if len(args) > 1 else None) == 0:
            self._waiting.pop(id(link.call), None)
            options = {"call": link.call, "start": link.start, "end": output}
            return Call("chain", link.call.roles, None, options), None
        if func in _MOVES or func in _INSERTS:
            self._open[id(output)] = _Link(output, link.call, link.start)
            return None, None
        return None, link.call


def unchained(call: Call, cotangents: Tensor) -> tuple[Call, Tensor]:
    """The call at the start of a chain and its output's cotangents, [C, n·s, ...].

    Args:
        cotangents: [C, n, ...], of the chain's end.
    """
    end, start = call.options["end"], call.options["start"]
    outputs, samples = cotangents.shape[:2]
    flat = cotangents.flatten(0, 1)[:, None]  # [C n, 1, ...]: one cotangent of the end each
    (moved,) = torch.autograd.grad(end, [start], flat, retain_graph=True, is_grads_batched=True)
    return call.options["call"], moved.unflatten(0, (outputs, samples)).flatten(1, 2)
