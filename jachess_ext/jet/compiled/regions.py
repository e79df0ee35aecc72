"""`jx.jet`, `jx.jvp` and `jx.laplacian` within ``torch.compile``.

Dynamo cannot trace the engine (a `JetTensor` is a wrapper from C++), so the call of a module on a
jet is a *non-strict* region: one node for dynamo, which AOT autograd traces by running the engine
on fake tensors.  The graph then holds the plain stack ``[S, ...]``, torch functions and the
operators ``jachess::...``; the module's parameters and buffers are inputs of the graph.

Import this file only while dynamo traces: it imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import collections
import copy
import dis
import enum
import functools
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, fake_tensor_tls
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ...ops.library import constant_when_compiled
from ...torch_private import release
from ..engine.context import EAGERLY, without_dynamo
from ..engine.derivative import carries_derivatives
from ..engine.layout import ORDERS, JetLayout, Second, make_layout, map_tensors
from ..engine.tensor import lift
from ..engine.types import Args, Function, T
from ..passes.eager import Jet, begin_pass, check_inputs, eager_jvp, split_output, with_tangents
from ..passes.fsdp import jets_through_fsdp
from ..passes.scope import open_run
from ..rows.sameness import traced_once_more

# Before torch 2.12 `nonstrict_trace` takes no nn.Module.
MODULES_IN_GRAPHS = release(torch.__version__) >= (2, 12)
_TOO_OLD = (
    "jx.jet within torch.compile needs torch 2.12 or newer, whose nonstrict_trace takes an "
    "nn.Module; without fullgraph=True it runs eagerly"
)
_NOT_A_FUNCTION = (
    "jx.jet within torch.compile takes an nn.Module, or a Python function that has no attributes "
    "of its own, writes no global variable and reads no NumPy number. Make it the forward of an "
    "nn.Module that holds the model"
)
_RECURSIVE = "the function closes over itself, which no argument of a graph does"
_NOT_AN_INPUT = (
    "the module uses a tensor that is neither its parameter nor its buffer, which would become a "
    "constant of the graph, without a gradient. Register it (register_buffer), or pass it with "
    "functools.partial(module, ...)"
)
_WRITTEN = (
    "the compiled function changes attributes, or global variables, that this function reads, "
    "before it is differentiated. Change them outside of the compiled function"
)
_LAZY = "the module has lazy layers, whose parameters have no shape yet: call it once before"
_PROBLEM = "problem: "
# Stands for None, which a non-strict region does not take.
_NONE = "jachess_ext.None"


class JetGraphError(RuntimeError):
    """Raised where a jet cannot be computed within a graph; the message says why."""


def jet_in_graph(fn: Function, x: object, directions: object, order: int, second: Second) -> Any:
    """Compute `jet` while dynamo traces, of a function that `serves`."""
    for constant in ORDERS:  # with dynamic=True, the order is a symbol
        order = constant if order == constant else order
    stacks = _stacks(_call_of(fn), x, directions, order, second)
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
    tangents = _without_none(tangents)
    outputs = _outputs(_call_of(fn), primals, tangents, has_aux, differentiable, repeats)
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
    try:
        _pack(fn, [], [])
    except JetGraphError as error:
        return str(error.args[0])
    return None


def _without_none(value: T) -> T:
    return pytree.tree_map(lambda leaf: _NONE if leaf is None else leaf, value)


def _with_none(value: T) -> T:
    return pytree.tree_map(
        lambda leaf: None if isinstance(leaf, str) and leaf == _NONE else leaf, value
    )


# ---- functions as arguments of a region ---------------------------------------------------------
#
# A non-strict region takes nests of tensors, modules and numbers.  Anything else is a dict there: a
# name in `_BUILDERS`, and what that builds it from.

_BUILDER = "jachess_ext.builder"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_READ = ("module", "object")
_NUMPY = (np.generic, np.ndarray)


def _constant(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function that dynamo calls as it is; it is kept out of one that a break leaves to
    Python."""
    outside_of_dynamo = torch._dynamo.disable(function)

    @constant_when_compiled
    @functools.wraps(function)
    def constant(*args: object) -> T:
        return outside_of_dynamo(*args)

    return constant


Call: TypeAlias = "tuple[object, tuple[object, ...]]"
"""A function as `_pack` returns it, and the `_settings` of what the region reads by itself.

As inputs of the region the settings are guarded by dynamo.
"""


