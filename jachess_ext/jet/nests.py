"""Nests of tensors: what functions take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .. import torch_private


def map_tensors(
    value: Any, apply: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None
) -> Any:
    """``value`` with every tensor replaced; tuples, lists, dicts, dataclasses and what
    `torch.utils._pytree` knows are rebuilt.

    Args:
        other: what becomes of anything else; None leaves it.
    """

    def mapped(part: Any) -> Any:
        return map_tensors(part, apply, other)

    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, dict):
        return _rebuilt_mapping(value, {k: mapped(v) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([mapped(item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: mapped(getattr(value, f.name)) for f in _fields(value)}
        return dataclasses.replace(value, **fields)
    children, structure = torch_private.pytree.tree_flatten(
        value, is_leaf=lambda part: part is not value
    )
    if structure.is_leaf():
        return value if other is None else other(value)
    return torch_private.pytree.tree_unflatten([mapped(part) for part in children], structure)


def each_tensor(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a call's arguments or results, nested in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from each_tensor(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from each_tensor(item)


def _rebuilt_mapping(value: dict, items: dict) -> Any:
    """transformers' ModelOutput is a dict and takes its items as keywords."""
    return items if type(value) is dict else type(value)(**items)


def _fields(value: Any) -> tuple:
    return tuple(f for f in dataclasses.fields(value) if f.init)
