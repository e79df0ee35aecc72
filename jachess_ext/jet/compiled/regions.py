"""`jx.jet`, `jx.jvp` and `jx.laplacian` within ``torch.compile``.

Dynamo cannot trace the engine (a `JetTensor` is a wrapper from C++), so the call of a module on a
jet is a *non-strict* region: for dynamo one node, which AOT autograd traces by running the engine
on fake tensors.  The graph then consists of torch functions and the operators ``jachess::...`` on
plain stacks ``[S, ...]``; the module's parameters and buffers are inputs of the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, fake_tensor_tls
from torch.utils import _pytree as pytree

from ...torch_private import release
from ..engine.context import FORCE_EAGER, without_dynamo
from ..engine.derivative import carries_derivatives
from ..engine.layout import ORDERS, JetLayout, Second, make_layout, map_tensors
from ..engine.tensor import lift
from ..engine.types import Function, T
from ..passes.eager import Jet, attach_tangents, begin_pass, check_inputs, eager_jvp, split_output
from ..passes.fsdp import jets_through_fsdp
from ..passes.scope import open_pass
from ..rows.sameness import refuse_irreproducible
from .closures import Call, pack, pack_call, unpack_call
from .reachable import NONE, JetGraphError, modules_in, refuse_attribute_writes

# Before torch 2.12 `nonstrict_trace` takes no nn.Module.
MODULES_IN_GRAPHS = release(torch.__version__) >= (2, 12)
_TOO_OLD = (
    "jx.jet within torch.compile needs torch 2.12 or newer, whose nonstrict_trace takes an "
    "nn.Module; without fullgraph=True it runs eagerly"
)
_NOT_AN_INPUT = (
    "the module uses a tensor that is neither its parameter nor its buffer, which would become a "
    "constant of the graph, without a gradient. Register it (register_buffer), or pass it with "
    "functools.partial(module, ...)"
)
_ERROR_PREFIX = "problem: "


def jet_in_graph(
    fn: Function, x: object, directions: object, order: int, second: Second, squares: int | None
) -> Any:
    """Compute `jet` while dynamo traces, for a function that `can_trace` accepts.

    Args:
        squares: the number of directions with second derivatives, as for `make_layout`.
    """
    for constant in ORDERS:  # with dynamic=True the order is a symbol
        order = constant if order == constant else order
    squares = None if squares is None else int(squares)
    stacks = _jet_region(pack_call(fn), x, directions, order, second, _encode_none(squares))
    raise_if_error(stacks)
    count = pytree.tree_leaves(directions)[0].shape[0]
    layout = make_layout.__wrapped__(count, order, second, squares)

    def as_jet(tensor: Tensor) -> Jet | Tensor:
        return Jet(tensor, layout) if carries_derivatives(tensor) else tensor

    return map_tensors(stacks, as_jet)


def jvp_in_graph(
    fn: Function,
    primals: object,
    tangents: object,
    has_aux: bool,
    differentiable: bool,
    is_second_run: bool = False,
) -> tuple[Any, ...]:
    """Compute `jvp` while dynamo traces, for a function that `can_trace` accepts.

    Args:
        is_second_run: whether ``fn`` has run before in the same call, so that it may neither draw
            random numbers nor write into buffers.
    """
    tangents = _encode_none(tangents)
    outputs = _jvp_region(pack_call(fn), primals, tangents, has_aux, differentiable, is_second_run)
    raise_if_error(outputs)
    return outputs


def can_trace(fn: Function, refusal: str | None = None) -> bool:
    """Return whether the graph that dynamo traces can contain a derivative of ``fn``.

    If not, break the graph, with the reason as the message; the derivative is then computed eagerly
    between two graphs.  With ``fullgraph=True`` the break is an error.

    Args:
        refusal: the reason why the graph cannot contain this call, whatever ``fn`` is; None if
            there is none.
    """
    reason = _refusal_reason(fn) or refusal
    if reason:
        torch._dynamo.graph_break(msg=reason)
        _warn_of_break(reason)
    return not reason


_WARNED_REASONS: set[str] = set()


@without_dynamo
def _warn_of_break(reason: str) -> None:
    """Warn, once for each reason, that derivatives break the graph and run eagerly."""
    if reason not in _WARNED_REASONS:
        _WARNED_REASONS.add(reason)
        warnings.warn(f"derivatives run eagerly, outside of the graph: {reason}", stacklevel=4)


def _refusal_reason(fn: Function) -> str | None:
    """Return the reason why the graph cannot contain a derivative of ``fn``; None if it can."""
    if not MODULES_IN_GRAPHS:
        return _TOO_OLD
    try:
        pack(fn, [], [])
    except JetGraphError as error:
        return str(error.args[0])
    return None


def _encode_none(value: T) -> T:
    return pytree.tree_map(lambda leaf: NONE if leaf is None else leaf, value)


def _decode_none(value: T) -> T:
    return pytree.tree_map(
        lambda leaf: None if isinstance(leaf, str) and leaf == NONE else leaf, value
    )


def raise_if_error(result: object) -> None:
    if isinstance(result, dict):
        for key in result:
            if isinstance(key, str) and key.startswith(_ERROR_PREFIX):
                raise JetGraphError(key.removeprefix(_ERROR_PREFIX))


@torch._dynamo.nonstrict_trace
def _jet_region(
    call: Call, x: object, directions: object, order: int, second: Second, squares: int | None
) -> Any:
    """Run `jet` in a region; return the function's result, with the stack ``[S, ...]`` in place of
    each jet."""

    def run() -> Any:
        fn = unpack_call(call)
        inputs = check_inputs(x, directions, check_values=False)
        layout = begin_pass(inputs.count, order, second, _decode_none(squares))
        with _open_pass(fn, layout, x):
            value = fn(*inputs.jets(layout))
        return map_tensors(
            value, lambda t: lift(t, layout).streams if carries_derivatives(t) else t
        )

    return return_error(run, x)


@torch._dynamo.nonstrict_trace
def _jvp_region(
    call: Call,
    primals: object,
    tangents: object,
    has_aux: bool,
    differentiable: bool,
    is_second_run: bool,
) -> Any:
    """Run `jvp` in a region; return its result."""

    def run() -> Any:
        fn = unpack_call(call)
        if not _is_traced(primals):
            return eager_jvp(fn, primals, _decode_none(tangents), has_aux, differentiable)
        uses_jets = differentiable or not torch.is_grad_enabled()
        inputs, layout = attach_tangents(primals, _decode_none(tangents), uses_jets)
        modules = nn.ModuleList(modules_in(fn, []))
        guard = refuse_irreproducible(modules) if is_second_run else nullcontext()
        with refuse_captured(), refuse_attribute_writes(fn), guard:
            value = fn(*inputs)
        return split_output(value, has_aux, differentiable, layout)

    return return_error(run, primals)


def _is_traced(inputs: object) -> bool:
    """Return whether a non-strict region is being traced.

    If not, it runs eagerly: after a graph break within this file, or with the backend "eager".
    """
    leaves = pytree.tree_leaves(inputs)
    return TracingContext.try_get() is not None or any(isinstance(x, FakeTensor) for x in leaves)


@contextmanager
def _open_pass(fn: Function, layout: JetLayout, inputs: object) -> Iterator[None]:
    """Open the pass of a non-strict region, which is traced or runs eagerly."""
    if _is_traced(inputs):
        with refuse_captured(), refuse_attribute_writes(fn):
            yield
    else:
        with FORCE_EAGER, jets_through_fsdp(), open_pass(layout.jet_pass):
            yield


@torch._dynamo.disable
def return_error(run: Callable[[], Any], inputs: object) -> Any:
    """Return ``run()``; if it raises an error in a traced region, return a dict with the message as
    its key, for `raise_if_error`.

    Dynamo drops the messages of errors that a non-strict region raises, but not the structure of
    its result.
    """
    try:
        return run()
    except Exception as error:
        fakes = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, FakeTensor)]
        if not fakes:
            raise
        shape_env = fakes[0].fake_mode.shape_env
        if shape_env is not None:
            # Symbols from reading a value (`.item()`) would raise another error, which hides this.
            shape_env.pending_fresh_unbacked_symbols.clear()
        message = f"{type(error).__name__}: {error}"
        if "convert all Tensors to FakeTensors" in message:
            message = _NOT_AN_INPUT
        return {_ERROR_PREFIX + message: torch.zeros(())}


@contextmanager
def refuse_captured() -> Iterator[None]:
    """Return a context in which a tensor that is no input of the graph raises an error, as the
    graph of a non-strict region would hold the tensor as a constant."""
    former = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = False
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = former