def _call_of(fn: Function) -> Call:
    read: list[object] = []
    packed = _pack(fn, [], read)
    return packed, _settings(read)


def _function_of(call: Call) -> Any:
    """Return the function of a `_call_of` it."""
    packed, settings = call
    read: list[object] = []
    fn = _unpack(packed, read)
    if settings != _settings(read):
        raise JetGraphError(_WRITTEN)
    return fn


def _pack(value: object, outer: list[types.CodeType], read: list[object]) -> Any:
    """Return a value as arguments of a region.

    Args:
        outer: the code of the functions that this is a part of.
        read: modules and objects, which are added here, since the region reads their attributes.
    """
    if type(value) in (list, tuple, torch.Size):
        parts = [_pack(part, outer, read) for part in value]  # type: ignore[attr-defined]
        return parts if type(value) is list else tuple(parts)
    return pytree.tree_map(lambda leaf: _pack_leaf(leaf, outer, read), value)


def _pack_leaf(value: Any, outer: list[types.CodeType], read: list[object]) -> Any:
    if value is None:
        return _NONE
    if isinstance(value, Tensor) or type(value) in _NUMBERS:
        return value
    if isinstance(value, nn.Module):
        return {_BUILDER: "module", "parts": [_checked(value, read)]}
    if isinstance(value, functools.partial):
        return _packed("partial", [value.func, value.args, value.keywords], outer, read)
    if isinstance(value, types.MethodType):
        return _packed("method", [value.__func__, value.__self__], outer, read)
    if isinstance(value, _FIXED):
        return {_BUILDER: f"{_constant_name(value)}", "parts": []}
    if isinstance(value, _NUMPY):  # which dynamo takes for tensors
        raise JetGraphError(_NOT_A_FUNCTION)
    if not isinstance(value, types.FunctionType):
        modules = _modules(_checked(value, read), [])
        return {_BUILDER: f"{_object_name(value)}", "parts": modules}
    readers: list[Any] = []
    comptime(_trace_reader, lambda: readers.extend(_readers(value)))
    if len(readers) > 1:  # of torch
        return {_BUILDER: f"{_constant_name(value)}", "parts": []}
    if not readers or not all(name.startswith("__") for name in vars(value)):
        raise JetGraphError(_NOT_A_FUNCTION)
    if value.__code__ in outer:
        raise JetGraphError(_RECURSIVE)
    outer = [*outer, value.__code__]
    name, *parts, variables = readers[0]()
    variables = [
        None if isinstance(v, types.FunctionType) and v.__code__ in outer else v for v in variables
    ]
    return _packed(name, [*parts, variables], outer, read)


def _packed(
    name: str, parts: list[Any], outer: list[types.CodeType], read: list[object]
) -> dict[str, Any]:
    return {_BUILDER: name, "parts": [_pack(part, outer, read) for part in parts]}


def _checked(value: object, read: list[object]) -> object:
    """Return a module or an object whose changes dynamo sees, as ``read`` has it from now on."""
    if not any(value is other for other in read):
        if why := _unread(value):
            raise JetGraphError(why)
        read.append(value)
    return value


def _unpack(value: Any, read: list[object]) -> Any:
    """Return what `_pack` took, and add to ``read`` what it did."""

    def build(packed: Any) -> Any:
        if not _is_packed(packed):
            return None if isinstance(packed, str) and packed == _NONE else packed
        name = packed[_BUILDER]
        built = _BUILDERS[name](*(_unpack(part, read) for part in packed["parts"]))
        if name.startswith(_READ) and not any(built is other for other in read):
            read.append(built)
        return built

    return pytree.tree_map(build, value, is_leaf=_is_packed)


def _is_packed(value: object) -> bool:
    return isinstance(value, dict) and _BUILDER in value


_BUILDERS: dict[str, Callable[..., Any]] = {
    "module": lambda module: module,
    "partial": lambda function, args, kwargs: functools.partial(function, *args, **kwargs),
    "method": types.MethodType,
}


def _modules(value: object, ids: list[int]) -> list[nn.Module]:
    """Return the modules that an object holds."""
    if isinstance(value, nn.Module):
        return [value]
    return [module for part in _parts(value, ids) for module in _modules(part, ids)]


