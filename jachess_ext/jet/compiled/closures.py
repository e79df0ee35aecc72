"""Functions as inputs of a non-strict region (`regions.py`), which takes only nests of tensors,
modules and numbers.

Any other object is packed as a dict: the name of a builder in `_BUILDERS`, and the builder's
arguments."""

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
from torch._dynamo.guards import GuardBuilder, install_guard
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
_CHANGED_SETTINGS = (
    "the compiled function changes attributes, or global variables, that this function reads, "
    "before it is differentiated. Change them outside of the compiled function"
)


_BUILDER = "jachess_ext.builder"
_OBJECT_BUILDERS = ("module", "object")
_NUMPY = (np.generic, np.ndarray)


Call: TypeAlias = "tuple[object, tuple[object, ...]]"
"""A function as `pack` returns it, and the `settings` of the modules and objects that it uses.

Dynamo guards the settings, since they are inputs of the region.
"""


def pack_call(fn: Function) -> Call:
    """Return a function as inputs of a non-strict region."""
    objects: list[object] = []
    return pack(fn, [], objects), settings(objects)


def unpack_call(call: Call) -> Any:
    """Return the function that `pack_call` packed; raise JetGraphError if its settings have
    changed."""
    packed, packed_settings = call
    objects: list[object] = []
    fn = _unpack(packed, objects)
    if packed_settings != settings(objects):
        raise JetGraphError(_CHANGED_SETTINGS)
    return fn


def pack(value: object, outer_codes: list[types.CodeType], objects: list[object]) -> Any:
    """Return a value as inputs of a non-strict region.

    Args:
        outer_codes: the code objects of the functions whose closures hold the value.  If ``value``
            is one of these functions, it closes over itself, which is refused.
        objects: a list to which the modules and objects in the value are appended: the region
            reads their attributes.
    """
    if type(value) in (list, tuple, torch.Size):
        items = [pack(item, outer_codes, objects) for item in value]  # type: ignore[attr-defined]
        return items if type(value) is list else tuple(items)
    return pytree.tree_map(lambda leaf: _pack_leaf(leaf, outer_codes, objects), value)


def _pack_leaf(value: Any, outer: list[types.CodeType], objects: list[object]) -> Any:
    if value is None:
        return NONE
    if isinstance(value, Tensor) or type(value) in NUMBERS:
        return value
    if isinstance(value, nn.Module):
        return {_BUILDER: "module", "arguments": [_record_object(value, objects)]}
    if isinstance(value, functools.partial):
        return _pack_builder("partial", [value.func, value.args, value.keywords], outer, objects)
    if isinstance(value, types.MethodType):
        return _pack_builder("method", [value.__func__, value.__self__], outer, objects)
    if isinstance(value, FIXED):
        comptime(_guard_identity)
        return {_BUILDER: f"{_register_constant(value)}", "arguments": []}
    if isinstance(value, _NUMPY):  # dynamo would take it for a tensor
        raise JetGraphError(_NOT_A_FUNCTION)
    if not isinstance(value, types.FunctionType):
        modules = modules_in(_record_object(value, objects), [])
        return {_BUILDER: f"{_register_object(value)}", "arguments": modules}
    readers: list[Any] = []
    comptime(_trace_reader, lambda: readers.extend(_readers(value)))
    if len(readers) > 1:  # a function of torch
        return {_BUILDER: f"{_register_constant(value)}", "arguments": []}
    if not readers or not all(name.startswith("__") for name in vars(value)):
        raise JetGraphError(_NOT_A_FUNCTION)
    if value.__code__ in outer:
        raise JetGraphError(_RECURSIVE)
    outer = [*outer, value.__code__]
    name, *arguments, variables = readers[0]()
    variables = [
        None if isinstance(v, types.FunctionType) and v.__code__ in outer else v for v in variables
    ]
    return _pack_builder(name, [*arguments, variables], outer, objects)


def _pack_builder(
    name: str, arguments: list[Any], outer_codes: list[types.CodeType], objects: list[object]
) -> dict[str, Any]:
    """Return the dict of a builder's name and its packed arguments."""
    return {_BUILDER: name, "arguments": [pack(value, outer_codes, objects) for value in arguments]}


def _record_object(value: object, objects: list[object]) -> object:
    """Append a module or an object to ``objects``, and return it; raise JetGraphError if it has an
    attribute that dynamo cannot guard."""
    if not any(value is other for other in objects):
        if reason := unreadable_attribute(value):
            raise JetGraphError(reason)
        objects.append(value)
    return value


def _unpack(value: Any, objects: list[object]) -> Any:
    """Invert `pack`, and append the same modules and objects to ``objects``."""

    def build(packed: Any) -> Any:
        if not _is_packed(packed):
            return None if isinstance(packed, str) and packed == NONE else packed
        name = packed[_BUILDER]
        built = _BUILDERS[name](*(_unpack(value, objects) for value in packed["arguments"]))
        if name.startswith(_OBJECT_BUILDERS) and not any(built is other for other in objects):
            objects.append(built)
        return built

    return pytree.tree_map(build, value, is_leaf=_is_packed)


