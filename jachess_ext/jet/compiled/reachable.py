"""The modules, attributes and closures that a function reaches, which dynamo has to guard.

Dynamo guards what it reads while it traces, not what a non-strict region reads.  So it reads every
attribute here, and a value that it cannot guard breaks the graph."""

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
    """Raised where a jet cannot be computed within a graph; the message says why."""


TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def opaque_to_dynamo(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function so that dynamo calls it untraced and takes its result for a constant."""
    outside_of_dynamo = torch._dynamo.disable(function)

    @constant_when_compiled
    @functools.wraps(function)
    def run(*args: object) -> T:
        return outside_of_dynamo(*args)

    return run


def modules_in(value: object, ids: list[int]) -> list[nn.Module]:
    """Return the modules that an object holds, not their submodules."""
    if isinstance(value, nn.Module):
        return [value]
    return [module for part in contents(value, ids) for module in modules_in(part, ids)]


# Stands for None, which a non-strict region does not take.
NONE = "jachess_ext.None"
Number: TypeAlias = bool | int | float | str | torch.SymInt | torch.SymFloat
NUMBERS = (bool, int, float, str, torch.SymInt, torch.SymFloat)
# Guarded by value or identity as they are; a tensor that is no parameter or buffer is refused.
FIXED = (
    *(Tensor, type(None), type, complex, bytes, range, slice, enum.Enum, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.ModuleType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    torch._ops.HigherOrderOperator,  # as which dynamo sees torch's checkpoint
)
_MUTABLE = (dict, list, set, collections.deque)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)


def settings(value: object) -> tuple[Number, ...]:
    """Return the numbers, booleans and strings that a value holds, at any depth; dynamo guards
    them."""
    numbers: list[Number] = []
    _read(value, numbers, [])
    return tuple(numbers)


def _read(value: object, numbers: list[Number], ids: list[int]) -> None:
    """Append the numbers, booleans and strings in a value to ``numbers``, and ids of its objects to
    ``ids``."""
    if isinstance(value, NUMBERS):
        numbers.append(value)
        return
    for part in contents(value, ids):
        _read(part, numbers, ids)


def contents(value: object, ids: list[int]) -> list[Any]:
    """Return the items, attributes or cells of a value; [] for an object in ``ids``, so that cycles
    end."""
    if isinstance(value, (*FIXED, *NUMBERS)):
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
        if is_torch_function(value):  # dynamo knows it by itself, and cannot read its defaults
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__defaults__, value.__kwdefaults__, *cells, vars(value)]
    parts = [getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)]
    if hasattr(value, "__dict__"):
        parts.append(vars(value))
    return parts


@opaque_to_dynamo
def is_torch_function(function: types.FunctionType) -> bool:
    """Return whether a Python function is defined in torch."""
    return function.__code__.co_filename.startswith(TORCH_FOLDER)


@opaque_to_dynamo
def _slots(kind: type) -> list[str]:
    """Return the names of the attributes in a class's slots.

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


@opaque_to_dynamo
def unreadable_attribute(value: object) -> str | None:
    """Return a sentence about an attribute whose changes dynamo cannot guard; None if there is
    none."""
    for module in modules_in(value, []):
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            return _LAZY
    attribute = _find_unguarded(value, [], type(value).__name__)
    if attribute is None:
        return None
    kind, path = attribute
    return (
        f"{path} is a {kind.__module__}.{kind.__qualname__}, whose changes a graph does not see. "
        "Hold numbers, tensors (register_buffer), or lists and dicts of them in its place"
    )


def _find_unguarded(value: object, ids: list[int], path: str) -> tuple[type, str] | None:
    """Return the class and the path of the first value that `_read` cannot read."""
    kind = type(value)
    if isinstance(value, NUMBERS) and not isinstance(value, enum.Enum):
        return None if kind in NUMBERS else (kind, path)
    containers = (*FIXED, *_SEQUENCES, dict, types.MappingProxyType, functools.partial)
    functions = (types.MethodType, types.FunctionType)
    if not isinstance(value, (*containers, *functions)) and not _is_python_class(kind):
        return kind, path
    may_hold_extras = isinstance(value, (dict, *_SEQUENCES, functools.partial))
    if (may_hold_extras or kind in (Tensor, nn.Parameter)) and _extra_attributes(value):
        return kind, path
    try:
        parts = contents(value, ids)
    except (ValueError, AttributeError):  # an empty cell
        return kind, path
    keys = list(value) if isinstance(value, dict) else []
    for number, part in enumerate(parts):
        suffix = f".{keys[number]}" if number < len(keys) else ""
        if attribute := _find_unguarded(part, ids, path + suffix):
            return attribute
    return None


def _extra_attributes(container: object) -> list[object]:
    """Return the attributes of a container, partial or tensor that are neither its items nor
    booleans, as diffusers' FrozenDict has them."""
    items = container if isinstance(container, dict) else {}
    return [
        value
        for name, value in getattr(container, "__dict__", {}).items()
        if not isinstance(value, bool) and items.get(name) is not value
        if not name.startswith("_dynamo")  # its own marks, of parameters
    ]


@contextmanager
def refuse_attribute_writes(fn: Function) -> Iterator[None]:
    """Undo writes into attributes and closures while ``fn`` is traced, and refuse them: a graph has
    none.

    The replacement of a tensor by another is undone silently: the hooks of weight_norm do so at
    each call, and a graph that read the new one would be refused.
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
        values.extend(contents(value, ids))
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
    """Return the names of the items of a container that changed, and whether each is a new
    tensor."""
    if not isinstance(now, dict):
        same = len(now) == len(before) and all(map(_is_same, now, before))
        return [] if same else [(f"a {type(now).__name__}", False)]
    changes = []
    for name in {**before, **now}:
        a, b = before.get(name, NONE), now.get(name, NONE)
        if not _is_same(a, b):
            changes.append((str(name), isinstance(a, Tensor) and isinstance(b, Tensor)))
    return changes


def _is_same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, NUMBERS) and a == b)


def _is_python_class(kind: type) -> bool:
    """Return whether instances of a class hold attributes alone, as those of Python classes do."""
    made_by_python = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    pointers = len(_slots(kind)) + 2  # to __dict__ and __weakref__
    size = object.__basicsize__ + pointers * tuple.__itemsize__
    small = kind.__basicsize__ <= size and not kind.__itemsize__
    return kind is types.SimpleNamespace or bool(made_by_python and small)
