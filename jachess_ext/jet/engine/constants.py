"""Constants of a pass: jets whose tangents are zero, such as the result of `zeros_like` of a jet.

A constant is a jet because a model may write a jet into it.  Until then a function of constants
alone is called on their primals: a rule would multiply the zero tangents by its slope, which gives
NaN where that is infinite (a logarithm, root or power of an additive mask's 0).
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage

from .layout import iter_tensors, map_tensors, replace_tensors
from .strides import record_storage, storage_id
from .types import Args, Function, Named

# Storages, not tensors, of all constants: a derivative that is written into one view shows in all
# views.
_STORAGES: weakref.WeakValueDictionary[int, UntypedStorage] = weakref.WeakValueDictionary()


def mark_constant(tensor: Tensor) -> None:
    """Record the storage of a tensor as one of constants."""
    record_storage(tensor, _STORAGES)


def unmark_constant(tensor: Tensor) -> None:
    """Record that a derivative may be written into the storage of a tensor."""
    if _STORAGES and (memory := storage_id(tensor)) is not None:
        _STORAGES.pop(memory, None)


def is_constant(tensor: Tensor) -> bool:
    """Return whether a tensor is a constant: no derivative was written into its storage."""
    return bool(_STORAGES) and storage_id(tensor) in _STORAGES


def call_on_constants(func: Function, args: Args, kwargs: Named, kind: type[Any]) -> object:
    """Return the function of the primals, as constants; NotImplemented where another jet is among
    the arguments, or where the result is a view, into which a derivative may still be written.

    Args:
        kind: `DerivativeTensor`, whose file imports this one.
    """
    if not _STORAGES:
        return NotImplemented
    constants = [t for t in iter_tensors((args, kwargs)) if isinstance(t, kind)]
    if not all(tensor.is_constant() for tensor in constants):
        return NotImplemented
    primals = {id(t): t.primal for t in constants}  # type: ignore[attr-defined]  # all have one
    memories = {storage_id(plain) for plain in primals.values()}

    def plain(tensor: Tensor) -> Tensor:
        return primals.get(id(tensor), tensor)

    result = func(*replace_tensors(args, plain), **replace_tensors(kwargs, plain))
    # A write in place returns the argument itself: the caller gets the jet that it passed.  Any
    # other result in an argument's storage is a view, which the rule makes of the jet, since a
    # derivative may be written into it later.
    written = {id(primals[id(tensor)]): tensor for tensor in constants}
    for part in iter_tensors(result):
        target = written.get(id(part))
        same = target is not None and target.shape == part.shape and target.dtype == part.dtype
        if not same and storage_id(part) in memories:
            return NotImplemented

    def wrapped(part: Tensor) -> Tensor:
        return written[id(part)] if id(part) in written else constants[0].make_constant(part)

    return map_tensors(result, wrapped)
