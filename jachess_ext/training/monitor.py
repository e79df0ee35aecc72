"""`SmoothnessMonitor`: a model's smoothness over a Trainer's run, as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from ..smoothness.probe import SmoothnessProbe
from .callback_log import write_entry


class SmoothnessMonitor(TrainerCallback):
    """Looks at a model's smoothness before training, every so many steps, and at the end.

    It penalises nothing: training with it is bit for bit the training without it.

    Example:
        >>> trainer.add_callback(jx.SmoothnessMonitor(batch, every=50, log=trainer.log))

    The figures of `SmoothnessProbe` go to the Trainer's log and to whatever it reports to.  In a
    run of several processes each measures the same rows (a sharded model cannot be measured by
    one), and the first one logs.

    Args:
        batch: the rows to look at, as a collator yields them; some 16 to 64 do.
        every: optimiser steps between measurements.
        log: the Trainer's ``log``, so that its reporters get the figures; None: they go to
            ``trainer.state.log_history`` alone.
        options: ``hessian``, ``directions`` and ``seed`` of `SmoothnessProbe`.

    Attributes:
        history: of each measurement its figures and "step".

    Raises:
        ValueError: as `SmoothnessProbe`.
    """

    def __init__(
        self,
        batch: Mapping[str, Any],
        *,
        every: int = 100,
        log: Callable[[dict[str, float]], None] | None = None,
        **options: Any,
    ) -> None:
        self.probe = SmoothnessProbe(batch, every=every, **options)
        self.log = log

    @property
    def history(self) -> list[dict[str, float]]:
        """Of each measurement its figures and "step"."""
        return self.probe.history

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.probe.history.clear()
        self._measure(kwargs["model"], state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.probe.every == 0:
            self._measure(kwargs["model"], state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.probe.measured(state.global_step):
            self._measure(kwargs["model"], state, control)

    def _measure(self, model: torch.nn.Module, state: Any, control: Any) -> None:
        found = self.probe.measure(model, state.global_step)
        if state.is_world_process_zero:
            write_entry(found, state, control, self.log)
