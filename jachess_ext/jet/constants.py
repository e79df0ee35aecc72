"""Tensors of a pass that carry no derivative yet, such as what `zeros_like` of a jet returns.

A model may write a jet into such a tensor, so it is one itself, with tangents of zero.  Until then
a function of such tensors alone is called as it is: a rule would multiply their tangents by its
slope, which gives NaN where that is infinite (a logarithm, root or power of an additive mask's 0).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .layout import each_tensor, map_tensors, replace_tensors
from .strides import memory_of, note_memory

# Storages of the constants of every pass that exist.
_STORAGES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_constant(tensor: Tensor) -> None:
    """Note that no derivative has been written into the memory of this tensor."""
    note_memory(tensor, _STORAGES)


def forget_constant(tensor: Tensor) -> None:
    """Note that a derivative may be written into the memory of this tensor."""
    if _STORAGES:
        _STORAGES.pop(memory_of(tensor), None)


def is_constant(tensor: Tensor) -> bool:
    """Return whether no derivative has been written into the memory of this tensor."""
    return bool(_STORAGES) and memory_of(tensor) in _STORAGES


def call_on_constants(func: Callable, args: tuple, named: dict, kind: type) -> Any:
    """Return a function of constants alone; NotImplemented where a derivative takes part, or where
    the result is a view, into which one may still be written.

    Args:
        kind: `DerivativeTensor`, whose file imports this one.
    """
    if not _STORAGES:
        return NotImplemented
    own: Any = [t for t in each_tensor((args, named)) if isinstance(t, kind)]
    if not all(tensor.is_constant() for tensor in own):
        return NotImplemented
    primals = {id(tensor): tensor.primal for tensor in own}
    memories = {memory_of(plain) for plain in primals.values()}

    def plain(tensor: Tensor) -> Tensor:
        return primals.get(id(tensor), tensor)

    result = func(*replace_tensors(args, plain), **replace_tensors(named, plain))
    written = {id(primals[id(tensor)]): tensor for tensor in own}
    for part in each_tensor(result):
        target = written.get(id(part))
        known = target is not None and target.shape == part.shape and target.dtype == part.dtype
        if not known and memory_of(part) in memories:
            return NotImplemented

    def wrapped(part: Tensor) -> Any:
        return written[id(part)] if id(part) in written else own[0].as_constant(part)

    return map_tensors(result, wrapped)
