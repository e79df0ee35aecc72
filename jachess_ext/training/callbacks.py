"""Log of figures beside the losses; callbacks that measure a model's smoothness or kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..models import on_device_of
from ..ntk import kernel_drift, label_alignment, ntk
from ..ntk.loss import has_one_label_each
from ..smoothness.probe import SmoothnessProbe
from ..smoothness.settings import check_every

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Log = Callable[[dict[str, float]], None]
"""``Trainer.log``."""


class StepLog:
    """Means of logged figures over the steps between two log entries.

    Attributes:
        sums: figure's name -> its sum since the last entry, a float64 tensor on the figure's
            device.
    """

    # Copying a number from a GPU stalls the host until the step has run, so the sums stay tensors
    # until an entry is due; in float64, since a sum over 500 steps loses digits in bfloat16.
    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, **figures: Tensor | None) -> None:
        """Add the figures of a step: scalars, or ``[K]`` with one per layer; None is ignored."""
        for name, value in figures.items():
            if value is not None:
                value = value.detach().double()
                self.sums[name] = self.sums[name] + value if name in self.sums else value
                self._counts[name] = self._counts.get(name, 0) + 1

    def take(self, world_size: int = 1) -> dict[str, float]:
        """Return the means of the figures since the last call over all ranks, named as by
        `flatten_figures`, and start anew.

        With a ``world_size`` above 1 every rank has to call it (a collective).
        """
        totals = {name: (total.tolist(), self._counts[name]) for name, total in self.sums.items()}
        self.sums, self._counts = {}, {}
        ranks = [totals]
        if world_size > 1:
            from accelerate.utils import gather_object

            # Objects, not tensors: a rank without rows has neither names nor number of layers.
            ranks = gather_object(ranks)
        means = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            sums, counts = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
            means[name] = torch.tensor(sums, dtype=torch.float64).sum(0) / sum(counts)
        if means.get("skipped") == 0:
            del means["skipped"]
        return flatten_figures(means)


def flatten_figures(figures: Mapping[str, Tensor | float | None]) -> dict[str, float]:
    """Return figures as the numbers of a log entry.

    ``{"jacobian": [a, b]}`` becomes ``{"jachess/jacobian_0": a, "jachess/jacobian_1": b}``.
    """
    logs: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Tensor) and value.ndim:
            logs |= {f"jachess/{name}_{k}": v for k, v in enumerate(value.tolist())}
        elif value is not None:
            logs[f"jachess/{name}"] = float(value)
    return logs


def write_entry(entry: dict[str, float], control: TrainerControl, log: Log) -> None:
    """Log an entry by ``log``, without suppressing the Trainer's own entry of this step."""
    # Trainer.log calls on_log, which sets should_log to False: the step's losses would be lost.
    due = control.should_log
    log(entry)
    control.should_log = due


class _PeriodicCallback(TrainerCallback):
    """Measure a model before training, every ``every`` steps, and at the end of training."""

    every: int
    log: Log | None = None
    _last: int | None = None  # the step of the last measurement

    def measure(self, model: nn.Module, state: TrainerState) -> dict[str, float] | None:
        """Return the log entry of a measurement, which the first process logs; None: no entry."""
        raise NotImplementedError

    def _begin(self, state: TrainerState) -> None:
        """Discard the results of an earlier run."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin(state)
        self._measure_and_log(kwargs["model"], state, control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self.every == 0:
            self._measure_and_log(kwargs["model"], state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._last != state.global_step:
            self._measure_and_log(kwargs["model"], state, control)

    def _measure_and_log(
        self, model: nn.Module, state: TrainerState, control: TrainerControl
    ) -> None:
        self._last = state.global_step
        entry = self.measure(model, state)
        if entry is None or not state.is_world_process_zero:
            return
        if self.log is None:
            state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})
        else:
            write_entry(entry, control, self.log)


class SmoothnessMonitor(_PeriodicCallback):
    """Measure a model's smoothness before training, every ``every`` steps, and at the end.

    The trained weights are bit for bit those of training without the callback.  In a run of several
    processes each process measures the same rows, since a single process cannot measure a sharded
    model, and the first process logs the figures of `SmoothnessProbe`.

    Examples:
        >>> monitor = SmoothnessMonitor(batch, every=50)
        >>> trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[monitor])
        >>> _ = trainer.train()
        >>> [entry["step"] for entry in monitor.history]
        [0, 1]

    Args:
        batch: the rows to measure, as a collator yields them; 16 to 64 rows are enough.
        every: optimiser steps between measurements.
        log: the Trainer's ``log``, so that its reporters get the figures; None: they are written
            to ``trainer.state.log_history`` only.
        options: ``hessian``, ``directions`` and ``seed`` of `SmoothnessProbe`.

    Attributes:
        history: figures and "step" of each measurement.

    Raises:
        ValueError: see `SmoothnessProbe`.
    """

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        *,
        every: int = 100,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        self.probe = SmoothnessProbe(batch, every=every, **options)
        self.every, self.log = every, log

    @property
    def history(self) -> list[dict[str, float]]:
        """Return a dict for each measurement: its figures by name, and its "step"."""
        return self.probe.history

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the Jacobian norms over the steps; see `SmoothnessProbe.plot`."""
        return self.probe.plot(ax)

    def _begin(self, state: TrainerState) -> None:
        self.probe.history.clear()

    def measure(self, model: nn.Module, state: TrainerState) -> dict[str, float]:
        return self.probe.measure(model, state.global_step)


