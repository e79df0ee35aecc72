"""`jx.jet` and `jx.jvp` within ``torch.compile``.

Dynamo cannot follow the engine (a `JetTensor` is a wrapper made in C++), so the call of a module on
a jet is a *non-strict* region: one node for dynamo, which AOT autograd traces by running the engine
itself on fake tensors.  The graph then holds the plain stack ``[S, ...]``, torch functions and the
operators ``jachess::...``; the module's parameters and buffers are inputs of the graph.

Dynamo imports this file when it meets `jet`, and nobody should before: torch._dynamo takes seconds.
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

from ..torch_floor import release
from . import api
from .api import eager_jvp, split_output, with_tangents
from .layout import ORDERS, JetLayout, make_layout, map_tensors
from .tensor import carries_derivatives, lift

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


def jet_in_graph(fn: Any, x: Any, directions: Any, order: int) -> Any:
    """`jet` as dynamo traces it; see there.

    What the graph cannot hold is a graph break with its reason, after which the engine runs
    eagerly; with ``fullgraph=True`` that is an error.
    """
    why = _why_not(fn)
    if why:
        torch._dynamo.graph_break(msg=why)
        return api.eager_jet(fn, x, directions, order)
    module, args, named = _call_of(fn)
    for known in ORDERS:  # with dynamic=True, dynamo makes symbols of integers, too
        order = known if order == known else order
    stacks = _stacks(module, args, named, x, directions, order, _modes(module))
    _raise_problem(stacks)
    count = pytree.tree_leaves(directions)[0].shape[0]
    layout = make_layout.__wrapped__(count, order)

    def as_jet(tensor: Tensor) -> Any:
        return api.Jet(tensor, layout) if carries_derivatives(tensor) else tensor

    return map_tensors(stacks, as_jet)


def jvp_in_graph(
    fn: Any, primals: Any, tangents: Any, has_aux: bool, differentiable: bool
) -> tuple[Any, ...]:
    """`jvp` as dynamo traces it, as `jet_in_graph`."""
    why = _why_not(fn)
    if why:
        torch._dynamo.graph_break(msg=why)
        return eager_jvp(fn, primals, tangents, has_aux, differentiable)
    module, args, named = _call_of(fn)
    found = _outputs(
        module, args, named, primals, tangents, has_aux, differentiable, _modes(module)
    )
    _raise_problem(found)
    return found


def _why_not(fn: Any) -> str | None:
    """Why the graph cannot hold a derivative of ``fn``; None where it can."""
    if not MODULES_IN_GRAPHS:
        return _TOO_OLD
    return None if isinstance(_call_of(fn)[0], nn.Module) else _NOT_A_MODULE


def _call_of(fn: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """What is called, and what it is called with before and beside the jets."""
    if isinstance(fn, functools.partial):
        return fn.func, fn.args, fn.keywords
    return fn, (), {}


def _modes(module: nn.Module) -> tuple[bool, ...]:
    """Dynamo does not look into the module; reading the flags makes it trace again after
    model.train() or model.eval()."""
    return tuple(part.training for part in module.modules())


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
    modes: tuple[bool, ...],
) -> Any:
    """``module(*args, *jets, **named)`` with every jet replaced by its stack ``[S, ...]``."""

    def run() -> Any:
        jets, layout = api.make_arguments(x, directions, order, check_values=False)
        with _only_inputs():
            value = module(*args, *jets, **named)
        return map_tensors(value, lambda t: _stack(t, layout))

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
    modes: tuple[bool, ...],
) -> Any:
    """What `jvp` returns."""

    def run() -> Any:
        as_jets = differentiable or not torch.is_grad_enabled()
        given, layout = with_tangents(primals, tangents, as_jets)
        with _only_inputs():
            value = module(*args, *given, **named)
        return split_output(value, has_aux, differentiable, layout)

    return _or_problem(run, primals)


def _or_problem(run: Callable[[], Any], inputs: Any) -> Any:
    """``run()``, or a sentence about what went wrong.

    It leaves as the key of a dict: dynamo reads the structure of what a non-strict region returns,
    but drops the message of what it raises.
    """
    try:
        return run()
    except Exception as error:
        fakes = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, FakeTensor)]
        if not fakes:
            raise
        _forget_pending_symbols(fakes[0])
        return {_PROBLEM + _sentence(error): torch.zeros(())}


def _forget_pending_symbols(x: FakeTensor) -> None:
    """A model that read a value (`.item()`) left a symbol behind, which would hide the error."""
    shapes = x.fake_mode.shape_env
    if shapes is not None:
        shapes.pending_fresh_unbacked_symbols.clear()


def _stack(tensor: Tensor, layout: JetLayout) -> Tensor:
    return lift(tensor, layout).streams if carries_derivatives(tensor) else tensor


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
