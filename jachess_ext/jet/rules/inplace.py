"""In-place functions: the result of the out-of-place rule is written into the jet's own storage.

Views made before share that storage, so they change too, as with plain tensors; autograd's
version counter reports a write over something it saved.  Import this file last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..registry import find_rule, jet_rule, missing_rule, spellings
from ..tensor import JetTensor, lift

_NAMES = (
    *("add", "sub", "mul", "div", "neg", "pow", "masked_fill", "clamp", "clamp_min", "clamp_max"),
    *("relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "abs", "square", "tril", "triu"),
)


def _write(target: Any, value: Any, function: Any) -> JetTensor:
    if not isinstance(target, JetTensor):
        raise missing_rule(function, "a plain tensor cannot be changed in place by a jet")
    streams = lift(value, target.jet_layout).streams
    if streams.shape != target.streams.shape:
        raise missing_rule(function, f"the result has shape {tuple(streams.shape[1:])}")
    target.streams.copy_(streams)
    return target


def _in_place(function: Callable, rule: Callable) -> Callable:
    def write(self: Any, *args: Any, **named: Any) -> JetTensor:
        if not isinstance(self, JetTensor):
            return _write(self, None, function)
        return _write(self, rule(self, *args, **named), function)

    return write


for _name in _NAMES:
    _rule = find_rule(getattr(torch.Tensor, _name))
    assert _rule is not None, _name
    for _function in spellings(f"{_name}_"):
        jet_rule(_function)(_in_place(_function, _rule))


@jet_rule("__setitem__")
def setitem(self: Any, index: Any, value: Any) -> None:
    if not isinstance(self, JetTensor):
        raise missing_rule(torch.Tensor.__setitem__, "a plain tensor cannot hold part of a jet")
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=self.dtype, device=self.device)
    view = self[parts]
    _check_is_view(view, self)
    view.streams.copy_(lift(value, self.jet_layout).streams.reshape(_fit(view, value)))


def _fit(view: JetTensor, value: Tensor) -> list[int]:
    """The stacked shape of ``value`` with singletons in front, to broadcast to ``view``."""
    return [len(view.streams), *(1,) * (view.ndim - value.ndim), *value.shape]


def _check_is_view(view: JetTensor, whole: JetTensor) -> None:
    if view.streams._base is None and view.streams.numel():
        raise missing_rule(torch.Tensor.__setitem__, "tensor indices in an assignment")


@jet_rule("copy_")
def copy_(self: Any, src: Any, non_blocking: bool = False) -> JetTensor:
    return _write(self, src, torch.Tensor.copy_)
