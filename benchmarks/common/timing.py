"""Interleaved timing: A B A B rounds, warm-up first, garbage collection outside the clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """20th, 50th and 80th percentile of a figure over the rounds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        numbers = torch.tensor(values, dtype=torch.float64)
        return cls(*torch.quantile(numbers, torch.tensor([0.2, 0.5, 0.8]).double()).tolist())


@dataclass(frozen=True)
class Timings:
    """Seconds per round of every step, in the order the rounds ran."""

    seconds: dict[str, list[float]]

    def milliseconds(self, name: str) -> Spread:
        return Spread.of([1e3 * value for value in self.seconds[name]])

    def ratio(self, name: str, baseline: str) -> float:
        """Ratio of the medians."""
        return self.milliseconds(name).p50 / self.milliseconds(baseline).p50


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    steps: Mapping[str, Step],
    *,
    repeats: int,
    device: torch.device,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time every step once per round, so that a slow spell of the machine meets all of them.

    Args:
        steps: what to time, by name.
        repeats: rounds that count.
        warmup: rounds before them.
        clock: `time.process_time` counts the processor's time, on a machine with other jobs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(warmup + repeats):
            for name, step in steps.items():
                gc.collect()
                elapsed = _once(step, device, clock)
                if number >= warmup:
                    seconds[name].append(elapsed)
    finally:
        if enabled:
            gc.enable()
    return Timings(seconds)


def _once(step: Step, device: torch.device, clock: Callable[[], float]) -> float:
    synchronize(device)
    start = clock()
    step()
    synchronize(device)
    return clock() - start
