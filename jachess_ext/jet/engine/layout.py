"""The streams of a jet, `composed_rules`, and nests of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import setitem
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

from torch import Tensor, UntypedStorage

from ... import torch_private
from ...ops.library import MAX_DIRECTIONS as MAX_DIRECTIONS
from ...ops.library import Streams
from .autograd_functions import FORWARD_CODE, count_surrounding_functions
from .types import Function, T

ORDERS = (1, 2)
Second = Literal["pairs", "squares", "sum"]
"""The second-order streams: D²f[u_i, u_j] for each pair i < j ("pairs"), D²f[u_i, u_i] for each i
("squares"), or the sum of these squares ("sum")."""


class Pass:
    """One pass through a function, to which its jets belong.

    Attributes:
        ended: whether the function has returned.
        jets: the jets that exist, by id.
        saved_for_backward: ids of the storages of all jets that a function received as arguments
            and may have saved for backward.
        aliased: storages that a jet shares with a plain tensor (by `Tensor.detach`), by id.
        is_detached: whether `Tensor.detach` was called on any jet.
        forward_code: the Functions with the setting `forward_code` around the pass; a backward that
            recomputes a checkpoint uses them, too.
        overlapping: storages into which no write is allowed, by id: those of expanded inputs, and
            of copies where torch returns a view.
    """

    def __init__(self) -> None:
        self.ended = False
        self.is_detached = False
        self.forward_code = FORWARD_CODE.get()
        # Weak: a pass keeps no jet alive. Keys are ids, since jets compare element by element.
        self.jets: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.saved_for_backward: set[int | None] = set()
        self.aliased: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()
        self.overlapping: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()


@dataclass(frozen=True)
class JetLayout(Streams):
    """The streams of a jet along ``q`` directions, stacked in front of the tensor: ``[S, ...]``.

    Stream 0 is the primal x0; streams 1..q are the first-order coefficients x_i; the last P are of
    second order (docs/how_it_works.md, 2-jets): one for each pair i < j in lexicographic order, one
    for each of the first ``squares`` directions, or the sum of the latter.  Order 1 has none.

    Attributes:
        jet_pass: the pass that the jets belong to; no function takes jets of two passes.  None for
            the result of a pass.
        composed: whether the pass uses no compiled operators (`composed_rules`).
        num_surrounding: the result of `count_surrounding_functions` at the beginning of the pass.

    Examples:
        >>> layout = jx.jet(torch.sin, torch.zeros(3), torch.ones(3, 3)).layout
        >>> layout.streams, layout.first, layout.pairs
        (7, slice(1, 4, None), ((0, 1), (0, 2), (1, 2)))
    """

    jet_pass: Pass | None = None
    composed: bool = False
    num_surrounding: int | None = None

    def begin(self) -> JetLayout:
        """Return this layout for the jets of a new pass."""
        return replace(
            self,
            jet_pass=Pass(),
            composed=not operators_enabled(),
            num_surrounding=count_surrounding_functions(),
        )

    @property
    def first(self) -> slice:
        """Return the slice of the q first-order streams in the stack."""
        return slice(1, 1 + self.directions)

    @property
    def second(self) -> slice:
        """Return the slice of the P second-order streams in the stack."""
        return slice(1 + self.directions, self.streams)

    def without_pass(self) -> JetLayout:
        """Return this layout for the result of a pass, which belongs to no pass."""
        return replace(self, jet_pass=None, composed=False, num_surrounding=None)


@lru_cache
def make_layout(
    directions: int, order: int, second: Second = "pairs", squares: int | None = None
) -> JetLayout:
    """Return the layout for ``directions`` directions at ``order`` (1 or 2).

    Args:
        squares: the number of directions, counted from the first, that have second derivatives;
            None: all.  Only for "squares" and "sum".

    Raises:
        ValueError: ``order`` or ``second`` is not supported; ``directions`` is 0, or more than 4
            with pairs.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order}, but jets exist for order 1 and 2; pass order=1 or 2")
    if second not in get_args(Second):
        raise ValueError(f"second is {second!r}; expected one of {', '.join(get_args(Second))}")
    if directions < 1:
        raise ValueError("no direction was given; expected one at least")
    if order == 2 and second == "pairs" and directions > MAX_DIRECTIONS:
        raise ValueError(
            f"{directions} directions were given, but a jet carries the pairs of 1 to "
            f"{MAX_DIRECTIONS}; split them over several passes, or pass second='squares' or 'sum'"
        )
    if order == 1 or second == "pairs":
        return JetLayout(directions, order)
    squares = directions if squares is None else squares
    return JetLayout(directions, squares=squares, summed=second == "sum")


