"""The error of a table that cannot be used."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = 100
quote = _SHORT.repr
"""Quotes what a user wrote, of long text the ends alone: damaged files have names of any length."""


class TableError(ValueError):
    """A table that cannot be used: what is wrong, and what was expected.

    Attributes:
        options: the arguments of `read_table` or `read_runs` that would answer it, by name.
    """

    def __init__(self, message: str, **options: Any) -> None:
        super().__init__(message)
        self.options = options

    def __str__(self) -> str:
        call = []
        for name, value in self.options.items():
            text = value if value == "N" else repr(value)  # N is the reader's to fill in
            call.append(f"{name}={text}" if name.isidentifier() else f"**{{{name!r}: {text}}}")
        return f"{self.args[0]}: {', '.join(call)}" if call else str(self.args[0])