def _trace_reader(context: ComptimeContext) -> None:
    """Add the `_readers` of `value` to `readers`, as dynamo has them.

    Dynamo has functions that it makes itself not as Python functions, whose cells could be read.
    """
    value: Any
    readers: Any
    value, readers = [
        context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
        for name in ("value", "readers")
    ]
    reader = copy.copy(value)
    function: Any = getattr(value, "fn", getattr(value, "value", None))
    with suppress(AttributeError, JetGraphError):
        if hasattr(value, "f_globals"):
            keywords = value.kwdefaults.keys_as_python_constant() if value.kwdefaults else ()
            count = len(value.defaults.items) if value.defaults else 0
            code = _reader_code(value.get_code(), value.f_globals, count, keywords)
            reader.code = type(value.code).create(code)
        else:
            reader.fn, *of_torch = _readers(function)
            readers.items += [reader for _ in of_torch]
        readers.items.append(reader)


def _readers(function: types.FunctionType) -> list[types.FunctionType]:
    """Return a function that returns what this one is made of: `_BUILDERS`' name of its code, what
    it closes over, its defaults, and the global variables that it reads.  Two of torch's, which
    are constants."""
    if function.__code__.co_filename.startswith(_TORCH):
        return [function, function]
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    code = _reader_code(function.__code__, function.__globals__, len(defaults), keywords)
    reader = types.FunctionType(
        code, function.__globals__, function.__name__, defaults, function.__closure__
    )
    reader.__kwdefaults__ = keywords
    return [reader]


def _reader_code(
    code: types.CodeType, variables: dict[str, Any], count: int, keywords: Iterable[str]
) -> types.CodeType:
    """Return the code of a `_readers`, of a function with these global variables and defaults."""
    names = sorted(n for n in _global_names(code) if _may_change(variables.get(n), variables))

    def build(
        cells: Args, defaults: Args, keywords: dict[str, object], values: list[object]
    ) -> Any:
        read = {n: value for n, value in zip(names, values, strict=True) if value is not None}
        if _settings(read) != _settings({n: variables[n] for n in read}):
            raise JetGraphError(_WRITTEN)
        closure = tuple(map(types.CellType, cells))
        function = types.FunctionType(code, variables, code.co_name, tuple(defaults), closure)
        function.__kwdefaults__ = keywords
        return function

    name = f"{code.co_name} {id(code)} {id(variables)} {names}"
    _BUILDERS[name] = build
    places = [f"jachess_{place}" for place in range(count)]
    arguments = [*places, *(["*", *keywords] if keywords else [])]
    cells, defaults = ("".join(f"{n}, " for n in part) for part in (code.co_freevars, places))
    by_name = ", ".join(f"{n!r}: {n}" for n in keywords)
    made = compile(
        f"def outer({cells}):\n"
        f" def reader({', '.join(arguments)}):\n"
        f"  return {name!r}, ({cells}), ({defaults}), {{{by_name}}}, [{', '.join(names)}]\n"
        " return reader",
        code.co_filename,
        "exec",
    )
    for _ in range(2):
        made = next(part for part in made.co_consts if isinstance(part, types.CodeType))
    if made.co_freevars != code.co_freevars:  # which are sorted, in every Python there is
        raise JetGraphError(_NOT_A_FUNCTION)
    return made


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of the global variables that code reads; a JetGraphError says it writes."""
    instructions = [*dis.get_instructions(code)]
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in instructions):
        raise JetGraphError(_NOT_A_FUNCTION)
    names = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return names.union(*map(_global_names, inner))


def _may_change(value: object, variables: dict[str, Any]) -> bool:
    """Return whether what a global variable holds is looked at: not what another file defines."""
    if isinstance(value, types.FunctionType):
        return value.__globals__ is variables
    return type(value) in _NUMBERS or not isinstance(value, _FIXED)


@_constant
def _constant_name(value: object) -> str:
    """Return the name of a builder of this value."""
    name = f"constant {id(value)}"
    _BUILDERS[name] = lambda: value
    return name


@_constant
def _object_name(value: object) -> str:
    """Return the name of a builder of this object, which it does not keep alive."""
    name = f"object {id(value)}"
    reference = weakref.ref(value)
    _BUILDERS[name] = lambda *modules: reference()
    return name


# ---- attributes of a module --------------------------------------------------------------------
#
# Dynamo guards what it reads itself, not what a non-strict region reads. So it reads every
# attribute here, and what it would not guard by its value breaks the graph.


Number: TypeAlias = bool | int | float | str | torch.SymInt | torch.SymFloat
_NUMBERS = (bool, int, float, str, torch.SymInt, torch.SymFloat)
# Guarded by value or identity as they are; a tensor that is no parameter or buffer is refused.
_FIXED = (
    *(Tensor, type(None), type, complex, bytes, range, slice, enum.Enum, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.ModuleType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    torch._ops.HigherOrderOperator,  # as which dynamo sees torch's checkpoint
)
_MUTABLE = (dict, list, set, collections.deque)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)


def _settings(value: object) -> tuple[Number, ...]:
    """Return the numbers, flags and names that a module holds, so that dynamo traces again where
    one changes."""
    numbers: list[Number] = []
    _read(value, numbers, [])
    return tuple(numbers)


def _read(value: object, numbers: list[Number], ids: list[int]) -> None:
    """Append the numbers, flags and names in a value, and the ids of the objects that it holds."""
    if isinstance(value, _NUMBERS):
        numbers.append(value)
        return
    for part in _parts(value, ids):
        _read(part, numbers, ids)


def _parts(value: object, ids: list[int]) -> list[Any]:
    """Return what a value holds; nothing of an object whose id is known, so that cycles end."""
    if isinstance(value, (*_FIXED, *_NUMBERS)):
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
    return function.__code__.co_filename.startswith(_TORCH)


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
def _unread(value: object) -> str | None:
    """Return which attribute is of a kind that `_read` does not know; None: none is."""
    for module in _modules(value, []):
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            return _LAZY
    attribute = _unknown(value, [], type(value).__name__)
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
def _unwritten(fn: Function) -> Iterator[None]:
    """Undo what tracing writes into attributes and closures, and refuse it: no graph writes them.

    A tensor in the place of another is undone without a word: the hooks of weight_norm write one at
    each call, and a graph that read it would be refused.
    """
    copies: list[tuple[Any, Any]] = []
    bound: list[tuple[str, types.CellType, object]] = []
    values: list[object] = [fn]
    ids: list[int] = []
    while values:
        value = values.pop()
        if isinstance(value, _MUTABLE):
            copies.append((value, value.copy()))
        if isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            bound += [(name, cell, cell.cell_contents) for name, cell in cells]
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
        for name, cell, before in bound:
            if not _is_same(cell.cell_contents, before):
                names.append(name)
                cell.cell_contents = before
    if names:
        raise JetGraphError(
            f"the function, or a module's forward, changes {', '.join(names)}, which a graph "
            "cannot do: return it, or hold it in a buffer that is written in place"
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
def _stacks(call: Call, x: object, directions: object, order: int, second: Second) -> Any:
    """Return the function's result with the stack ``[S, ...]`` of every jet."""

    def run() -> Any:
        fn = _function_of(call)
        inputs = check_inputs(x, directions, check_values=False)
        layout = begin_pass(inputs.count, order, second)
        with _pass_of(fn, layout, x):
            value = fn(*inputs.jets(layout))
        return map_tensors(
            value, lambda t: lift(t, layout).streams if carries_derivatives(t) else t
        )

    return _or_problem(run, x)


