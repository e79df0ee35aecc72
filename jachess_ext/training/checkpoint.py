"""JacHess's own state beside the Trainer's in a checkpoint folder: JSON and safetensors."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evaluation.files import write_atomically
from ..json_data import BadJSON, check, read_json
from ..smoothness import JacHess
from .dual import DualSchedule
from .schedule_file import read_schedule, write_schedule
from .unlabelled import Position, UnlabelledBatches

STATE = "jachess.json"
UNLABELLED = "jachess_unlabelled.json"
SCHEDULE = "jachess_schedule.safetensors"
_LOG = logging.getLogger("jachess_ext")


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says of the modes with unlabelled data; None where it has no such file.

    Attributes:
        unlabelled: how far the unlabelled data was read; modes joint and unlab.
        schedule: as `DualSchedule.state_dict`; mode unlab.
    """

    unlabelled: Position | None
    schedule: dict[str, Any] | None


def save(
    folder: str | Path,
    regulariser: JacHess,
    unlabelled: UnlabelledBatches | None = None,
    dual: DualSchedule | None = None,
) -> None:
    """Write each file whole or not at all, ``jachess.json`` last."""
    folder = Path(folder)
    if dual is not None:
        write_schedule(folder / SCHEDULE, dual.state_dict())
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

    Raises:
        ValueError: a file is damaged.
    """
    names = {"train": (), "joint": (UNLABELLED,), "unlab": (UNLABELLED, SCHEDULE)}[mode]
    for name in names:
        if not (Path(folder) / name).is_file():
            what = "unlabelled data" if name == UNLABELLED else "the passes' AdamW"
            _LOG.warning("%s has no %s: %s starts anew", folder, name, what)
    return Resumed(
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
    state = _read(path)
    try:
        check(state, Position, "the place in the unlabelled data")
        if min(state["round"], state["taken"]) < 0:
            raise BadJSON("the place in the unlabelled data is negative")
    except BadJSON as error:
        raise ValueError(f"{path}: {error}; resume from another checkpoint") from error
    return {"round": state["round"], "taken": state["taken"]}


def load_schedule(folder: str | Path) -> dict[str, Any] | None:
    """What `DualSchedule.state_dict` gave, or None where there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / SCHEDULE
    return read_schedule(path) if path.is_file() else None


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except BadJSON as error:
        raise ValueError(f"{path} {error}: resume from another checkpoint") from error
