"""Predictive distributions of ln L, and each curve's probability of being the lowest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._io import require

Array = npt.NDArray[np.floating[Any]]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_TAIL = np.geomspace(1e-9, 0.004, 75)
_LEVELS = np.concatenate([_TAIL, np.linspace(0.005, 0.995, 199), 1 - _TAIL[::-1]])
"""Quantiles of every distribution that cut its range into cells of 0.5 % at most, finer in the
tails: the lowest of many lies in the lower tail of each."""
_MOST_EDGES = 12_000  # of all together; more candidates share them
_AT_A_TIME = 200_000  # pairs of a quantity and a cell, so that memory does not grow by all of them

_OWN_WIDTH, _OWN_FALL = 0.55, 1.3
"""Parts of the candidates' median width and of the spread of their falls that the errors they do
not share measure.  From the development halves, as is the probability that no forecast tells:"""
SURPRISE = 0.1


@dataclass(frozen=True)
class Student:
    """Independent quantities, location + scale · t_dof, [n]; dof may be infinite (a Gaussian)."""

    location: Array
    scale: Array
    dof: Array

    def rows(self, index: Index) -> Student:
        """Return the quantities `index`."""
        return Student(self.location[index], self.scale[index], self.dof[index])

    def widened(self, noise: Array) -> Student:
        """Return them with further noise of these standard errors, [n]."""
        return replace(self, scale=np.hypot(self.scale, noise))

    def cdf(self, values: Array) -> Array:
        """Return P(quantity ≤ value): [n, k] (or [k] for all) -> [n, k]."""
        standard = (values - self.location[:, None]) / self.scale[:, None]
        return require("scipy.special").stdtr(self.dof[:, None], standard)

    def quantile(self, probabilities: Array) -> Array:
        """Return quantiles: [k] -> [n, k]."""
        standard = require("scipy.special").stdtrit(self.dof[:, None], probabilities)
        return self.location[:, None] + self.scale[:, None] * standard

    def interval(self, level: float) -> tuple[Array, Array]:
        """Return the ends of the central interval of a level, [n] and [n].

        Raises:
            ValueError: a level outside (0, 1).
        """
        check_level(level)
        low, high = self.quantile(np.array([(1 - level) / 2, (1 + level) / 2])).T
        return low, high

    def edges(self) -> Array:
        """Return ends of cells for integrals, ascending: quantiles of all the distributions.

        So none has a large share of any, however different their widths and tails.
        """
        # An integral over one fixed grid would lose a narrow distribution between two points, and
        # one over the quantiles of a single distribution the tails of all others.
        edges = np.unique(self.quantile(_LEVELS))
        return edges[:: 1 + len(edges) // _MOST_EDGES]

    def prob_lowest(self) -> Array:
        """Return P(quantity i is the lowest of all), [n]: Σ over cells of dF_i Π_{j≠i} (1 − F_j).

        The cells are those between `edges`.
        """
        edges = np.concatenate([[-np.inf], self.edges(), [np.inf]])
        share, count = np.zeros(len(self.location)), 1 + _AT_A_TIME // len(self.location)
        for first in range(0, len(edges) - 1, count):
            cumulative = self.cdf(edges[first : first + count + 1])
            # Within a cell half of another quantity's mass is taken to be above; the floor keeps
            # the logarithm of cells that nothing lies above, whose share is then nought.
            above = 1 - (cumulative[:, 1:] + cumulative[:, :-1]) / 2
            logs = np.log(np.maximum(above, 1e-300))
            share += (np.diff(cumulative) * np.exp(logs.sum(0) - logs)).sum(-1)
        return share / share.sum()


@dataclass(frozen=True)
class Worlds:
    """The candidates' losses but for what all their errors have in common, by several accounts.

    Curves of one recipe, on one data set, err together: that widens every interval and decides
    nothing between them.

    Attributes:
        weights: how probable each account is, [w], of sum 1.
        accounts: w Students of n quantities.
    """

    weights: Array
    accounts: tuple[Student, ...]

    @classmethod
    def around(cls, location: Array, widths: Array, weights: Array, doublings: Array) -> Worlds:
        """Return Gaussians around one location, of one width in each account.

        How well a single candidate is foreseen is not known well enough to prefer a doubtful one
        for its doubt: so the first of the ranking is the most probable to be the best.

        Args:
            location: what is chosen by, [n].
            widths, weights: of the accounts, [w].
            doublings: how far off each is, [n]: of one that was seen further the error is less, as
                of a random walk.
        """
        ahead, dof = np.sqrt(doublings / np.median(doublings)), np.full(len(location), np.inf)
        accounts = [Student(location, max(width, 1e-12) * ahead, dof) for width in widths]
        return cls(weights, tuple(accounts))

    def prob_best(self) -> Array:
        """Return P(quantity i is the lowest of all), [n], where with `SURPRISE` any may be."""
        # The model of errors may itself be wrong for a table.  With probability SURPRISE it is
        # taken to say nothing, so that no model's P(best) is below SURPRISE / n.
        lowest = self.weights @ np.stack([account.prob_lowest() for account in self.accounts])
        return (1 - SURPRISE) * lowest + SURPRISE / len(lowest)


def width_of_differences(width: Array, fall: Array) -> float:
    """Return the width of what forecasts err by that not all of them share.

    Args:
        width: scales of the quantities' own distributions, [n].
        fall: how far each is forecast to fall from where it is seen now, [n].
    """
    return max(float(np.hypot(_OWN_WIDTH * np.median(width), _OWN_FALL * np.std(fall))), 1e-12)


def check_level(level: float) -> None:
    """Raise ValueError for a level outside (0, 1)."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a probability between 0 and 1, such as 0.9")
