"""`jx.jet`, `jx.jvp` and `jx.laplacian` within ``torch.compile``.

Dynamo cannot trace the engine (a `JetTensor` is a wrapper from C++), so the call of a module on a
jet is a *non-strict* region: one node for dynamo, which AOT autograd traces by running the engine
on fake tensors.  The graph then holds the plain stack ``[S, ...]``, torch functions and the
operators ``jachess::...``; the module's parameters and buffers are inputs of the graph.

Import this file only while dynamo traces: it imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, fake_tensor_tls
from torch.utils import _pytree as pytree

from ..torch_private import release
from .eager import Jet, eager_jet, eager_jvp, make_arguments, split_output, with_tangents
from .layout import ORDERS, Second, make_layout, map_tensors
from .tensor import carries_derivatives, lift

# Before torch 2.12 `nonstrict_trace` takes no nn.Module.
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
_NOT_A_CONSTANT = (
    "jx.jet within torch.compile takes tensors, numbers, strings and None beside the jets: bind "
    "anything else in the module itself"
)
_PROBLEM = "problem: "
# Stands for None, which a non-strict region does not take.
_NONE = "jachess_ext.None"


class JetGraphError(RuntimeError):
    """Raised where a jet cannot be computed within a graph; the message says why."""


def jet_in_graph(fn: Any, x: Any, directions: Any, order: int, second: Second) -> Any:
    """Compute `jet` while dynamo traces.

    A function that the graph cannot hold breaks it, with the reason, and runs eagerly; with
    ``fullgraph=True`` that is an error.
    """
    why = why_not(fn)
    if why:
        torch._dynamo.graph_break(msg=why)
        return eager_jet(fn, x, directions, order, second)
    module, args, named = _call_of(fn)
    args, named = _without_none((args, named))
    for known in ORDERS:  # with dynamic=True, the order is a symbol
        order = known if order == known else order
    stacks = _stacks(module, args, named, x, directions, order, second, _settings(module))
    _raise_problem(stacks)
    count = pytree.tree_leaves(directions)[0].shape[0]
    layout = make_layout.__wrapped__(count, order, second)

    def as_jet(tensor: Tensor) -> Any:
        return Jet(tensor, layout) if carries_derivatives(tensor) else tensor

    return map_tensors(stacks, as_jet)


def jvp_in_graph(
    fn: Any, primals: Any, tangents: Any, has_aux: bool, differentiable: bool
) -> tuple[Any, ...]:
    """Compute `jvp` while dynamo traces, as `jet_in_graph`."""
    why = why_not(fn)
    if why:
        torch._dynamo.graph_break(msg=why)
        return eager_jvp(fn, primals, tangents, has_aux, differentiable)
    module, args, named = _call_of(fn)
    args, named = _without_none((args, named))
    outputs = _outputs(
        module, args, named, primals, tangents, has_aux, differentiable, _settings(module)
    )
    _raise_problem(outputs)
    return outputs


def why_not(fn: Any) -> str | None:
    """Return why the graph cannot hold a derivative of ``fn``; None if it can."""
    if not MODULES_IN_GRAPHS:
        return _TOO_OLD
    module, args, named = _call_of(fn)
    if not isinstance(module, nn.Module):
        return _NOT_A_MODULE
    for leaf in pytree.tree_leaves((args, named)):
        if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str)):
            return _NOT_A_CONSTANT
    return None


def _call_of(fn: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """Return the callable, and its arguments before and beside the jets."""
    if isinstance(fn, functools.partial):
        return fn.func, fn.args, fn.keywords
    return fn, (), {}


def _without_none(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: _NONE if leaf is None else leaf, value)


def _with_none(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: None if isinstance(leaf, str) and leaf == _NONE else leaf, value
    )


def _settings(module: nn.Module) -> tuple:
    """Return the plain attributes of every part, so that dynamo traces again where one changes.

    Dynamo guards what it reads itself, not what a non-strict region reads.
    """
    found: list[Any] = []
    for part in module.modules():
        _read(vars(part), found)
    return tuple(found)


def _read(value: Any, found: list[Any]) -> None:
    """Append the numbers, flags and names in a value, which may be a nest of containers."""
    if isinstance(value, dict):
        for key in value:
            _read(value[key], found)
    elif isinstance(value, list | tuple):
        for part in value:
            _read(part, found)
    elif isinstance(value, bool | int | float | str):
        found.append(value)


def _raise_problem(result: Any) -> None:
    if isinstance(result, dict):
        for key in result:
            if isinstance(key, str) and key.startswith(_PROBLEM):
                raise JetGraphError(key.removeprefix(_PROBLEM))


@torch._dynamo.nonstrict_trace
def _stacks(
    module: nn.Module,
    args: tuple,
    named: dict[str, Any],
    x: Any,
    directions: Any,
    order: int,
    second: Second,
    settings: tuple,
) -> Any:
    """Return ``module(*args, *jets, **named)`` with the stack ``[S, ...]`` of every jet."""

    def run() -> Any:
        jets, layout = make_arguments(x, directions, order, second, check_values=False)
        with _only_inputs():
            value = module(*_with_none(args), *jets, **_with_none(named))
        return map_tensors(
            value, lambda t: lift(t, layout).streams if carries_derivatives(t) else t
        )

    return _or_problem(run, x)


@torch._dynamo.nonstrict_trace
def _outputs(
    module: nn.Module,
    args: tuple,
    named: dict[str, Any],
    primals: Any,
    tangents: Any,
    has_aux: bool,
    differentiable: bool,
    settings: tuple,
) -> Any:
    """Return what `jvp` returns."""

    def run() -> Any:
        as_jets = differentiable or not torch.is_grad_enabled()
        given, layout = with_tangents(primals, tangents, as_jets)
        with _only_inputs():
            value = module(*_with_none(args), *given, **_with_none(named))
        return split_output(value, has_aux, differentiable, layout)

    return _or_problem(run, primals)


def _or_problem(run: Callable[[], Any], inputs: Any) -> Any:
    """Return ``run()``, or a dict whose key is the message of the error.

    Dynamo reads the structure of what a non-strict region returns, but drops the message of what it
    raises.
    """
    try:
        return run()
    except Exception as error:
        fakes = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, FakeTensor)]
        if not fakes:
            raise
        shapes = fakes[0].fake_mode.shape_env
        if shapes is not None:
            # Symbols that a model left by reading a value (`.item()`) would hide the error.
            shapes.pending_fresh_unbacked_symbols.clear()
        message = f"{type(error).__name__}: {error}"
        if "convert all Tensors to FakeTensors" in message:
            message = _NOT_AN_INPUT
        return {_PROBLEM + message: torch.zeros(())}


@contextmanager
def _only_inputs() -> Iterator[None]:
    """Refuse tensors that are no inputs of the graph, which a non-strict region would capture."""
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = False
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before
