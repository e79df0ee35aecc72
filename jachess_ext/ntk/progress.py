"""A progress bar over pairs of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(progress: bool | None, total: int) -> Iterator[Callable[[], Any]]:
    """A progress bar's step; a step that does nothing where none is wanted, or tqdm is missing.

    Args:
        progress: None: where a terminal looks on and there is more than one step.
    """
    if progress is False or (progress is None and total == 1):
        yield lambda: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if progress:
            raise ImportError("progress=True needs tqdm: pip install tqdm") from None
        yield lambda: None
        return
    # disable=None: silent where standard error is no terminal.
    with tqdm(
        total=total, desc="NTK", unit="block", disable=None if progress is None else False
    ) as shown:
        yield shown.update
