"""The regulariser's state beside the Trainer's own in a checkpoint folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from ..evaluation.files import write_atomically
from ..json_data import BadJSON, read_json
from ..smoothness import JacHess
from .dual import DualSchedule

STATE, SCHEDULE = "jachess.json", "jachess_schedule.pt"


def save(folder: str | Path, regulariser: JacHess, dual: DualSchedule | None) -> None:
    """Write ``jachess.json`` and, in mode unlab, ``jachess_schedule.pt``; whole or not at all."""
    folder = Path(folder)
    write_atomically(folder / STATE, json.dumps(regulariser.state_dict(), indent=1))
    if dual is not None:
        content = io.BytesIO()
        torch.save(dual.state_dict(), content)
        write_atomically(folder / SCHEDULE, content.getvalue())


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
        if regulariser.base is not None or not (regulariser.needs_base and regulariser.strength):
            return
        raise FileNotFoundError(
            f"{folder} has no {STATE}, so the base model's norms are not known and the fine-tuned "
            "model's would not do: resume from a checkpoint of a JacHess run, or set "
            "trainer.regulariser.base (a BaseNorms) first"
        )
    try:
        state = read_json(path)
    except BadJSON as error:
        raise ValueError(f"{path} {error}: resume from another checkpoint") from error
    try:
        regulariser.load_state_dict(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; resume from another checkpoint") from error


def load_schedule(folder: str | Path) -> dict[str, Any] | None:
    """What `DualSchedule.state_dict` gave, or None where there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / SCHEDULE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not the state of the alternating steps: {reason}") from error
    if not isinstance(state, dict) or set(state) != {"taken", "optimizer"}:
        raise ValueError(f"{path} is not the state of the alternating steps: it lacks its entries")
    return state
