"""Tensors of a pass that carry no derivative yet, such as what `zeros_like` of a jet returns.

A model may write a jet into such a tensor, so it is one itself, with tangents of zero.  Until then
a function of such tensors alone is called as it is: a rule would multiply their tangents by its
slope, which gives NaN where that is infinite (a logarithm, root or power of an additive mask's 0).
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage

from .layout import iterate_tensors, map_tensors, replace_tensors
from .strides import record_storage, storage_id
from .types import Args, Function, Named

# Storages of the constants of every pass that exist.  Memory is noted, not tensors: a derivative
# that is written into one view has to end all the others, too.
_STORAGES: weakref.WeakValueDictionary[int, UntypedStorage] = weakref.WeakValueDictionary()


def mark_constant(tensor: Tensor) -> None:
    """Note that no derivative has been written into the memory of this tensor."""
    record_storage(tensor, _STORAGES)


def unmark_constant(tensor: Tensor) -> None:
    """Note that a derivative may be written into the memory of this tensor."""
    if _STORAGES and (memory := storage_id(tensor)) is not None:
        _STORAGES.pop(memory, None)


def is_constant(tensor: Tensor) -> bool:
    """Return whether no derivative has been written into the memory of this tensor."""
    return bool(_STORAGES) and storage_id(tensor) in _STORAGES


def call_on_constants(func: Function, args: Args, kwargs: Named, kind: type[Any]) -> object:
    """Return a function of constants alone; NotImplemented where a derivative takes part, or where
    the result is a view, into which one may still be written.

    Args:
        kind: `DerivativeTensor`, whose file imports this one.
    """
    if not _STORAGES:
        return NotImplemented
    constants = [t for t in iterate_tensors((args, kwargs)) if isinstance(t, kind)]
    if not all(tensor.is_constant() for tensor in constants):
        return NotImplemented
    primals = {id(t): t.primal for t in constants}  # type: ignore[attr-defined]  # all have one
    memories = {storage_id(plain) for plain in primals.values()}

    def plain(tensor: Tensor) -> Tensor:
        return primals.get(id(tensor), tensor)

    result = func(*replace_tensors(args, plain), **replace_tensors(kwargs, plain))
    # Torch returns the argument itself from a write in place, and the caller expects the tensor
    # that it passed.  Anything else in an argument's memory is a view, which has to be a view of
    # the jet: a derivative may be written into it later.  The rule makes it.
    written = {id(primals[id(tensor)]): tensor for tensor in constants}
    for part in iterate_tensors(result):
        target = written.get(id(part))
        same = target is not None and target.shape == part.shape and target.dtype == part.dtype
        if not same and storage_id(part) in memories:
            return NotImplemented

    def wrapped(part: Tensor) -> Tensor:
        return written[id(part)] if id(part) in written else constants[0].make_constant(part)

    return map_tensors(result, wrapped)
