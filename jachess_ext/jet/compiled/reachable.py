"""The modules, attributes and closures that a function reaches, which dynamo has to guard.

Dynamo guards the attributes that it reads while it traces, not those that a non-strict region
reads.  So these functions, which dynamo traces, read every attribute; a value that dynamo cannot
guard breaks the graph."""

from __future__ import annotations

import collections
import enum
import functools
import os
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...ops.library import constant_when_compiled
from ..engine.types import Function, T

_LAZY = "the module has lazy layers, whose parameters have no shape yet: call it once before"


class JetGraphError(RuntimeError):
    """Raised if a jet cannot be computed within a graph; the message gives the reason."""


TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def opaque_to_dynamo(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function so that dynamo calls it without tracing it, and treats its result as a
    constant."""
    untraced = torch._dynamo.disable(function)

    @constant_when_compiled
    @functools.wraps(function)
    def run(*args: object) -> T:
        return untraced(*args)

    return run


def modules_in(value: object, ids: list[int]) -> list[nn.Module]:
    """Return the modules that an object holds at any depth, without their submodules.

    Args:
        ids: ids of the objects already visited; the ids of the objects in ``value`` are added.
    """
    if isinstance(value, nn.Module):
        return [value]
    return [module for child in contents(value, ids) for module in modules_in(child, ids)]


# Replaces None, which is no valid input of a non-strict region.
NONE = "jachess_ext.None"
Number: TypeAlias = bool | int | float | str | torch.SymInt | torch.SymFloat
NUMBERS = (bool, int, float, str, torch.SymInt, torch.SymFloat)
# Types that dynamo guards by value or identity; a tensor that is no parameter or buffer is refused.
FIXED = (
    *(Tensor, type(None), type, complex, bytes, range, slice, enum.Enum, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.ModuleType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    torch._ops.HigherOrderOperator,  # to dynamo, torch's checkpoint is one
)
# Attributes that dynamo cannot read: a module's compiled forward, which no region runs, and handles
# of transformers' hooks for gradient checkpointing; the hooks are read where they are registered.
_UNREAD = ("_compiled_call_impl", "_require_grads_hook", "_require_grads_hooks")
# OrderedDict first: dict.clear would leave its order as it was.
_MUTABLE = (collections.OrderedDict, dict, list, set, collections.deque)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)


def settings(value: object) -> tuple[Number, ...]:
    """Return the numbers, booleans and strings that a value holds at any depth, which dynamo
    guards."""
    numbers: list[Number] = []
    _collect_settings(value, numbers, [])
    return tuple(numbers)


def _collect_settings(value: object, numbers: list[Number], ids: list[int]) -> None:
    """Append the numbers, booleans and strings in a value to ``numbers``.

    Args:
        ids: ids of the objects already visited; the ids of the objects in ``value`` are added.
    """
    if isinstance(value, NUMBERS):
        numbers.append(value)
        return
    for child in contents(value, ids):
        _collect_settings(child, numbers, ids)


def contents(value: object, ids: list[int]) -> list[Any]:
    """Return the items, attributes or closure of a value; [] for an object already visited.

    Args:
        ids: ids of the objects already visited, to which that of ``value`` is added.
    """
    if isinstance(value, (*FIXED, *NUMBERS)):
        return []
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, dict | types.MappingProxyType):
        return [value[key] for key in value if key not in _UNREAD]
    if isinstance(value, _SEQUENCES):
        return list(value)
    if id(value) in ids:
        return []
    ids.append(id(value))
    if isinstance(value, types.FunctionType):
        if is_torch_function(value):  # dynamo needs no guard for it, and cannot read its defaults
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__defaults__, value.__kwdefaults__, *cells, vars(value)]
    attributes = [getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)]
    if hasattr(value, "__dict__"):
        attributes.append(vars(value))
    return attributes


@opaque_to_dynamo
def is_torch_function(function: types.FunctionType) -> bool:
    """Return whether a Python function is defined in torch."""
    return function.__code__.co_filename.startswith(TORCH_FOLDER)


@opaque_to_dynamo
def _slots(cls: type) -> list[str]:
    """Return the names of the attributes in the ``__slots__`` of a class and its bases.

    Python stores a private slot ``__name`` of a class ``_Base`` as ``_Base__name``.
    """
    names = [
        (base, name)
        for base in cls.__mro__
        for name in _as_names(vars(base).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    mangled_pairs = [(f"_{base.__name__.lstrip('_')}{name}", name) for base, name in names]
    return [m if n.startswith("__") and not n.endswith("__") else n for m, n in mangled_pairs]


def _as_names(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


@opaque_to_dynamo
def unreadable_attribute(value: object) -> str | None:
    """Describe an attribute of a value, at any depth, whose changes dynamo cannot guard; None if
    there is none."""
    for module in modules_in(value, []):
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            return _LAZY
    attribute = _find_unguarded(value, [], type(value).__name__)
    if attribute is None:
        return None
    cls, path = attribute
    return (
        f"{path} is a {cls.__module__}.{cls.__qualname__}, whose changes a graph does not see. "
        "Hold numbers, tensors (register_buffer), or lists and dicts of them in its place"
    )


def _find_unguarded(value: object, ids: list[int], path: str) -> tuple[type, str] | None:
    """Return the class and the path of the first value, at any depth, that dynamo cannot guard;
    None if there is none.

    Args:
        ids: ids of the objects already visited; the ids of the objects in ``value`` are added.
        path: the path of ``value``, such as ``Model._modules.head``.
    """
    cls = type(value)
    if isinstance(value, NUMBERS) and not isinstance(value, enum.Enum):
        return None if cls in NUMBERS else (cls, path)
    containers = (*FIXED, *_SEQUENCES, dict, types.MappingProxyType, functools.partial)
    functions = (types.MethodType, types.FunctionType)
    if not isinstance(value, (*containers, *functions)) and not _is_python_class(cls):
        return cls, path
    may_hold_extras = isinstance(value, (dict, *_SEQUENCES, functools.partial))
    if (may_hold_extras or cls in (Tensor, nn.Parameter)) and _extra_attributes(value):
        return cls, path
    try:
        children = contents(value, ids)
    except (ValueError, AttributeError):  # an empty cell
        return cls, path
    keys = [k for k in value if k not in _UNREAD] if isinstance(value, dict) else []
    for number, child in enumerate(children):
        suffix = f".{keys[number]}" if number < len(keys) else ""
        if attribute := _find_unguarded(child, ids, path + suffix):
            return attribute
    return None


def _extra_attributes(container: object) -> list[object]:
    """Return the attributes that a container, partial or tensor has beside its items, as diffusers'
    FrozenDict has; without booleans, and without attributes that are also items."""
    items = container if isinstance(container, dict) else {}
    return [
        value
        for name, value in getattr(container, "__dict__", {}).items()
        if not isinstance(value, bool) and items.get(name) is not value
        if not name.startswith("_dynamo")  # which dynamo itself sets on parameters
    ]


@contextmanager
def refuse_attribute_writes(fn: Function) -> Iterator[None]:
    """Return a context for a traced run of ``fn`` that undoes its writes into attributes and
    closures, which a graph cannot do, and raises JetGraphError if there were any.

    The replacement of a tensor by another tensor is undone without an error: the hooks of
    weight_norm replace one at each call, and a graph that used the new tensor would be refused.
    """
    copies: list[tuple[Any, Any]] = []
    all_cells: list[tuple[str, types.CellType, object]] = []
    values: list[object] = [fn]
    ids: list[int] = []
    while values:
        value = values.pop()
        if isinstance(value, _MUTABLE):
            copies.append((value, value.copy()))
        if isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            all_cells += [(name, cell, cell.cell_contents) for name, cell in cells]
        values.extend(contents(value, ids))
    names: list[str] = []
    try:
        yield
    finally:
        for container, original in copies:
            if changes := _changes(container, original):
                names += [name for name, is_tensor in changes if not is_tensor]
                cls: Any = next(c for c in _MUTABLE if isinstance(container, c))
                cls.clear(container)
                (cls.extend if hasattr(cls, "extend") else cls.update)(container, original)
        for name, cell, original in all_cells:
            if not _is_same(cell.cell_contents, original):
                names.append(name)
                cell.cell_contents = original
    if names:
        raise JetGraphError(
            f"the function, or a module's forward, changes {', '.join(names)}, which a graph "
            "cannot do: return it, or hold it in a buffer that is written in place"
        )


def _changes(container: Any, original: Any) -> list[tuple[str, bool]]:
    """Compare a container with a copy of its original state: return the name of each item that
    changed, and whether a tensor was replaced by a tensor."""
    if not isinstance(container, dict):
        is_same = len(container) == len(original) and all(map(_is_same, container, original))
        return [] if is_same else [(f"a {type(container).__name__}", False)]
    changes = []
    for name in {**original, **container}:
        a, b = original.get(name, NONE), container.get(name, NONE)
        if not _is_same(a, b):
            changes.append((str(name), isinstance(a, Tensor) and isinstance(b, Tensor)))
    return changes


def _is_same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, NUMBERS) and a == b)


def _is_python_class(cls: type) -> bool:
    """Return whether all data of a class's instances are attributes, as for a class written in
    Python, and none is readable by C code only."""
    is_heap_type = cls.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    num_pointers = len(_slots(cls)) + 2  # the two are __dict__ and __weakref__
    size = object.__basicsize__ + num_pointers * tuple.__itemsize__
    holds_only_pointers = cls.__basicsize__ <= size and not cls.__itemsize__
    return cls is types.SimpleNamespace or bool(is_heap_type and holds_only_pointers)
