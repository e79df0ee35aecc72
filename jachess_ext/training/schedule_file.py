"""The alternating schedule's state as a safetensors file: moments, and its counts as metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..evaluation.files import write_atomically
from ..json_data import BadJSON, check, parse_json

_COUNTS = "jachess"
_DIGITS = 9  # of a parameter's number


class _Counts(TypedDict):
    taken: int
    passes: int


def write_schedule(path: Path, state: dict[str, Any]) -> None:
    """Write what `DualSchedule.state_dict` gave; whole or not at all."""
    tensors = {
        f"{number}.{name}": tensor.detach().contiguous()
        for number, moments in state["moments"].items()
        for name, tensor in moments.items()
    }
    counts = json.dumps({"taken": state["taken"], "passes": state["passes"]})
    write_atomically(path, save(tensors, {_COUNTS: counts}))


def read_schedule(path: Path) -> dict[str, Any]:
    """What `write_schedule` wrote.

    Raises:
        ValueError: the file is damaged, or something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            counts = parse_json((file.metadata() or {}).get(_COUNTS, "null"))
            check(counts, _Counts, "its metadata")
            names = file.keys()  # the file itself is no iterable
            return {**counts, "moments": _moments({name: file.get_tensor(name) for name in names})}
    except (SafetensorError, OSError, BadJSON) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} is not the state of the alternating steps: {reason}") from error


def _moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    moments: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        if not (number.isascii() and number.isdecimal() and len(number) <= _DIGITS and name):
            raise BadJSON(f"it has a tensor {key[:40]!r}")
        moments.setdefault(int(number), {})[name] = tensor
    return moments
