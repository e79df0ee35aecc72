"""Functions as inputs of a non-strict region, which takes nests of tensors, modules and numbers
alone.

Anything else is packed as a dict: the name of a builder in `_BUILDERS`, and its arguments."""

from __future__ import annotations

import copy
import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.utils import _pytree as pytree

from ..engine.types import Args, Function
from .reachable import (
    FIXED,
    NONE,
    NUMBERS,
    TORCH_FOLDER,
    JetGraphError,
    modules_in,
    opaque_to_dynamo,
    settings,
    unreadable_attribute,
)

_NOT_A_FUNCTION = (
    "jx.jet within torch.compile takes an nn.Module, or a Python function that has no attributes "
    "of its own, writes no global variable and reads no NumPy number. Make it the forward of an "
    "nn.Module that holds the model"
)
_RECURSIVE = "the function closes over itself, which no argument of a graph does"
_WRITTEN = (
    "the compiled function changes attributes, or global variables, that this function reads, "
    "before it is differentiated. Change them outside of the compiled function"
)


_BUILDER = "jachess_ext.builder"
_READ_BUILDERS = ("module", "object")
_NUMPY = (np.generic, np.ndarray)


Call: TypeAlias = "tuple[object, tuple[object, ...]]"
"""A function as `pack` returns it, and the `settings` of the modules and objects in it.

Dynamo guards the settings, since they are inputs of the region.
"""


def pack_call(fn: Function) -> Call:
    """Return a function as inputs of a non-strict region."""
    read: list[object] = []
    packed = pack(fn, [], read)
    return packed, settings(read)


def unpack_call(call: Call) -> Any:
    """Return the function that `pack_call` packed; JetGraphError if its settings have changed."""
    packed, numbers = call
    read: list[object] = []
    fn = _unpack(packed, read)
    if numbers != settings(read):
        raise JetGraphError(_WRITTEN)
    return fn


def pack(value: object, outer: list[types.CodeType], read: list[object]) -> Any:
    """Return a value as inputs of a non-strict region.

    Args:
        outer: code objects of the functions whose closures hold the value, against recursion.
        read: the list to which modules and objects are appended, since the region reads their
            attributes.
    """
    if type(value) in (list, tuple, torch.Size):
        parts = [pack(part, outer, read) for part in value]  # type: ignore[attr-defined]
        return parts if type(value) is list else tuple(parts)
    return pytree.tree_map(lambda leaf: _pack_leaf(leaf, outer, read), value)


def _pack_leaf(value: Any, outer: list[types.CodeType], read: list[object]) -> Any:
    if value is None:
        return NONE
    if isinstance(value, Tensor) or type(value) in NUMBERS:
        return value
    if isinstance(value, nn.Module):
        return {_BUILDER: "module", "parts": [_record_read(value, read)]}
    if isinstance(value, functools.partial):
        return _pack_parts("partial", [value.func, value.args, value.keywords], outer, read)
    if isinstance(value, types.MethodType):
        return _pack_parts("method", [value.__func__, value.__self__], outer, read)
    if isinstance(value, FIXED):
        return {_BUILDER: f"{_constant_name(value)}", "parts": []}
    if isinstance(value, _NUMPY):  # which dynamo takes for tensors
        raise JetGraphError(_NOT_A_FUNCTION)
    if not isinstance(value, types.FunctionType):
        modules = modules_in(_record_read(value, read), [])
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
    return _pack_parts(name, [*parts, variables], outer, read)


def _pack_parts(
    name: str, parts: list[Any], outer: list[types.CodeType], read: list[object]
) -> dict[str, Any]:
    """Return the dict of a builder's name and its packed arguments."""
    return {_BUILDER: name, "parts": [pack(part, outer, read) for part in parts]}


def _record_read(value: object, read: list[object]) -> object:
    """Append a module or an object to ``read``, and return it; JetGraphError if it has attributes
    that dynamo cannot guard."""
    if not any(value is other for other in read):
        if why := unreadable_attribute(value):
            raise JetGraphError(why)
        read.append(value)
    return value


def _unpack(value: Any, read: list[object]) -> Any:
    """Invert `pack`, and append the same modules and objects to ``read``."""

    def build(packed: Any) -> Any:
        if not _is_packed(packed):
            return None if isinstance(packed, str) and packed == NONE else packed
        name = packed[_BUILDER]
        built = _BUILDERS[name](*(_unpack(part, read) for part in packed["parts"]))
        if name.startswith(_READ_BUILDERS) and not any(built is other for other in read):
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


def _trace_reader(context: ComptimeContext) -> None:
    """Append the `_readers` of the local ``value`` to the local ``readers``, as variables of
    dynamo.

    A function that is defined within the graph is no Python object yet, so that its cells cannot be
    read.
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
    """Return, in a list, a function that returns the parts of this one: the name of its builder,
    the values of its closure, its defaults, and the global variables that it reads.  For a function
    of torch, which is a constant, a list of two."""
    if function.__code__.co_filename.startswith(TORCH_FOLDER):
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
    """Return the code of the function that `_readers` returns.

    Args:
        code: the code of the function that is read.
        variables: its global variables.
        count: number of its positional defaults.
        keywords: names of its keyword defaults.
    """
    names = sorted(n for n in _global_names(code) if _may_change(variables.get(n), variables))

    def build(
        cells: Args, defaults: Args, keywords: dict[str, object], values: list[object]
    ) -> Any:
        read = {n: value for n, value in zip(names, values, strict=True) if value is not None}
        if settings(read) != settings({n: variables[n] for n in read}):
            raise JetGraphError(_WRITTEN)
        closure = tuple(map(types.CellType, cells))
        function = types.FunctionType(code, variables, code.co_name, tuple(defaults), closure)
        function.__kwdefaults__ = keywords
        return function

    name = f"{code.co_name} {id(code)} {id(variables)} {names}"
    _BUILDERS[name] = build
    slots = [f"jachess_{number}" for number in range(count)]
    arguments = [*slots, *(["*", *keywords] if keywords else [])]
    cells, defaults = ("".join(f"{n}, " for n in part) for part in (code.co_freevars, slots))
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
    """Return the names of the global variables that code reads; JetGraphError if it writes one."""
    instructions = [*dis.get_instructions(code)]
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in instructions):
        raise JetGraphError(_NOT_A_FUNCTION)
    names = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return names.union(*map(_global_names, inner))


def _may_change(value: object, variables: dict[str, Any]) -> bool:
    """Return whether a global variable is guarded: not a class, module, or function of another
    file."""
    if isinstance(value, types.FunctionType):
        return value.__globals__ is variables
    return type(value) in NUMBERS or not isinstance(value, FIXED)


@opaque_to_dynamo
def _constant_name(value: object) -> str:
    """Return the name of a builder that returns this value."""
    name = f"constant {id(value)}"
    _BUILDERS[name] = lambda: value
    return name


@opaque_to_dynamo
def _object_name(value: object) -> str:
    """Return the name of a builder that returns this object, by a weak reference."""
    name = f"object {id(value)}"
    reference = weakref.ref(value)
    _BUILDERS[name] = lambda *modules: reference()
    return name
