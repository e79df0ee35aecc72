"""How a callback of ours writes into a Trainer's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def write_entry(
    entry: dict[str, float],
    state: Any,
    control: Any,
    log: Callable[[dict[str, float]], None] | None,
) -> None:
    """An entry of its own, through ``log`` (the Trainer's) where given, else into the history.

    The Trainer takes a call of `Trainer.log` for the entry of this step that it owes itself, and
    would leave out the step's training loss: what is due stays due.
    """
    if log is None:
        state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})
        return
    due = control.should_log
    log(entry)
    control.should_log = due
