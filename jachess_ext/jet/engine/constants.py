"""Constants of a pass: jets whose tangents are zero, such as the result of `zeros_like` of a jet.

A constant is a jet because a model may write a jet into it.  Until then a function whose arguments
are all constants is called on their primals: a rule would multiply zero tangents by the slope,
which gives NaN where the slope is infinite (a logarithm, root or power of 0 in an additive mask).
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage

from .layout import iter_tensors, map_tensors, replace_tensors
from .strides import record_storage, storage_id
from .types import Args, Function, Named

# The storages of all constants, by id. Not the tensors: a derivative that is written into one view
# appears in all views.
_STORAGES: weakref.WeakValueDictionary[int, UntypedStorage] = weakref.WeakValueDictionary()


def mark_constant(tensor: Tensor) -> None:
    """Record the storage of a tensor as that of a constant."""
    record_storage(tensor, _STORAGES)


def unmark_constant(tensor: Tensor) -> None:
    """Record that the storage of a tensor is no constant's any more, as a derivative may be
    written into it."""
    if _STORAGES and (storage := storage_id(tensor)) is not None:
        _STORAGES.pop(storage, None)


def is_constant(tensor: Tensor) -> bool:
    """Return whether a tensor is a constant: no derivative was written into its storage."""
    return bool(_STORAGES) and storage_id(tensor) in _STORAGES


def call_on_constants(func: Function, args: Args, kwargs: Named, base_class: type[Any]) -> object:
    """Call a function on the primals, if all jets among its arguments are constants, and return the
    result as constants.

    Returns NotImplemented, so that the rule is called, if a jet is no constant, or if the result is
    a view, into which a derivative may still be written.

    Args:
        base_class: `DerivativeTensor`, whose file imports this one.
    """
    if not _STORAGES:
        return NotImplemented
    constants = [t for t in iter_tensors((args, kwargs)) if isinstance(t, base_class)]
    if not all(tensor.is_constant() for tensor in constants):
        return NotImplemented
    primals = {id(t): t.primal for t in constants}  # type: ignore[attr-defined]  # all have one
    storages = {storage_id(primal) for primal in primals.values()}

    def primal_of(tensor: Tensor) -> Tensor:
        return primals.get(id(tensor), tensor)

    result = func(*replace_tensors(args, primal_of), **replace_tensors(kwargs, primal_of))
    # A write in place returns the argument itself: the caller gets the jet that it passed.  Any
    # other result in an argument's storage is a view, into which a derivative may be written later,
    # so the rule has to return a view of the jet.
    jets = {id(primals[id(tensor)]): tensor for tensor in constants}
    for tensor in iter_tensors(result):
        jet = jets.get(id(tensor))
        is_argument = jet is not None and jet.shape == tensor.shape and jet.dtype == tensor.dtype
        if not is_argument and storage_id(tensor) in storages:
            return NotImplemented

    def wrap(tensor: Tensor) -> Tensor:
        return jets[id(tensor)] if id(tensor) in jets else constants[0].make_constant(tensor)

    return map_tensors(result, wrap)