# ---- compiled operators --------------------------------------------------------------------


_OPERATORS: ContextVar[bool] = ContextVar("jachess_ext.operators", default=True)


def operators_enabled() -> bool:
    """Return whether a pass that begins now uses the compiled operators of `jachess_ext.ops`.

    `JetLayout.begin` calls it once in a pass: a backward that recomputes a checkpoint, after the
    context has ended or on another thread, then uses the same rules as the forward.
    """
    return _OPERATORS.get()


@contextmanager
def composed_rules() -> Iterator[None]:
    """Compute jets without the compiled operators, by rules composed of torch functions.

    It holds for passes that begin within this context, and for their backward.  Use it for checks
    and benchmarks.

    Examples:
        >>> with composed_rules():
        ...     jx.jet(torch.sin, torch.zeros(1), torch.ones(1, 1)).first
        tensor([[1.]])
    """
    token = _OPERATORS.set(False)
    try:
        yield
    finally:
        _OPERATORS.reset(token)


# ---- nests of tensors ------------------------------------------------------------------------


def map_tensors(
    value: Any,
    replace_tensor: Callable[[Tensor], object],
    replace_other: Callable[[object], object] | None = None,
) -> Any:
    """Replace every tensor in a nest of tuples, lists, dicts, dataclasses and other nodes of
    `torch.utils._pytree`.

    Args:
        replace_tensor: maps a tensor to the object that replaces it.
        replace_other: the same for leaves that are no tensors; None leaves them unchanged.
    """

    def convert(child: object) -> Any:
        return map_tensors(child, replace_tensor, replace_other)

    if isinstance(value, Tensor):
        return replace_tensor(value)
    if isinstance(value, dict):
        items = {key: convert(item) for key, item in value.items()}
        return items if type(value) is dict else _copy_with(value, items.items(), setitem)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[convert(item) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([convert(item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        entries = {name: convert(getattr(value, name)) for name in names}
        return _copy_with(value, entries.items(), object.__setattr__)
    # Flatten one level only: a dataclass further inside is no node of pytree.
    children, structure = torch_private.pytree.tree_flatten(
        value, is_leaf=lambda child: child is not value
    )
    if structure.is_leaf():
        return value if replace_other is None else replace_other(value)
    return torch_private.pytree.tree_unflatten([convert(child) for child in children], structure)


def _copy_with(value: T, entries: Iterable[tuple[object, object]], assign: Function) -> T:
    """Return a copy with other entries, which a constructor would compute from other tensors."""
    result = copy(value)
    for name, entry in entries:
        assign(result, name, entry)
    return result


def iter_tensors(value: object) -> Iterator[Tensor]:
    """Yield every tensor in a call's arguments or results, nested in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)


def replace_tensors(value: T, replace_tensor: Callable[[Tensor], object]) -> T:
    """Replace every tensor in a call's arguments; faster than `map_tensors`.

    Tuples, lists and dicts are rebuilt; named tuples are left as they are.
    """
    # Called for the arguments of every torch function of a pass.
    if isinstance(value, Tensor):
        return replace_tensor(value)  # type: ignore[return-value]  # a tensor for a tensor
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([replace_tensors(item, replace_tensor) for item in value])
    if isinstance(value, dict):
        return {k: replace_tensors(item, replace_tensor) for k, item in value.items()}  # type: ignore[return-value]
    return value
