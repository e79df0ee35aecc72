"""`SmoothnessMonitor`: a model's smoothness over a Trainer's run, as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..smoothness.estimators import SmoothnessProbe
from .looking import Looking


class SmoothnessMonitor(Looking):
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
        self.every, self.log = every, log

    @property
    def history(self) -> list[dict[str, float]]:
        """Of each measurement its figures and "step"."""
        return self.probe.history

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.probe.history.clear()
        super().on_train_begin(args, state, control, **kwargs)

    def look(self, model: nn.Module, state: Any) -> dict[str, float]:
        """Measured by every process: a sharded model cannot be by one."""
        return self.probe.measure(model, state.global_step)
