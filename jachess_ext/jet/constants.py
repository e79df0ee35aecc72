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

# Memory of the constants of every pass that exist.
_STORAGES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _storage(plain: Tensor | None) -> Any:
    """Return a tensor's memory; None where it has none, or a transform of torch.func hides it."""
    try:
        return None if plain is None else plain.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def note_constant(plain: Tensor) -> None:
    """Note that no derivative has been written into the memory of this tensor."""
    if (storage := _storage(plain)) is not None:
        _STORAGES[storage._cdata] = storage


def forget_constant(plain: Tensor) -> None:
    """Note that a derivative may be written into the memory of this tensor."""
    if _STORAGES and (storage := _storage(plain)) is not None:
        _STORAGES.pop(storage._cdata, None)


def is_constant(plain: Tensor | None) -> bool:
    """Return whether no derivative has been written into the memory of this tensor."""
    storage = _storage(plain) if _STORAGES else None
    return storage is not None and storage._cdata in _STORAGES


def call_on_constants(
    func: Callable,
    args: tuple,
    named: dict,
    kind: type,
    recorded: Callable[[Any], Tensor | None],
    primal: Callable[[Any], Tensor],
    wrap: Callable[[Tensor, Any], Any],
) -> Any:
    """Return a function of constants alone; NotImplemented where a derivative takes part, or where
    the result is a view, into which one may still be written.

    Args:
        kind: class of the tensors that carry derivatives.
        recorded: returns the tensor whose memory was noted; None for one not computed yet.
        primal: returns the plain tensor that the function is called with.
        wrap: makes a constant of a plain tensor, given one of the arguments.
    """
    if not _STORAGES:
        return NotImplemented
    own: Any = [t for t in each_tensor((args, named)) if isinstance(t, kind)]
    if not all(is_constant(recorded(tensor)) for tensor in own):
        return NotImplemented
    primals = {id(tensor): primal(tensor) for tensor in own}
    memory = {plain.untyped_storage()._cdata for plain in primals.values()}

    def plain(tensor: Tensor) -> Tensor:
        return primals.get(id(tensor), tensor)

    result = func(*replace_tensors(args, plain), **replace_tensors(named, plain))
    written = {id(primals[id(tensor)]): tensor for tensor in own}
    for part in each_tensor(result):
        target = written.get(id(part))
        known = target is not None and target.shape == part.shape and target.dtype == part.dtype
        if not known and part.untyped_storage()._cdata in memory:
            return NotImplemented

    def wrapped(part: Tensor) -> Any:
        return written[id(part)] if id(part) in written else wrap(part, own[0])

    return map_tensors(result, wrapped)
