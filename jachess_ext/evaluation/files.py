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
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)  # as for files: mkdtemp's are their owner's alone
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