class NTKDrift(_PeriodicCallback):
    """Measure the NTK of fixed samples before training, every ``every`` steps, and at the end.

    The log entries are ``ntk/drift``, ‖Θ_t − Θ_0‖ / ‖Θ_0‖; ``ntk/change``, ‖Θ_t − Θ_s‖ / ‖Θ_s‖ with
    Θ_s the kernel of the previous measurement; and with class labels ``ntk/alignment``
    (`label_alignment`).  A kernel that stops changing is the sign of the power phase (LensLLM).  In
    a run of several processes only the first one measures.

    Examples:
        >>> drift = NTKDrift(batch, every=100)
        >>> trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[drift])
        >>> drift.log = trainer.log  # also to the Trainer's reporters
        >>> _ = trainer.train()
        >>> drift.stabilised(0.5)  # the step from which no change was above 50 %, or None
        0

    Args:
        batch: N samples, as a collator yields them (with "labels" for the alignment).
        every: optimiser steps between measurements.
        start: the reference kernel Θ_0, ``[N, C, N, C]``; None: the kernel when training begins.
            Pass it when training resumes.
        options: arguments of `jx.ntk`: outputs, parameters, method, memory_budget, …

    Attributes:
        history: figures and "step" of each measurement.
        start: Θ_0; None before it is measured.
        log: the Trainer's ``log``, or None: the entries are written to ``state.log_history`` only.

    Raises:
        ValueError: ``every`` is not a whole number from 1 up; ``options`` has ``group``,
            ``progress``, ``other`` or ``method="explain"``.

    Warns:
        RuntimeWarning: the run is resumed without ``start``.
    """

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        *,
        every: int = 100,
        start: Tensor | None = None,
        **options: Any,
    ) -> None:
        check_every(every)
        unusable = {"group", "progress", "other"} & set(options)
        if unusable or options.get("method") == "explain":
            name = min(unusable, default="method='explain'")
            raise ValueError(f"{name} cannot be used in a callback; leave it out")
        self.batch = dict(batch)
        self.every = every
        self.start = start
        self.options = options
        self.history: list[dict[str, float]] = []
        self._theta: Tensor | None = None
        self._measured_start = False

    def _begin(self, state: TrainerState) -> None:
        self.history, self._theta = [], None
        if self._measured_start and not state.global_step:
            self.start = None  # it was measured in an earlier run
        if state.is_world_process_zero and state.global_step and self.start is None:
            warnings.warn(
                f"NTKDrift: training resumes at step {state.global_step}, so that the drift is "
                "measured from there; pass start=Θ_0 of the run's beginning",
                RuntimeWarning,
                stacklevel=3,
            )

    def stabilised(self, tolerance: float) -> int | None:
        """Return the first measured step after which every relative change of the kernel is at most
        ``tolerance``; None if there is none."""
        since: int | None = None
        for before, after in zip(self.history, self.history[1:], strict=False):
            if after["ntk/change"] > tolerance:
                since = None
            elif since is None:
                since = int(before["step"])
        return since

    def measure(self, model: nn.Module, state: TrainerState) -> dict[str, float] | None:
        if not state.is_world_process_zero:
            return None
        batch = on_device_of(model, self.batch)
        theta = ntk(model, batch, progress=False, **self.options).cpu()
        if self.start is None:
            self.start, self._measured_start = theta, True
        last = theta if self._theta is None else self._theta
        entry = {
            "ntk/drift": kernel_drift(theta, self.start.cpu()),
            "ntk/change": kernel_drift(theta, last),
        }
        labels = self.batch.get("labels")
        if isinstance(labels, Tensor) and has_one_label_each(labels):
            entry["ntk/alignment"] = label_alignment(theta, labels.cpu())
        self._theta = theta
        self.history.append({**entry, "step": state.global_step})
        return entry
