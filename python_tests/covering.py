"""Pairs of two lists as parameters: in `make test` a cover, in `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def pairs(
    first: Collection[Any], second: Collection[Any], each: int = 1, slow: Collection[Any] = ()
) -> list[Any]:
    """Every pair; slow but for `each` pairs of every entry of the longer list, taken along the
    diagonals, so that every entry of the shorter one is in as many or more.

    Args:
        slow: entries of the first list whose pairs are all slow.
    """
    quick = [a for a in first if a not in slow]
    shorter = min(len(quick), len(second))
    return [
        pytest.param(
            a,
            b,
            marks=()
            if a not in slow and (quick.index(a) - j) % shorter < each
            else pytest.mark.slow,
        )
        for a in first
        for j, b in enumerate(second)
    ]
