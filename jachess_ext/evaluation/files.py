"""Writing files and folders so that a reader never meets half of one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes `content` beside `path` and moves it into place; text as UTF-8.

    On any error the old file, if there was one, stays as it was and nothing is left beside it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder beside `path` to fill, and moves it into place at the end.

    A folder that stood there is replaced; on any error it stays, and nothing is left beside it.
    What a killed process left is cleared away by the next that writes the same folder; there must
    be one at a time.
    """
    partial = path.with_name(f".partial-{path.name}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            shutil.rmtree(path)
        partial.replace(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
