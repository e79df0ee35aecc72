"""Which columns of a file hold what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns; without `pair`, the training file's `text_pair` if it has one.

    With `regression` labels are numbers to predict, not classes.
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    regression: bool = False
