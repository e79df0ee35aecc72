"""Types shared by the engine and its rules; a `JetTensor` is a `Tensor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")
A = TypeVar("A")
Operand: TypeAlias = "Tensor | complex"
"""An operand of torch's arithmetic: a tensor or a number (``complex`` includes int and float)."""
Dims: TypeAlias = "int | Sequence[int] | None"
Index: TypeAlias = "Tensor | int | slice | Sequence[int] | None"
Function: TypeAlias = Callable[..., object]
"""A torch function, or any other callable."""
Args: TypeAlias = tuple[object, ...]
Named: TypeAlias = Mapping[str, object]
Rule: TypeAlias = Callable[..., Any]
"""A jet rule: it takes the arguments of its torch function, some of them jets, and returns the same
results as jets."""
