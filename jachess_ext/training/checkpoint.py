"""JacHess's own state beside the Trainer's in a checkpoint folder: JSON and safetensors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypedDict

from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors_torch
from torch import Tensor

from ..evaluation.files import write_atomically
from ..json_data import BadJSON, check, parse_json, read_json
from ..smoothness import JacHess
from .dual import DualSchedule
from .unlabelled import Position, UnlabelledBatches

STATE = "jachess.json"
UNLABELLED = "jachess_unlabelled.json"
SCHEDULE = "jachess_schedule.safetensors"
_COUNTS = "jachess"
_DIGITS = 9  # of a parameter's number
_LOG = logging.getLogger("jachess_ext")
Resumed = tuple[Position | None, dict[str, Any] | None]


class _Counts(TypedDict):
    taken: int
    passes: int


def save(
    folder: str | Path,
    regulariser: JacHess,
    unlabelled: UnlabelledBatches | None = None,
    dual: DualSchedule | None = None,
) -> None:
    """Write each file whole or not at all, ``jachess.json`` last."""
    folder = Path(folder)
    if dual is not None:
        write_atomically(folder / SCHEDULE, schedule_bytes(dual.state_dict()))
    if unlabelled is not None:
        write_atomically(folder / UNLABELLED, json.dumps(unlabelled.state_dict()))
    write_atomically(folder / STATE, json.dumps(regulariser.state_dict(), indent=1))


def load(folder: str | Path, regulariser: JacHess) -> None:
    """Restore the regulariser.

    Raises:
        FileNotFoundError: the checkpoint was written without JacHess, so that the base model's
            norms, which this regulariser needs, are not known (the checkpoint's model is no longer
            the base model).
        ValueError: the file is damaged, or of another model.
    """
    path = Path(folder) / STATE
    if not path.is_file():
        _without_state(folder, regulariser)
        return
    state = _read(path)
    try:
        regulariser.load_state_dict(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; resume from another checkpoint") from error


def _without_state(folder: str | Path, regulariser: JacHess) -> None:
    if not regulariser.strength:
        return
    if regulariser.needs_base and regulariser.base is None:
        raise FileNotFoundError(
            f"{folder} has no {STATE}, so the base model's norms are not known and the fine-tuned "
            "model's would not do: resume from a checkpoint of a JacHess run, or set "
            "trainer.regulariser.base (a BaseNorms) first"
        )
    _LOG.warning("%s has no %s: the directions start at step %d", folder, STATE, regulariser.step)


def load_rest(folder: str | Path, mode: str) -> Resumed:
    """What a mode with unlabelled data goes on from; what is missing starts anew, with a warning.

    Returns:
        How far the unlabelled data was read (modes joint and unlab), and what
        `DualSchedule.state_dict` gave (mode unlab); None where there is no such file.

    Raises:
        ValueError: a file is damaged.
    """
    names = {"train": (), "joint": (UNLABELLED,), "unlab": (UNLABELLED, SCHEDULE)}[mode]
    for name in names:
        if not (Path(folder) / name).is_file():
            what = "unlabelled data" if name == UNLABELLED else "the passes' AdamW"
            _LOG.warning("%s has no %s: %s starts anew", folder, name, what)
    return (
        load_unlabelled(folder) if UNLABELLED in names else None,
        load_schedule(folder) if SCHEDULE in names else None,
    )


def load_unlabelled(folder: str | Path) -> Position | None:
    """What `UnlabelledBatches.state_dict` gave, or None where there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / UNLABELLED
    if not path.is_file():
        return None
    state: Position = _read(path)
    try:
        check(state, Position, "the place in the unlabelled data")
        if min(state["round"], state["taken"]) < 0:
            raise BadJSON("the place in the unlabelled data is negative")
    except BadJSON as error:
        raise ValueError(f"{path}: {error}; resume from another checkpoint") from error
    return state


def schedule_bytes(state: dict[str, Any]) -> bytes:
    """What `DualSchedule.state_dict` gave as a safetensors file, counts as its metadata."""
    tensors = {
        f"{number}.{name}": tensor.detach().contiguous()
        for number, moments in state["moments"].items()
        for name, tensor in moments.items()
    }
    counts = json.dumps({"taken": state["taken"], "passes": state["passes"]})
    return safetensors_torch.save(tensors, {_COUNTS: counts})


def load_schedule(folder: str | Path) -> dict[str, Any] | None:
    """What `DualSchedule.state_dict` gave, or None where there is no file.

    Raises:
        ValueError: the file is damaged, or something else.
    """
    path = Path(folder) / SCHEDULE
    if not path.is_file():
        return None
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


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except BadJSON as error:
        raise ValueError(f"{path} {error}: resume from another checkpoint") from error
