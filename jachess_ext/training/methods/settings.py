"""Declarations of a method's settings: default values and the checks of other values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import TypeGuard, TypeVar

T = TypeVar("T")
Check = Callable[[object], bool]


def setting(default: T, expected: str, is_valid: Check) -> T:
    """Declare a setting whose values `Method` checks.

    Args:
        expected: description of the valid values, for the error message.
        is_valid: returns whether a value is valid.
    """
    return field(default=default, metadata={"expected": expected, "is_valid": is_valid})


def choice(default: str, choices: tuple[str, ...]) -> str:
    """Declare a setting that is one of several words."""
    return setting(default, f"one of {', '.join(choices)}", lambda value: value in choices)


def fixed(value: T) -> T:
    """Declare that a setting of the base class has this fixed value in the subclass, where it is no
    longer a setting."""
    return field(default=value, init=False, repr=False)


def _setting_kind(expected: str, is_valid: Check) -> Callable[[T], T]:
    return lambda default: setting(default, expected, is_valid)


def _number(value: object) -> TypeGuard[float]:
    # True is an int in Python, but "strength=yes" is a mistake.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: object) -> bool:
    return type(value) is int and value >= 1


positive = _setting_kind("a number above 0", lambda v: _number(v) and 0 < v < math.inf)
nonnegative = _setting_kind("a number from 0 up", lambda v: _number(v) and 0 <= v < math.inf)
share = _setting_kind("a share between 0 and 1", lambda v: _number(v) and 0 < v < 1)
share_or_zero = _setting_kind("a share from 0 to below 1", lambda v: _number(v) and 0 <= v < 1)
fraction = _setting_kind("a share from 0 to 1", lambda v: _number(v) and 0 <= v <= 1)
flag = _setting_kind("yes or no", lambda v: isinstance(v, bool))
count = _setting_kind("a whole number from 1 up", _count)
count_or_none = _setting_kind("a whole number from 1 up", lambda v: v is None or _count(v))
