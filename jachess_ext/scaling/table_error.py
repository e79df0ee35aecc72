"""The error of a table that cannot be used."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = 100
quote = _SHORT.repr
"""Quotes a text of the user, shortened in the middle if it is long, as in damaged files."""


class TableError(ValueError):
    """Raised for a table that cannot be used.

    Attributes:
        options: suggested keyword arguments of `read_table` or `read_runs` that would resolve the
            error, by name; the message ends with them.
    """

    def __init__(self, message: str, **options: Any) -> None:
        super().__init__(message)
        self.options = options

    def __str__(self) -> str:
        hints = []
        for name, value in self.options.items():
            text = value if value == "N" else repr(value)  # N is a number for the user to fill in
            hints.append(f"{name}={text}" if name.isidentifier() else f"**{{{name!r}: {text}}}")
        return f"{self.args[0]}: {', '.join(hints)}" if hints else str(self.args[0])