@torch._dynamo.nonstrict_trace
def _outputs(
    call: Call,
    primals: object,
    tangents: object,
    has_aux: bool,
    differentiable: bool,
    repeats: bool,
) -> Any:
    """Return what `jvp` returns."""

    def run() -> Any:
        fn = _function_of(call)
        if not _is_traced(primals):
            return eager_jvp(fn, primals, _with_none(tangents), has_aux, differentiable)
        as_jets = differentiable or not torch.is_grad_enabled()
        inputs, layout = with_tangents(primals, _with_none(tangents), as_jets)
        modules = nn.ModuleList(_modules(fn, []))
        once_more = traced_once_more(modules) if repeats else nullcontext()
        with _only_inputs(), _unwritten(fn), once_more:
            value = fn(*inputs)
        return split_output(value, has_aux, differentiable, layout)

    return _or_problem(run, primals)


def _is_traced(inputs: object) -> bool:
    """Return whether a non-strict region is traced; else it runs: where a graph broke within this
    file, or by the backend "eager"."""
    leaves = pytree.tree_leaves(inputs)
    return TracingContext.try_get() is not None or any(isinstance(x, FakeTensor) for x in leaves)


@contextmanager
def _pass_of(fn: Function, layout: JetLayout, inputs: object) -> Iterator[None]:
    """Hold the pass that a non-strict region makes."""
    if _is_traced(inputs):
        with _only_inputs(), _unwritten(fn):
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
