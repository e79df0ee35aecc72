"""Means of a step's figures between two entries of the Trainer's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PREFIX = "jachess/"


class StepLog:
    """Adds up tensors on their device; they are read once per log entry, not once per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, **figures: Tensor | None) -> None:
        """Scalars, or ``[K]`` per layer; None is left out."""
        for name, value in figures.items():
            if value is not None:
                value = value.detach().double()
                self._sums[name] = self._sums[name] + value if name in self._sums else value
                self._counts[name] = self._counts.get(name, 0) + 1

    def take(self, world_size: int = 1) -> dict[str, float]:
        """The means since the last call, by `flat` names; empty where nothing was added.

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
        means = _means(ranks)
        if means.get("skipped") == 0:
            del means["skipped"]
        return flat(means)


def _means(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    means = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        found = [rank[name] for rank in ranks if name in rank]
        total = torch.tensor([total for total, _ in found], dtype=torch.float64).sum(0)
        means[name] = total / sum(count for _, count in found)
    return means


def flat(figures: Mapping[str, Tensor | float | None]) -> dict[str, float]:
    """``{"jacobian": [a, b]}`` → ``{"jachess/jacobian_0": a, "jachess/jacobian_1": b}``."""
    logs: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Tensor) and value.ndim:
            logs |= {f"{PREFIX}{name}_{k}": v for k, v in enumerate(value.tolist())}
        elif value is not None:
            logs[PREFIX + name] = float(value)
    return logs
