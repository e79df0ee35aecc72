"""The oldest torch that serves, refused in one sentence where an older one took its place.

Torch 2.10 to 2.15 were tried; a newer one is not refused (`nox -s new_torch` tries it).
"""

from __future__ import annotations

import sys
from importlib import metadata

TORCH_FLOOR = (2, 10)


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as '2.13.0+cpu' or '5.0rc1'."""
    digits = ["".join(c for c in part if c.isdigit()) for part in version.split(".")[:2]]
    return int(digits[0] or 0), int(digits[1] or 0) if len(digits) > 1 else 0


def require_torch() -> None:
    """Checks the torch at hand, without importing it.

    Raises:
        ImportError: it is older than `TORCH_FLOOR`.
    """
    version = _installed_torch()
    if version is not None and release(version) < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        raise ImportError(
            f"jachess_ext needs torch {floor} or newer, but torch {version} is installed: "
            f"`pip install -U 'torch>={floor}'` (the package itself need not be built again)"
        )


def _installed_torch() -> str | None:
    """The version of the torch that is imported, or else would be; None where nobody knows."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
