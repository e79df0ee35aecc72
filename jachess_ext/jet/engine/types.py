"""Types that the jets and their rules share; a `JetTensor` is a `Tensor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")
Operand: TypeAlias = "Tensor | complex"
"""What torch's arithmetic takes: a tensor, or a number (``complex`` includes int and float)."""
Dims: TypeAlias = "int | Sequence[int] | None"
Index: TypeAlias = "Tensor | int | slice | Sequence[int] | None"
Function: TypeAlias = Callable[..., object]
"""A torch function, or another whose arguments are a caller's business."""
Args: TypeAlias = tuple[object, ...]
Named: TypeAlias = Mapping[str, object]
Rule: TypeAlias = Callable[..., Any]
"""Returns what its torch function returns, with jets for tensors; so does the function itself."""
