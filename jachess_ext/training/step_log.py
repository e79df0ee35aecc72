"""Means of a step's figures between two entries of the Trainer's log."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

PREFIX = "jachess/"


class StepLog:
    """Adds up tensors on their device; they are read once per log entry, not once per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, **figures: Tensor | None) -> None:
        """Scalars, or ``[K]`` per layer; None is left out."""
        for name, value in figures.items():
            if value is not None:
                value = value.detach().double()
                self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._count += 1

    def take(self) -> dict[str, float]:
        """The means since the last call, by `flat` names; empty where nothing was added."""
        means = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return flat(means)


def flat(figures: Mapping[str, Tensor | float | None]) -> dict[str, float]:
    """``{"jacobian": [a, b]}`` → ``{"jachess/jacobian_0": a, "jachess/jacobian_1": b}``."""
    logs: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Tensor) and value.ndim:
            logs |= {f"{PREFIX}{name}_{k}": v for k, v in enumerate(value.tolist())}
        elif value is not None:
            logs[PREFIX + name] = float(value)
    return logs
