"""What is logged beside the losses, and callbacks that measure a model over a run: its smoothness,
and the drift of its kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..ntk import kernel_drift, label_alignment, measure_ntk
from ..ntk.loss import has_one_label_each
from ..smoothness.estimators import SmoothnessProbe, on_device_of
from ..smoothness.settings import check_every


class StepLog:
    """Adds up tensors on their device; they are read once per log entry, not once per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, **figures: Tensor | None) -> None:
        """Add scalars, or ``[K]`` per layer; None is left out."""
        for name, value in figures.items():
            if value is not None:
                value = value.detach().double()
                self._sums[name] = self._sums[name] + value if name in self._sums else value
                self._counts[name] = self._counts.get(name, 0) + 1

    def take(self, world_size: int = 1) -> dict[str, float]:
        """Return the means since the last call, by `flat` names; empty where nothing was added.

        Args:
            world_size: with more than one, the means are over all ranks' steps, and every rank has
                to call this (a collective).
        """
        mine = {name: (total.tolist(), self._counts[name]) for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        ranks = [mine]
        if world_size > 1:
            # As objects: a rank whose shards were empty knows neither names nor number of layers.
            from accelerate.utils import gather_object

            ranks = gather_object(ranks)
        means = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            sums, counts = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
            means[name] = torch.tensor(sums, dtype=torch.float64).sum(0) / sum(counts)
        if means.get("skipped") == 0:
            del means["skipped"]
        return flat(means)


def flat(figures: Mapping[str, Tensor | float | None]) -> dict[str, float]:
    """``{"jacobian": [a, b]}`` → ``{"jachess/jacobian_0": a, "jachess/jacobian_1": b}``."""
    logs: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Tensor) and value.ndim:
            logs |= {f"jachess/{name}_{k}": v for k, v in enumerate(value.tolist())}
        elif value is not None:
            logs[f"jachess/{name}"] = float(value)
    return logs


def write_entry(entry: dict[str, float], control: Any, log: Callable[[dict], None]) -> None:
    """Write an entry of its own through the Trainer's ``log``.

    The Trainer takes a call of `Trainer.log` for the entry of this step that it owes itself, and
    would leave out the step's training loss: what is due stays due.
    """
    due = control.should_log
    log(entry)
    control.should_log = due


class _Periodic(TrainerCallback):
    """Measures before training, every so many steps, and at the end.

    Attributes:
        log: the Trainer's ``log``, where its reporters get the entries; None: they go into the
            history alone.
    """

    every: int
    log: Callable[[dict[str, float]], None] | None = None
    _last: int | None = None  # the step of the last measurement

    def measure(self, model: nn.Module, state: Any) -> dict[str, float] | None:
        """Return the entry to be logged by the first process, or None."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure_and_log(kwargs["model"], state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure_and_log(kwargs["model"], state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._last != state.global_step:
            self._measure_and_log(kwargs["model"], state, control)

    def _measure_and_log(self, model: nn.Module, state: Any, control: Any) -> None:
        self._last = state.global_step
        entry = self.measure(model, state)
        if entry is None or not state.is_world_process_zero:
            return
        if self.log is None:
            state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})
        else:
            write_entry(entry, control, self.log)


class SmoothnessMonitor(_Periodic):
    """Measures a model's smoothness before training, every so many steps, and at the end.

    It penalises nothing: training with it is bit for bit the training without it.

    Example:
        >>> trainer.add_callback(jx.SmoothnessMonitor(batch, every=50, log=trainer.log))

    The figures of `SmoothnessProbe` go to the Trainer's log and to whatever it reports to.  In a
    run of several processes each measures the same rows (a sharded model cannot be measured by
    one), and the first one logs.

    Args:
        batch: the rows to measure, as a collator yields them; some 16 to 64 do.
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
        """Figures and "step" of each measurement."""
        return self.probe.history

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.probe.history.clear()
        super().on_train_begin(args, state, control, **kwargs)

    def measure(self, model: nn.Module, state: Any) -> dict[str, float]:
        """Return the figures; every process measures, since a sharded model cannot be by one."""
        return self.probe.measure(model, state.global_step)


@dataclass(frozen=True)
class DriftPoint:
    """One measurement.

    Attributes:
        step: optimiser steps done.
        drift: ‖Θ_t − Θ_0‖ / ‖Θ_0‖.
        change: ‖Θ_t − Θ_s‖ / ‖Θ_s‖, s the measurement before; 0 at the first.
        alignment: centred alignment with the labels (`label_alignment`); None without class labels.
    """

    step: int
    drift: float
    change: float
    alignment: float | None


class NTKDrift(_Periodic):
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

    def measure(self, model: torch.nn.Module, state: Any) -> dict[str, float] | None:
        """Return the measurement, in the first process alone."""
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
