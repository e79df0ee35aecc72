"""The NTK over training: its drift and its alignment with labels, as a Trainer callback."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..ntk import kernel_drift, label_alignment, measure_ntk
from ..ntk.loss import has_one_label_each
from ..smoothness.estimators import check_every, on_device_of
from .looking import Looking


@dataclass(frozen=True)
class DriftPoint:
    """One measurement.

    Attributes:
        step: optimiser steps done.
        drift: ‖Θ_t − Θ_0‖ / ‖Θ_0‖.
        change: ‖Θ_t − Θ_s‖ / ‖Θ_s‖, s the measurement before; 0 at the first.
        alignment: centred alignment with the labels (`ntk.drift`); None without class labels.
    """

    step: int
    drift: float
    change: float
    alignment: float | None


class NTKDrift(Looking):
    """Measures the kernel of fixed samples before training, every so many steps, and at the end.

    Example:
        >>> drift = NTKDrift(batch, every=100)
        >>> trainer = Trainer(model=model, args=args, train_dataset=train, callbacks=[drift])
        >>> drift.log = trainer.log          # also to the Trainer's reporters
        >>> trainer.train()
        >>> drift.stabilised(0.05)           # the step from which Θ hardly moved, or None

    Entries ``ntk/drift``, ``ntk/change`` and ``ntk/alignment`` go through ``log`` where it is set,
    else into ``state.log_history``.  A kernel that stops moving is the sign of the power phase
    (LensLLM).  In a run of several processes the first one measures.

    Args:
        batch: the samples, as a collator yields them (with "labels" for the alignment); N.
        every: optimiser steps between measurements.
        start: Θ_0 [N, C, N, C] to compare with; None: the kernel when training begins.  Needed
            after resuming, when the model is no longer the one that training began with.
        options: arguments of `jx.ntk`: outputs, parameters, method, memory_budget, …

    Attributes:
        history: the measurements, in order.
        start: Θ_0, once it is known.

    Raises:
        ValueError: ``every`` is not a number from 1 up; options that ntk does not take here.

    Warns:
        RuntimeWarning: a resumed run without ``start``.
    """

    def __init__(
        self,
        batch: Mapping[str, Any],
        *,
        every: int = 100,
        start: Tensor | None = None,
        **options: Any,
    ) -> None:
        check_every(every)
        refused = {"group", "progress", "other"} & set(options)
        if refused or options.get("method") == "explain":
            name = min(refused, default="method='explain'")
            raise ValueError(f"{name} cannot be used in a callback; leave it out")
        self.batch = dict(batch)
        self.every = every
        self.start = start
        self.options = options
        self.history: list[DriftPoint] = []
        self._theta: Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.history, self._theta = [], None
        if state.is_world_process_zero and state.global_step and self.start is None:
            warnings.warn(
                f"NTKDrift: training resumes at step {state.global_step}, so that the drift is "
                "measured from there; pass start=Θ_0 of the run's beginning",
                RuntimeWarning,
                stacklevel=2,
            )
        super().on_train_begin(args, state, control, **kwargs)

    def stabilised(self, tolerance: float) -> int | None:
        """The first step after which no two measurements differ by more, relatively; or None."""
        since: int | None = None
        for before, after in zip(self.history, self.history[1:], strict=False):
            if after.change > tolerance:
                since = None
            elif since is None:
                since = before.step
        return since

    def look(self, model: torch.nn.Module, state: Any) -> dict[str, float] | None:
        """A measurement, in the first process alone."""
        if not state.is_world_process_zero:
            return None
        batch = on_device_of(model, self.batch)
        theta = measure_ntk(model, batch, progress=False, **self.options).theta.cpu()
        if self.start is None:
            self.start = theta
        last = theta if self._theta is None else self._theta
        labels = self.batch.get("labels")
        alignment = None
        if isinstance(labels, Tensor) and has_one_label_each(labels):
            alignment = label_alignment(theta, labels.cpu())
        point = DriftPoint(
            step=state.global_step,
            drift=kernel_drift(theta, self.start.cpu()),
            change=kernel_drift(theta, last),
            alignment=alignment,
        )
        self._theta = theta
        self.history.append(point)
        entry = {name: value for name, value in asdict(point).items() if value is not None}
        del entry["step"]
        return {f"ntk/{name}": value for name, value in entry.items()}
