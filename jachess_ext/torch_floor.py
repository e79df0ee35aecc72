"""The oldest torch that works.

Torch 2.10 to 2.15 were tested; newer ones are let through (`nox -s new_torch` tests them).
"""

from __future__ import annotations

import sys
from importlib import metadata

TORCH_FLOOR = (2, 10)


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as '2.13.0+cpu' or '5.0rc1'."""
    digits = ["".join(c for c in part if c.isdigit()) for part in version.split(".")[:2]]
    return int(digits[0] or 0), int(digits[1] or 0) if len(digits) > 1 else 0


def require_torch() -> None:
    """Raise ImportError where the installed torch is older than `TORCH_FLOOR`; import nothing."""
    if "torch" in sys.modules:
        version = str(sys.modules["torch"].__version__)
    else:
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return
    if release(version) < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        raise ImportError(
            f"jachess_ext needs torch {floor} or newer, but torch {version} is installed: "
            f"`pip install -U 'torch>={floor}'` (the package itself need not be built again)"
        )
