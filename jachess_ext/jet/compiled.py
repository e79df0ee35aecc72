"""`jx.jet` within ``torch.compile``.

Dynamo cannot follow the engine (a `JetTensor` is a wrapper made in C++), so the call of a module on
a jet is a *non-strict* region: one node for dynamo, which AOT autograd traces by running the engine
itself on fake tensors.  The graph then holds the plain stack ``[S, ...]``, torch functions and the
operators ``jachess::...``; the module's parameters and buffers are inputs of the graph.

Dynamo imports this file when it meets `jet`, and nobody should before: torch._dynamo takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, fake_tensor_tls

from ..torch_floor import release
from . import api
from .layout import ORDERS, JetLayout, make_layout
from .tensor import lift

# Earlier torch's `nonstrict_trace` takes tensors and plain values alone, no nn.Module.
MODULES_IN_GRAPHS = release(torch.__version__) >= (2, 12)
_TOO_OLD = (
    "jx.jet within torch.compile needs torch 2.12 or newer, whose nonstrict_trace takes an "
    "nn.Module; without fullgraph=True it runs eagerly"
)
_NOT_A_MODULE = (
    "jx.jet within torch.compile takes an nn.Module, or functools.partial of one: what any other "
    "function closes over would become a constant of the graph, without a gradient. Make it the "
    "forward of an nn.Module that holds the model"
)
_NOT_AN_INPUT = (
    "the module uses a tensor that is neither its parameter nor its buffer, which would become a "
    "constant of the graph, without a gradient. Register it (register_buffer), or pass it with "
    "functools.partial(module, ...)"
)
_PROBLEM = "problem: "


class JetGraphError(RuntimeError):
    """A jet that cannot be taken within a graph; the message says why."""


def jet_in_graph(fn: Any, x: Tensor, directions: Tensor, order: int) -> Any:
    """`jet` as dynamo traces it; see there.

    What the graph cannot hold is a graph break with its reason, after which the engine runs
    eagerly; with ``fullgraph=True`` that is an error.
    """
    if not MODULES_IN_GRAPHS:
        torch._dynamo.graph_break(msg=_TOO_OLD)
        return api.eager_jet(fn, x, directions, order)
    module, args, named = fn, (), {}
    if isinstance(fn, functools.partial):
        module, args, named = fn.func, fn.args, fn.keywords
    if not isinstance(module, nn.Module):
        torch._dynamo.graph_break(msg=_NOT_A_MODULE)
        return api.eager_jet(fn, x, directions, order)
    for known in ORDERS:  # with dynamic=True, dynamo makes symbols of integers, too
        order = known if order == known else order
    # Dynamo does not look into the module; reading the flags here makes it trace again after
    # model.train() or model.eval().
    modes = tuple(part.training for part in module.modules())
    stacks = _stacks(module, args, named, x, directions, order, modes)
    if isinstance(stacks, dict):
        for key in stacks:
            if isinstance(key, str) and key.startswith(_PROBLEM):
                raise JetGraphError(key.removeprefix(_PROBLEM))
    layout = make_layout.__wrapped__(directions.shape[0], order)

    def as_jet(tensor: Tensor) -> Any:
        return api.Jet(tensor, layout) if tensor.is_floating_point() else tensor

    return api.map_tensors(stacks, as_jet)


@torch._dynamo.nonstrict_trace
def _stacks(
    module: nn.Module,
    args: tuple,
    named: dict[str, Any],
    x: Tensor,
    directions: Tensor,
    order: int,
    modes: tuple[bool, ...],
) -> Any:
    """``module(*args, jet, **named)`` with every jet replaced by its stack ``[S, ...]``.

    A sentence about what went wrong leaves as the key of a dict: dynamo reads the structure of
    what a non-strict region returns, but drops the message of what it raises.
    """
    try:
        jet_input = api.make_input(x, directions, order, check_values=False)
        with _only_inputs():
            value = module(*args, jet_input, **named)
    except Exception as error:
        if not isinstance(x, FakeTensor):
            raise
        _forget_pending_symbols(x)
        return {_PROBLEM + _sentence(error): torch.zeros(())}
    return api.map_tensors(value, lambda t: _stack(t, jet_input.jet_layout))


def _forget_pending_symbols(x: FakeTensor) -> None:
    """A model that read a value (`.item()`) left a symbol behind, which would hide the error."""
    shapes = x.fake_mode.shape_env
    if shapes is not None:
        shapes.pending_fresh_unbacked_symbols.clear()


def _stack(tensor: Tensor, layout: JetLayout) -> Tensor:
    return lift(tensor, layout).streams if tensor.is_floating_point() else tensor


def _sentence(error: Exception) -> str:
    if "convert all Tensors to FakeTensors" in str(error):
        return _NOT_AN_INPUT
    return f"{type(error).__name__}: {error}"


@contextmanager
def _only_inputs() -> Iterator[None]:
    """Refuse tensors that are no inputs of the graph; a non-strict region would take them in."""
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = False
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before
