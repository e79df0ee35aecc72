"""Where runs are made: chosen before CUDA starts, so that a run sees one GPU at most."""

from __future__ import annotations

import os
import re

import torch

from ..tasks.examples import DataError


def use_device(name: str) -> None:
    """Lets this process and those it starts see the device alone.

    Trainer would spread a run over all the GPUs it sees; for several, each with runs of its own,
    there is Ray.

    Args:
        name: "cpu", "cuda" (the first GPU) or "cuda:N".

    Raises:
        DataError: another name, no such GPU, or CUDA is in use already.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        raise DataError(f"the device {name!r} is not known; expected cpu, cuda or cuda:N")
    if torch.cuda.is_initialized():
        raise DataError("CUDA is in use in this process; choose the device before anything runs")
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    seen = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    place, count = int(found[1] or 0), torch.cuda.device_count()
    if place >= count:
        raise DataError(f"the device {name} is not there: this machine has {count} GPUs to use")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[place] if seen else str(place)
