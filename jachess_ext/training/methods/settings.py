"""How a method declares its settings: the default of each, and what else it may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import TypeGuard, TypeVar

T = TypeVar("T")
Check = Callable[[object], bool]


def setting(default: T, expected: str, good: Check) -> T:
    """Declare a setting whose values `Method` checks.

    Args:
        default: its value where none is given.
        expected: what it may be, to complete the error's text.
        good: tells whether a value may be.
    """
    return field(default=default, metadata={"expected": expected, "good": good})


def choice(default: str, choices: tuple[str, ...]) -> str:
    """Declare a setting that is one of several words."""
    return setting(default, f"one of {', '.join(choices)}", lambda value: value in choices)


def fixed(value: T) -> T:
    """Declare that the method has this value of a setting of its base, and none can be given."""
    return field(default=value, init=False, repr=False)


def _kind(expected: str, good: Check) -> Callable[[T], T]:
    return lambda default: setting(default, expected, good)


def _number(value: object) -> TypeGuard[float]:
    # True is an int in Python, and "strength=yes" a mistake
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: object) -> bool:
    return type(value) is int and value >= 1


positive = _kind("a number above 0", lambda v: _number(v) and 0 < v < math.inf)
nonnegative = _kind("a number from 0 up", lambda v: _number(v) and 0 <= v < math.inf)
share = _kind("a share between 0 and 1", lambda v: _number(v) and 0 < v < 1)
share_or_zero = _kind("a share from 0 to below 1", lambda v: _number(v) and 0 <= v < 1)
fraction = _kind("a share from 0 to 1", lambda v: _number(v) and 0 <= v <= 1)
flag = _kind("yes or no", lambda v: isinstance(v, bool))
count = _kind("a whole number from 1 up", _count)
count_or_none = _kind("a whole number from 1 up", lambda v: v is None or _count(v))
