"""The streams of a jet, `composed_rules`, and nests of tensors."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from torch import Tensor

from .. import torch_private
from ..ops.library import MAX_DIRECTIONS as MAX_DIRECTIONS
from .registry import surrounding_functions

ORDERS = (1, 2)


class Run:
    """One pass through a function, to which its jets belong.

    Attributes:
        ended: whether the function has returned.
        jets: the jets that exist, by id.
        read: memory of jets that some function has read, and may have saved for backward.
        given_out: storages of jets of which a plain tensor was taken (`Tensor.detach`).
        detached: whether a plain tensor was taken of any jet (`Tensor.detach`).
        expanded: storages of inputs that were expanded, and of views that had to be copied.
    """

    def __init__(self) -> None:
        self.ended = False
        self.detached = False
        self.jets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.read: set[Any] = set()
        self.given_out: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.expanded: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class JetLayout:
    """The streams of a jet along ``q`` directions, stacked in front of the tensor: ``[S, ...]``.

    Stream 0 is the primal x0; streams 1..q are the first-order coefficients x_i; the last P are
    the mixed second-order coefficients x_ij for the pairs i < j in lexicographic order
    (docs/how_it_works.md, 2-jets).  Order 1 has no pairs.

    Attributes:
        run: the pass that the jets belong to, so that a jet of another pass, along other
            directions, is refused; None in a result.
        composed: whether the pass uses no compiled operators (`composed_rules`).
        surrounding: how many autograd Functions the pass began inside of (registry.py).

    Example:
        >>> layout = jx.jet(torch.sin, torch.zeros(3), torch.ones(3, 3)).layout
        >>> layout.streams, layout.first, layout.pairs
        (7, slice(1, 4, None), ((0, 1), (0, 2), (1, 2)))
    """

    directions: int
    order: int
    pairs: tuple[tuple[int, int], ...]
    run: Run | None = None
    composed: bool = False
    surrounding: int | None = None

    def of_a_new_run(self) -> JetLayout:
        """Return this layout for the jets of a new pass."""
        return replace(
            self,
            run=Run(),
            composed=not operators_enabled(),
            surrounding=surrounding_functions(),
        )

    @property
    def streams(self) -> int:
        """Return S = 1 + q + P."""
        return 1 + self.directions + len(self.pairs)

    @property
    def first(self) -> slice:
        """Return where the q first-order streams lie."""
        return slice(1, 1 + self.directions)

    @property
    def second(self) -> slice:
        """Return where the P second-order streams lie."""
        return slice(1 + self.directions, self.streams)

    def pair_streams(self) -> list[tuple[int, int, int]]:
        """Return ``(stream of x_i, stream of x_j, stream of x_ij)`` for every pair."""
        start = 1 + self.directions
        return [(1 + i, 1 + j, start + n) for n, (i, j) in enumerate(self.pairs)]


@lru_cache
def make_layout(directions: int, order: int) -> JetLayout:
    """Return the layout for ``directions`` (1..4) directions at ``order`` (1 or 2).

    Raises:
        ValueError: the order or the number of directions is outside of that.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order}, but jets exist for order 1 and 2; pass order=1 or 2")
    if not 1 <= directions <= MAX_DIRECTIONS:
        raise ValueError(
            f"{directions} directions were given, but a jet carries 1 to {MAX_DIRECTIONS}; "
            "split more directions over several passes"
        )
    pairs = tuple(combinations(range(directions), 2)) if order == 2 else ()
    return JetLayout(directions, order, pairs)


# ---- compiled operators --------------------------------------------------------------------


_OPERATORS: ContextVar[bool] = ContextVar("jachess_ext.operators", default=True)


def operators_enabled() -> bool:
    """Return whether a pass that begins now uses the compiled operators of `jachess_ext.ops`.

    Asked once a pass (`JetLayout.of_a_new_run`), so that a backward that runs a checkpoint again,
    after the context or on another thread, uses what its forward used.
    """
    return _OPERATORS.get()


@contextmanager
def composed_rules() -> Iterator[None]:
    """Compose every rule of torch functions in passes that begin here, and in their backward.

    For checks and benchmarks: compiled operators are not called.

    Example:
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
    value: Any, apply: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None
) -> Any:
    """Replace every tensor in a nest of tuples, lists, dicts, dataclasses and whatever
    `torch.utils._pytree` knows.

    Args:
        other: replaces anything else; None leaves it.
    """

    def mapped(part: Any) -> Any:
        return map_tensors(part, apply, other)

    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, dict):
        items = {key: mapped(item) for key, item in value.items()}
        # transformers' ModelOutput is a dict that takes its items as keywords.
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([mapped(item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return replace(value, **{name: mapped(getattr(value, name)) for name in fields})
    children, structure = torch_private.pytree.tree_flatten(
        value, is_leaf=lambda part: part is not value
    )
    if structure.is_leaf():
        return value if other is None else other(value)
    return torch_private.pytree.tree_unflatten([mapped(part) for part in children], structure)


def each_tensor(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a call's arguments or results, nested in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from each_tensor(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from each_tensor(item)


def replace_tensors(value: Any, apply: Callable[[Tensor], Any]) -> Any:
    """Replace every tensor in a call's arguments; faster than `map_tensors`, for plain nests.

    Tuples, lists and dicts are rebuilt; named tuples are left as they are.
    """
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([replace_tensors(item, apply) for item in value])
    if isinstance(value, dict):
        return {key: replace_tensors(item, apply) for key, item in value.items()}
    return value
