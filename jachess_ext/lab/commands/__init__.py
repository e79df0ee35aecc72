"""Commands of `jachess`: functions whose signature and docstring are the options."""

from __future__ import annotations

from pathlib import Path

from ..._io import DataError


def check_ending(path: Path | None, *endings: str) -> None:
    """Raise DataError if a file name has none of these endings; None is accepted."""
    if path is not None and path.suffix not in endings:
        raise DataError(f"'{path}' is not a file name that ends in {' or '.join(endings)}")
