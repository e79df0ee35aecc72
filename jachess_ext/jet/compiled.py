"""`jx.jet`, `jx.jvp` and `jx.laplacian` within ``torch.compile``.

Dynamo cannot trace the engine (a `JetTensor` is a wrapper from C++), so the call of a module on a
jet is a *non-strict* region: one node for dynamo, which AOT autograd traces by running the engine
on fake tensors.  The graph then holds the plain stack ``[S, ...]``, torch functions and the
operators ``jachess::...``; the module's parameters and buffers are inputs of the graph.

Import this file only while dynamo traces: it imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, fake_tensor_tls
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..ops.library import constant_when_compiled
from ..torch_private import release
from ._types import Args, Function, T
from .context import EAGERLY, without_dynamo
from .derivative import carries_derivatives
from .eager import Jet, begin_pass, check_inputs, eager_jvp, split_output, with_tangents
from .fsdp import jets_through_fsdp
from .layout import ORDERS, JetLayout, Second, make_layout, map_tensors
from .passes import open_run
from .sameness import traced_once_more
from .tensor import lift

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
_LAZY = "the module has lazy layers, whose parameters have no shape yet: call it once before"
_PROBLEM = "problem: "
# Stands for None, which a non-strict region does not take.
_NONE = "jachess_ext.None"
Call: TypeAlias = "tuple[Args, dict[str, object], tuple[object, ...]]"
"""A module's arguments beside the jets, by place and by name, and its `_settings`.

The region reads settings from the module itself; as its input they are guarded by dynamo.
"""


class JetGraphError(RuntimeError):
    """Raised where a jet cannot be computed within a graph; the message says why."""


def jet_in_graph(fn: Function, x: object, directions: object, order: int, second: Second) -> Any:
    """Compute `jet` while dynamo traces, of a function that `serves`."""
    module, args, kwargs = _call_of(fn)
    for constant in ORDERS:  # with dynamic=True, the order is a symbol
        order = constant if order == constant else order
    call = args, kwargs, _settings(module)
    stacks = _stacks(module, call, x, directions, order, second)
    _raise_problem(stacks)
    count = pytree.tree_leaves(directions)[0].shape[0]
    layout = make_layout.__wrapped__(count, order, second)

    def as_jet(tensor: Tensor) -> Jet | Tensor:
        return Jet(tensor, layout) if carries_derivatives(tensor) else tensor

    return map_tensors(stacks, as_jet)


def jvp_in_graph(
    fn: Function,
    primals: object,
    tangents: object,
    has_aux: bool,
    differentiable: bool,
    repeats: bool = False,
) -> tuple[Any, ...]:
    """Compute `jvp` while dynamo traces, of a function that `serves`.

    Args:
        repeats: whether ``fn`` runs in the same call before, and has to be the same function.
    """
    module, args, kwargs = _call_of(fn)
    call, tangents = (args, kwargs, _settings(module)), _without_none(tangents)
    outputs = _outputs(module, call, primals, tangents, has_aux, differentiable, repeats)
    _raise_problem(outputs)
    return outputs


def serves(fn: Function, refusal: str | None = None) -> bool:
    """Return whether the graph that dynamo traces can hold a derivative of ``fn``.

    Else the graph breaks, with the reason, and the derivative is computed eagerly between two
    graphs; with ``fullgraph=True`` that is an error.

    Args:
        refusal: why the graph cannot hold this call, whatever ``fn`` is.
    """
    why = _why_not(fn) or refusal
    if why:
        torch._dynamo.graph_break(msg=why)
        _warn_of_break(why)
    return not why


_WARNED: set[str] = set()


@without_dynamo
def _warn_of_break(why: str) -> None:
    """Warn, once for each reason, that derivatives break the graph and run eagerly."""
    if why not in _WARNED:
        _WARNED.add(why)
        warnings.warn(f"derivatives run eagerly, outside of the graph: {why}", stacklevel=4)


def _why_not(fn: Function) -> str | None:
    """Return why the graph cannot hold a derivative of ``fn``; None if it can."""
    if not MODULES_IN_GRAPHS:
        return _TOO_OLD
    module, args, kwargs = _call_of(fn)
    if not isinstance(module, nn.Module):
        return _NOT_A_MODULE
    leaves = pytree.tree_leaves((args, kwargs))
    if not all(isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves):
        return _NOT_A_CONSTANT
    return _unread(module)


def _call_of(fn: Function) -> tuple[Any, Args, dict[str, object]]:
    """Return the callable, and its arguments before and beside the jets, without None."""
    if isinstance(fn, functools.partial):
        return fn.func, *_without_none((fn.args, fn.keywords))
    return fn, (), {}


def _without_none(value: T) -> T:
    return pytree.tree_map(lambda leaf: _NONE if leaf is None else leaf, value)


def _with_none(value: T) -> T:
    return pytree.tree_map(
        lambda leaf: None if isinstance(leaf, str) and leaf == _NONE else leaf, value
    )


# ---- attributes of a module --------------------------------------------------------------------
#
# Dynamo guards what it reads itself, not what a non-strict region reads. So it reads every
# attribute here, and what it would not guard by its value breaks the graph.


def _constant(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function that dynamo calls as it is; it is kept out of one that a break leaves to
    Python."""
    outside_of_dynamo = torch._dynamo.disable(function)

    @constant_when_compiled
    @functools.wraps(function)
    def constant(*args: object) -> T:
        return outside_of_dynamo(*args)

    return constant


