"""What the callbacks that look at a model share: when they do, and how they write into a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback


class Looking(TrainerCallback):
    """Looks before training, every so many steps, and at the end.

    Attributes:
        log: the Trainer's ``log``, where its reporters get the entries; None: they go into the
            history alone.
    """

    every: int
    log: Callable[[dict[str, float]], None] | None = None
    _last: int | None = None  # the step of the last look

    def look(self, model: nn.Module, state: Any) -> dict[str, float] | None:
        """The entry to be logged by the first process, or None."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(kwargs["model"], state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._look(kwargs["model"], state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._last != state.global_step:
            self._look(kwargs["model"], state, control)

    def _look(self, model: nn.Module, state: Any, control: Any) -> None:
        self._last = state.global_step
        entry = self.look(model, state)
        if entry is None or not state.is_world_process_zero:
            return
        if self.log is None:
            state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})
        else:
            write_entry(entry, control, self.log)


def write_entry(entry: dict[str, float], control: Any, log: Callable[[dict], None]) -> None:
    """An entry of its own through the Trainer's ``log``.

    The Trainer takes a call of `Trainer.log` for the entry of this step that it owes itself, and
    would leave out the step's training loss: what is due stays due.
    """
    due = control.should_log
    log(entry)
    control.should_log = due
