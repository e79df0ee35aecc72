"""Commands of `jachess`: functions whose signature and docstring are the options."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .._io import DataError


def check_ending(path: Path | None, *endings: str) -> None:
    """Raise DataError if a file name has none of these endings."""
    if path is not None and path.suffix not in endings:
        raise DataError(f"'{path}' is not a file name that ends in {' or '.join(endings)}")


def use_device(name: str) -> None:
    """Hide every other device from this process and those it starts.

    Trainer would spread a run over all visible GPUs; Ray gives each GPU runs of its own.

    Args:
        name: "cpu", "cuda" (the first GPU) or "cuda:N".

    Raises:
        DataError: Another name, no such GPU, or CUDA is in use already.
    """
    import torch

    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise DataError(f"the device {name!r} is not known; expected cpu, cuda or cuda:N")
    if torch.cuda.is_initialized():
        raise DataError("CUDA is in use in this process; choose the device before anything runs")
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    seen = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    place, count = int(match[1] or 0), torch.cuda.device_count()
    if place >= count:
        raise DataError(f"the device {name} is not there: this machine has {count} GPUs to use")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[place] if seen else str(place)