_NUMBERS = (bool, int, float, str)
# Guarded by value or identity as they are; a tensor that is no parameter or buffer is refused.
_FIXED = (
    *(Tensor, type(None), type, complex, bytes, range, slice, enum.Enum, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.ModuleType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    torch._ops.HigherOrderOperator,  # as which dynamo sees torch's checkpoint
)
_MUTABLE = (dict, list, set, collections.deque)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)


def _settings(module: nn.Module) -> tuple[bool | int | float | str, ...]:
    """Return the numbers, flags and names that a module holds, so that dynamo traces again where
    one changes."""
    numbers: list[bool | int | float | str] = []
    _read(module, numbers, [])
    return tuple(numbers)


def _read(value: object, numbers: list[bool | int | float | str], ids: list[int]) -> None:
    """Append the numbers, flags and names in a value, and the ids of the objects that it holds."""
    if isinstance(value, _NUMBERS):
        numbers.append(value)
        return
    for part in _parts(value, ids):
        _read(part, numbers, ids)


def _parts(value: object, ids: list[int]) -> list[Any]:
    """Return what a value holds; nothing of an object whose id is known, so that cycles end."""
    if isinstance(value, _FIXED):
        return []
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, dict | types.MappingProxyType):
        return [value[key] for key in value]
    if isinstance(value, _SEQUENCES):
        return list(value)
    if id(value) in ids:
        return []
    ids.append(id(value))
    if isinstance(value, types.FunctionType):
        if _is_of_torch(value):  # dynamo knows it by itself, and cannot read its defaults
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__defaults__, value.__kwdefaults__, *cells, vars(value)]
    parts = [getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)]
    if hasattr(value, "__dict__"):
        parts.append(vars(value))
    return parts


@_constant
def _is_of_torch(function: types.FunctionType) -> bool:
    return function.__module__.startswith("torch.")


