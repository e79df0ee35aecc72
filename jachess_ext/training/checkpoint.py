"""The regulariser's state beside the Trainer's own in a checkpoint folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from ..smoothness import JacHess
from .dual import DualSchedule

STATE, SCHEDULE = "jachess.json", "jachess_schedule.pt"


def save(folder: str | Path, regulariser: JacHess, dual: DualSchedule | None) -> None:
    """Write ``jachess.json`` and, in mode unlab, ``jachess_schedule.pt``; whole or not at all."""
    folder = Path(folder)
    state, schedule = folder / STATE, folder / SCHEDULE
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps(regulariser.state_dict(), indent=1), encoding="utf-8")
    os.replace(partial, state)
    if dual is not None:
        partial = schedule.with_suffix(".partial")
        torch.save(dual.state_dict(), partial)
        os.replace(partial, schedule)


def load(folder: str | Path, regulariser: JacHess) -> None:
    """Restore the regulariser.

    Raises:
        FileNotFoundError: the checkpoint was written without JacHess, so that the base model's
            norms are not known (the checkpoint's model is no longer the base model).
    """
    path = Path(folder) / STATE
    if not path.is_file():
        if regulariser.base is not None:
            return
        raise FileNotFoundError(
            f"{folder} has no {STATE}, so the base model's norms are not known and the fine-tuned "
            "model's would not do: resume from a checkpoint of a JacHess run, or set "
            "trainer.regulariser.base (a BaseNorms) first"
        )
    regulariser.load_state_dict(json.loads(path.read_text(encoding="utf-8")))


def load_schedule(folder: str | Path) -> dict[str, Any] | None:
    """What `DualSchedule.state_dict` gave, or None where there is no file."""
    path = Path(folder) / SCHEDULE
    return torch.load(path, weights_only=True) if path.is_file() else None