def _is_packed(value: object) -> bool:
    return isinstance(value, dict) and _BUILDER in value


_BUILDERS: dict[str, Callable[..., Any]] = {
    "module": lambda module: module,
    "partial": lambda function, args, kwargs: functools.partial(function, *args, **kwargs),
    "method": types.MethodType,
}


def _guard_identity(context: ComptimeContext) -> None:
    """Guard the identity of the caller's local variable ``value``.

    By itself dynamo guards only that a class in a closure is a class, not which one it is.
    """
    tracker = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    if (source := tracker.realize().source) is not None:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _trace_reader(context: ComptimeContext) -> None:
    """Append the reader (`_readers`) of the function ``value`` to the list ``readers``.

    Both are local variables of the caller, and here variables of dynamo: a function that is defined
    within the graph is no Python object yet, so that Python cannot read its closure.
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
            reader.fn, *duplicates = _readers(function)  # a duplicate marks a function of torch
            readers.items += [reader for _ in duplicates]
        readers.items.append(reader)


def _readers(function: types.FunctionType) -> list[types.FunctionType]:
    """Return a list that holds the reader of a function; for a function of torch, twice itself.

    The reader is another function with the same closure.  It returns the name of the function's
    builder and the arguments of the builder: the values of the closure, the defaults, and the
    global variables that the function reads.  A function of torch is a constant and needs no
    reader.
    """
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
    code: types.CodeType, variables: dict[str, Any], num_defaults: int, keywords: Iterable[str]
) -> types.CodeType:
    """Register the builder of a function, and return the code of its reader (`_readers`).

    Args:
        code: the code of the function.
        variables: the function's global variables.
        num_defaults: the number of its positional defaults.
        keywords: the names of its keyword defaults.
    """
    names = sorted(n for n in _global_names(code) if _may_change(variables.get(n), variables))

    def build(
        cells: Args, defaults: Args, keywords: dict[str, object], values: list[object]
    ) -> Any:
        packed = {n: value for n, value in zip(names, values, strict=True) if value is not None}
        if settings(packed) != settings({n: variables[n] for n in packed}):
            raise JetGraphError(_CHANGED_SETTINGS)
        closure = tuple(map(types.CellType, cells))
        function = types.FunctionType(code, variables, code.co_name, tuple(defaults), closure)
        function.__kwdefaults__ = keywords
        return function

    name = f"{code.co_name} {id(code)} {id(variables)} {names}"
    _BUILDERS[name] = build
    parameters = [f"jachess_{number}" for number in range(num_defaults)]
    signature = [*parameters, *(["*", *keywords] if keywords else [])]
    cells, defaults = ("".join(f"{n}, " for n in ns) for ns in (code.co_freevars, parameters))
    keyword_items = ", ".join(f"{n!r}: {n}" for n in keywords)
    reader = compile(
        f"def outer({cells}):\n"
        f" def reader({', '.join(signature)}):\n"
        f"  return {name!r}, ({cells}), ({defaults}), {{{keyword_items}}}, [{', '.join(names)}]\n"
        " return reader",
        code.co_filename,
        "exec",
    )
    for _ in range(2):  # the code of `outer`, then that of `reader`
        reader = next(value for value in reader.co_consts if isinstance(value, types.CodeType))
    if reader.co_freevars != code.co_freevars:  # every Python so far sorts them
        raise JetGraphError(_NOT_A_FUNCTION)
    return reader


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of the global variables that code reads; raise JetGraphError if it writes
    one."""
    instructions = [*dis.get_instructions(code)]
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in instructions):
        raise JetGraphError(_NOT_A_FUNCTION)
    names = {i.argval for i in instructions if i.opname == "LOAD_GLOBAL"}
    inner_codes = (value for value in code.co_consts if isinstance(value, types.CodeType))
    return names.union(*map(_global_names, inner_codes))


def _may_change(value: object, variables: dict[str, Any]) -> bool:
    """Return whether the value of a global variable has to be guarded.

    Modules, and functions of other files, are taken for constants.

    Args:
        variables: the global variables of the file.
    """
    if isinstance(value, types.FunctionType):
        return value.__globals__ is variables
    return isinstance(value, (type, *NUMBERS)) or not isinstance(value, FIXED)


@opaque_to_dynamo
def _register_constant(value: object) -> str:
    """Return the name of a builder that returns this value."""
    name = f"constant {id(value)}"
    _BUILDERS[name] = lambda: value
    return name


@opaque_to_dynamo
def _register_object(value: object) -> str:
    """Return the name of a builder that returns this object, held by a weak reference."""
    name = f"object {id(value)}"
    reference = weakref.ref(value)
    _BUILDERS[name] = lambda *modules: reference()
    return name
