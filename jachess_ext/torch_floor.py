"""The oldest torch that serves, refused in one sentence where an older one took its place."""

from __future__ import annotations

import torch

TORCH_FLOOR = (2, 10)


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as '2.13.0+cpu' or '5.0rc1'."""
    digits = ["".join(c for c in part if c.isdigit()) for part in version.split(".")[:2]]
    return int(digits[0] or 0), int(digits[1] or 0) if len(digits) > 1 else 0


def require_torch() -> None:
    """Checks the torch at hand.

    Raises:
        ImportError: it is older than `TORCH_FLOOR`.
    """
    version = torch.__version__
    if release(version) < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        raise ImportError(
            f"jachess_ext needs torch {floor} or newer, but torch {version} is installed: "
            f"`pip install -U 'torch>={floor}'` (the package itself need not be built again)"
        )
