"""Turn an entry of the rule table into a function of one vector, for the engine and the oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .rule_table import Row, X


@dataclass
class Call:
    """``function`` called as an entry says, with every active tensor a slice of one vector.

    Attributes:
        x: the active tensors' entries, one after the other.
        dtype: of all floating-point arguments.
    """

    function: Callable
    row: Row
    x: Tensor
    constants: dict[int, Tensor]
    dtype: torch.dtype
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def on(self, device: str) -> Call:
        """The same call with tensors of another device whose entries are not set (fake ones)."""
        return self._placed_by(lambda tensor: torch.empty_like(tensor, device=device))

    def moved(self, device: str) -> Call:
        """The same call on another device."""
        return self._placed_by(lambda tensor: tensor.to(device))

    def _placed_by(self, place: Callable[[Tensor], Tensor]) -> Call:
        return replace(self, x=place(self.x.detach()), place=place)

    def __call__(self, x: Any) -> tuple:
        """Everything floating-point that the call returns, in a tuple."""
        return tuple(float_tensors(self.raw(x)))

    def raw(self, x: Any) -> Any:
        """What the call returns; in place: also the written tensor, and a view made before."""
        torch.manual_seed(7)  # dropout
        args, named = self.arguments(x)
        if not self.row.in_place:
            return self.function(*args, **named)
        target = args[0].clone()
        view = target[..., :2]
        result = self.function(target, *args[1:], **named)
        return result, target, view

    def arguments(self, x: Any) -> tuple[list, dict]:
        used = 0

        def fill(value: Any) -> Any:
            nonlocal used
            if isinstance(value, list):
                return [fill(item) for item in value]
            if isinstance(value, Tensor):
                return self.place(value)
            if isinstance(value, tuple):  # an index
                return tuple(self.place(v) if isinstance(v, Tensor) else v for v in value)
            if not isinstance(value, X):
                return value
            if not value.active:
                return self.place(self.constants[id(value)])
            count = torch.Size(value.shape).numel()
            part = x.narrow(0, used, count).reshape(value.shape)
            used += count
            return part

        args = [fill(value) for value in self.row.args]
        return args, {key: fill(value) for key, value in self.row.kwargs.items()}


def float_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a result, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple) or hasattr(value, "__next__"):
        for item in value:
            yield from float_tensors(item)


def _specifications(value: Any) -> Iterator[X]:
    if isinstance(value, X):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _specifications(item)
    elif isinstance(value, dict):
        yield from _specifications(list(value.values()))


def _draw(value: X, dtype: torch.dtype) -> Tensor:
    if value.low is None:
        # Kinks lie at round numbers: keep off them.
        entries = torch.randn(value.shape, dtype=torch.float64)
        entries = torch.where(entries.abs() < 0.05, entries + 0.2, entries)
    else:
        width = value.high - value.low
        entries = value.low + width * torch.rand(value.shape, dtype=torch.float64)
    return entries.to(dtype)


def make_call(function: Callable, row: Row, dtype: torch.dtype = torch.float64) -> Call:
    torch.manual_seed(row.seed)
    values = list(_specifications([list(row.args), row.kwargs]))
    active = [_draw(value, dtype).flatten() for value in values if value.active]
    constants = {id(value): _draw(value, dtype) for value in values if not value.active}
    return Call(function, row, torch.cat(active), constants, dtype)
