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
from ..strides import refuse_overlap
from ..tensor import JetTensor, lift, primal_of
from .streamwise import prepare_write

_NAMES = (
    *("add", "sub", "mul", "div", "neg", "pow", "addcmul", "lerp", "masked_fill", "clamp"),
    *("clamp_min", "clamp_max", "relu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "abs"),
    *("square", "tril", "triu", "nan_to_num", "reciprocal", "leaky_relu", "elu", "dropout"),
    *("index_add", "index_copy", "scatter", "scatter_add"),
)
_OPERATORS = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__ipow__": "pow"}
_OPERATORS |= {"__itruediv__": "div", "__idiv__": "div"}


def _write(target: Any, value: Any, function: Any) -> JetTensor:
    """``value``, broadcast and cast to ``target``, over the whole of it."""
    if not isinstance(target, JetTensor):
        raise missing_rule(function, "a plain tensor cannot be changed in place by a jet")
    value = value if isinstance(value, Tensor) else torch.as_tensor(value, device=target.device)
    if torch.broadcast_shapes(value.shape, target.shape) != target.shape:
        raise missing_rule(
            function, f"a result of shape {tuple(value.shape)} does not fit {tuple(target.shape)}"
        )
    source = lift(value, target.jet_layout).streams
    refuse_overlap(target, target.streams.stride()[1:], function)
    prepare_write(target)
    padded = [len(source), *(1,) * (target.ndim - value.ndim), *value.shape]
    target.streams.copy_(source.reshape(padded))
    return target


def _in_place(function: Callable, rule: Callable) -> Callable:
    def write(self: Any, *args: Any, **named: Any) -> JetTensor:
        if not isinstance(self, JetTensor):
            raise missing_rule(function, "a plain tensor cannot be changed in place by a jet")
        # Autograd saves the jet that the rule sees, so what is overwritten is another one.
        return _write(self, rule(self.clone(), *args, **named), function)

    return write


def _register(name: str, in_place_name: str) -> None:
    for function in spellings(in_place_name):
        rule = find_rule(spellings(name)[0])
        assert rule is not None, name
        jet_rule(function)(_in_place(function, rule))


for _name in _NAMES:
    _register(_name, f"{_name}_")
for _operator, _name in _OPERATORS.items():
    _register(_name, _operator)


@jet_rule("__setitem__")
def setitem(self: Any, index: Any, value: Any) -> None:
    """Stream by stream, so that every kind of index means what it means on a plain tensor."""
    if not isinstance(self, JetTensor):
        raise missing_rule(torch.Tensor.__setitem__, "a plain tensor cannot hold part of a jet")
    index = primal_of(index)
    if isinstance(value, JetTensor):
        # Not by iterating: autograd gives no gradient to a view among several of one call, once
        # its base is written into, and ``y[:, 0] += ...`` writes y's own view back into y.
        stack = lift(value, self.jet_layout).streams
        sources = [stack[stream] for stream in range(len(stack))]
    else:
        sources = [value] + [0] * (len(self.streams) - 1)
    prepare_write(self)
    for place, source in enumerate(sources):
        self.streams[place][index] = source


@jet_rule("copy_")
def copy_(self: Any, src: Any, non_blocking: bool = False) -> JetTensor:
    return _write(self, src, torch.Tensor.copy_)


@jet_rule("fill_")
def fill_(self: Any, value: Any) -> JetTensor:
    return _write(self, value, torch.Tensor.fill_)


@jet_rule("zero_")
def zero_(self: Any) -> JetTensor:
    return _write(self, 0, torch.Tensor.zero_)
