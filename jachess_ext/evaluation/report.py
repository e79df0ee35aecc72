"""Results on disk: JSON that any parser reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .files import write_atomically


def write_json(path: Path, content: Any) -> None:
    """Writes strict JSON to `path`, whole or not at all; NaN and infinities become null.

    Raises:
        TypeError: something JSON cannot hold; the file is not touched.
    """
    text = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text + "\n")


def finite(content: Any) -> Any:
    """Plain JSON values: arrays as lists, NaN and infinities as None."""
    if isinstance(content, dict):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    if hasattr(content, "tolist"):  # numpy arrays and scalars, torch tensors
        return finite(content.tolist())
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