@_constant
def _slots(kind: type) -> list[str]:
    """Return the names of a class's slots, as attributes are named.

    Python stores a private slot ``__name`` of a class ``_Base`` as ``_Base__name``.
    """
    names = [
        (base, name)
        for base in kind.__mro__
        for name in _as_names(vars(base).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    private = [(f"_{base.__name__.lstrip('_')}{name}", name) for base, name in names]
    return [full if n.startswith("__") and not n.endswith("__") else n for full, n in private]


def _as_names(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


@_constant
def _unread(module: nn.Module) -> str | None:
    """Return which attribute is of a kind that `_read` does not know; None: none is."""
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        return _LAZY
    attribute = _unknown(module, [], type(module).__name__)
    if attribute is None:
        return None
    kind, place = attribute
    return (
        f"{place} is a {kind.__module__}.{kind.__qualname__}, whose changes a graph does not see. "
        "Hold numbers, tensors (register_buffer), or lists and dicts of them in its place"
    )


def _unknown(value: object, ids: list[int], place: str) -> tuple[type, str] | None:
    """Return the class and place of the first value whose changes `_read` would miss."""
    kind = type(value)
    if isinstance(value, _NUMBERS) and not isinstance(value, enum.Enum):
        return None if kind in _NUMBERS else (kind, place)
    containers = (*_FIXED, *_SEQUENCES, dict, types.MappingProxyType, functools.partial)
    functions = (types.MethodType, types.FunctionType)
    if not isinstance(value, (*containers, *functions)) and not _is_of_python(kind):
        return kind, place
    beside = isinstance(value, (dict, *_SEQUENCES, functools.partial))
    if (beside or kind in (Tensor, nn.Parameter)) and _beside_items(value):
        return kind, place
    try:
        parts = _parts(value, ids)
    except (ValueError, AttributeError):  # an empty cell
        return kind, place
    keys = list(value) if isinstance(value, dict) else []
    for number, part in enumerate(parts):
        at = f".{keys[number]}" if number < len(keys) else ""
        if attribute := _unknown(part, ids, place + at):
            return attribute
    return None


def _beside_items(container: object) -> list[object]:
    """Return the attributes of a container, partial or tensor that are neither items nor flags;
    diffusers' FrozenDict has both."""
    items = container if isinstance(container, dict) else {}
    return [
        value
        for name, value in getattr(container, "__dict__", {}).items()
        if not isinstance(value, bool) and items.get(name) is not value
        if not name.startswith("_dynamo")  # its own marks, of parameters
    ]


@contextmanager
def _unwritten(module: nn.Module) -> Iterator[None]:
    """Undo what tracing writes into a module's attributes, and refuse it: no graph writes them.

    A tensor in the place of another is undone without a word: the hooks of weight_norm write one at
    each call, and a graph that read it would be refused.
    """
    copies: list[tuple[Any, Any]] = []
    values: list[object] = [module]
    ids: list[int] = []
    while values:
        value = values.pop()
        if isinstance(value, _MUTABLE):
            copies.append((value, value.copy()))
        values.extend(_parts(value, ids))
    names: list[str] = []
    try:
        yield
    finally:
        for now, before in copies:
            if changes := _changes(now, before):
                names += [name for name, tensor in changes if not tensor]
                kind: Any = next(c for c in _MUTABLE if isinstance(now, c))
                kind.clear(now)
                (kind.extend if hasattr(kind, "extend") else kind.update)(now, before)
    if names:
        raise JetGraphError(
            f"the module's forward changes {', '.join(names)}, which a graph cannot do: return it, "
            "or hold it in a buffer that is written in place"
        )


def _changes(now: Any, before: Any) -> list[tuple[str, bool]]:
    """Return the names of what changed in a container, and whether it is another tensor."""
    if not isinstance(now, dict):
        same = len(now) == len(before) and all(map(_is_same, now, before))
        return [] if same else [(f"a {type(now).__name__}", False)]
    changes = []
    for name in {**before, **now}:
        a, b = before.get(name, _NONE), now.get(name, _NONE)
        if not _is_same(a, b):
            changes.append((str(name), isinstance(a, Tensor) and isinstance(b, Tensor)))
    return changes


def _is_same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _NUMBERS) and a == b)


def _is_of_python(kind: type) -> bool:
    """Return whether objects hold nothing but attributes, as those of Python's classes do."""
    made_by_python = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    pointers = len(_slots(kind)) + 2  # to __dict__ and __weakref__
    size = object.__basicsize__ + pointers * tuple.__itemsize__
    small = kind.__basicsize__ <= size and not kind.__itemsize__
    return kind is types.SimpleNamespace or bool(made_by_python and small)


def _raise_problem(result: object) -> None:
    if isinstance(result, dict):
        for key in result:
            if isinstance(key, str) and key.startswith(_PROBLEM):
                raise JetGraphError(key.removeprefix(_PROBLEM))


@torch._dynamo.nonstrict_trace
def _stacks(
    module: nn.Module, call: Call, x: object, directions: object, order: int, second: Second
) -> Any:
    """Return ``module(*args, *jets, **kwargs)`` with the stack ``[S, ...]`` of every jet."""
    args, kwargs, _ = call

    def run() -> Any:
        inputs = check_inputs(x, directions, check_values=False)
        layout = begin_pass(inputs.count, order, second)
        with _pass_of(module, layout, x):
            value = module(*_with_none(args), *inputs.jets(layout), **_with_none(kwargs))
        return map_tensors(
            value, lambda t: lift(t, layout).streams if carries_derivatives(t) else t
        )

    return _or_problem(run, x)


@torch._dynamo.nonstrict_trace
def _outputs(
    module: nn.Module,
    call: Call,
    primals: object,
    tangents: object,
    has_aux: bool,
    differentiable: bool,
    repeats: bool,
) -> Any:
    """Return what `jvp` returns."""
    args, kwargs, _ = call

    def run() -> Any:
        if not _is_traced(primals):
            fn = functools.partial(module, *_with_none(args), **_with_none(kwargs))
            return eager_jvp(fn, primals, _with_none(tangents), has_aux, differentiable)
        as_jets = differentiable or not torch.is_grad_enabled()
        inputs, layout = with_tangents(primals, _with_none(tangents), as_jets)
        once_more = traced_once_more(module) if repeats else nullcontext()
        with _only_inputs(), _unwritten(module), once_more:
            value = module(*_with_none(args), *inputs, **_with_none(kwargs))
        return split_output(value, has_aux, differentiable, layout)

    return _or_problem(run, primals)


def _is_traced(inputs: object) -> bool:
    """Return whether a non-strict region is traced; else it runs: where a graph broke within this
    file, or by the backend "eager"."""
    leaves = pytree.tree_leaves(inputs)
    return TracingContext.try_get() is not None or any(isinstance(x, FakeTensor) for x in leaves)


@contextmanager
def _pass_of(module: nn.Module, layout: JetLayout, inputs: object) -> Iterator[None]:
    """Hold the pass that a non-strict region makes."""
    if _is_traced(inputs):
        with _only_inputs(), _unwritten(module):
            yield
    else:
        with EAGERLY, jets_through_fsdp(), open_run(layout.run):
            yield


@torch._dynamo.disable
def _or_problem(run: Callable[[], Any], inputs: object) -> Any:
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
