"""Predictive distributions of ln L at one size, one a curve, and who is probably the lowest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ..evaluation.extras import require
from .arrays import Array

_TAIL = 1e-6
_CELLS = 4000


class Predictive(ABC):
    """Independent distributions of n quantities."""

    @abstractmethod
    def cdf(self, values: Array) -> Array:
        """P(quantity ≤ value): [n, k] (or [k] for all) -> [n, k]."""

    @abstractmethod
    def quantile(self, probability: float) -> Array:
        """[n]."""

    def interval(self, level: float) -> tuple[Array, Array]:
        """The central interval of a level, [n] and [n].

        Raises:
            ValueError: a level outside (0, 1).
        """
        check_level(level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def prob_lowest(self) -> Array:
        """P(quantity i is the lowest of all), [n]: Σ over cells of dF_i Π_{j≠i} (1 − F_j)."""
        low, high = self.quantile(_TAIL).min(), self.quantile(1 - _TAIL).min()
        edges = np.linspace(low, max(high, low + 1e-12), _CELLS + 1)
        cumulative = self.cdf(edges)
        mass = np.diff(cumulative, axis=-1)
        survival = np.maximum(1 - (cumulative[:, 1:] + cumulative[:, :-1]) / 2, 1e-300)
        logs = np.log(survival)
        share = (mass * np.exp(logs.sum(0) - logs)).sum(-1)
        return share / share.sum()


def check_level(level: float) -> None:
    """Raises ValueError for a level outside (0, 1)."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a probability between 0 and 1, such as 0.9")


@dataclass(frozen=True)
class Student(Predictive):
    """location + scale · t_dof; all [n], dof may be infinite (a Gaussian)."""

    location: Array
    scale: Array
    dof: Array

    def cdf(self, values: Array) -> Array:
        standard = (values - self.location[:, None]) / self.scale[:, None]
        return require("scipy.stats").t.cdf(standard, self.dof[:, None])

    def quantile(self, probability: float) -> Array:
        return self.location + self.scale * require("scipy.stats").t.ppf(probability, self.dof)
