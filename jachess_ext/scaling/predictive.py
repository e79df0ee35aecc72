"""Predictive distributions of ln L, and each curve's probability of being the lowest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._io import require
from .constants import CONSTANTS

Array = npt.NDArray[np.floating[Any]]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_TAIL = np.geomspace(1e-9, 0.004, 75)
_LEVELS = np.concatenate([_TAIL, np.linspace(0.005, 0.995, 199), 1 - _TAIL[::-1]])
"""Probabilities whose quantiles are the edges of the integration cells: at most 0.5 % apart, closer
in the tails, as the lowest of many quantities lies in the lower tail of each."""
_MOST_EDGES = 12_000  # largest number of edges, over all distributions
_BLOCK_CELLS = 200_000  # number of (quantity, cell) pairs that are in memory at a time


@dataclass(frozen=True)
class Student:
    """Independent Student t distributions of n quantities, location + scale · t_dof.

    Attributes:
        location, scale, dof: [n] each; infinite degrees of freedom are a Gaussian.
    """

    location: Array
    scale: Array
    dof: Array

    def rows(self, index: Index) -> Student:
        """Return the distributions of the quantities at `index`."""
        return Student(self.location[index], self.scale[index], self.dof[index])

    def with_noise(self, noise: Array) -> Student:
        """Return the distributions with independent noise of standard errors `noise`, [n], added.

        Degrees of freedom stay as they are.
        """
        return replace(self, scale=np.hypot(self.scale, noise))

    def cdf(self, values: Array) -> Array:
        """Return P(quantity ≤ value), [n, k], for values [n, k], or [k] for all quantities."""
        standardised = (values - self.location[:, None]) / self.scale[:, None]
        return require("scipy.special").stdtr(self.dof[:, None], standardised)

    def quantile(self, probabilities: Array) -> Array:
        """Return the quantiles of each quantity, [n, k], at probabilities, [k]."""
        standard = require("scipy.special").stdtrit(self.dof[:, None], probabilities)
        return self.location[:, None] + self.scale[:, None] * standard

    def interval(self, level: float) -> tuple[Array, Array]:
        """Return the lower and upper ends, [n] each, of the central interval of a probability.

        Raises:
            ValueError: `level` is not between 0 and 1.
        """
        if not 0 < level < 1:
            text = f"level is {level}; expected a probability"
            raise ValueError(f"{text} between 0 and 1, such as 0.9")
        low, high = self.quantile(np.array([(1 - level) / 2, (1 + level) / 2])).T
        return low, high

    def exp_interval(self, level: float) -> tuple[Array, Array]:
        """Return `interval` of the exponentials of the quantities; ends that overflow are inf."""
        with np.errstate(over="ignore"):
            low, high = np.exp(self.interval(level))
        return low, high

    def edges(self) -> Array:
        """Return the edges of the integration cells, ascending: quantiles of all the distributions.

        No cell then holds much of the mass of any distribution, whatever their widths and tails.
        """
        # A fixed grid would miss a narrow distribution between two points, and the quantiles of one
        # distribution would miss the tails of the others.
        edges = np.unique(self.quantile(_LEVELS))
        return edges[:: 1 + len(edges) // _MOST_EDGES]

    def prob_lowest(self) -> Array:
        """Return P(quantity i is the lowest of all), [n].

        It is ∫ Π_{j≠i} (1 − F_j) dF_i, summed over the cells between `edges`.
        """
        edges = np.concatenate([[-np.inf], self.edges(), [np.inf]])
        lowest, count = np.zeros(len(self.location)), 1 + _BLOCK_CELLS // len(self.location)
        for start in range(0, len(edges) - 1, count):
            cumulative = self.cdf(edges[start : start + count + 1])
            # Survival functions are averaged over the edges of each cell; the floor keeps the
            # logarithm finite in cells where one is 0, which then add nothing.
            survival = 1 - (cumulative[:, 1:] + cumulative[:, :-1]) / 2
            log_survival = np.log(np.maximum(survival, 1e-300))
            lowest += (np.diff(cumulative) * np.exp(log_survival.sum(0) - log_survival)).sum(-1)
        return lowest / lowest.sum()


@dataclass(frozen=True)
class Mixture:
    """A mixture of joint distributions of the candidates' ln L, without their common error.

    Forecasts for one recipe on one data set have an error in common, which widens every interval
    but does not affect which candidate is best.

    Attributes:
        weights: probabilities of the components, [w], which sum to 1.
        components: w distributions of the n candidates' ln L.
    """

    weights: Array
    components: tuple[Student, ...]

    def prob_lower(self, row: int) -> Array:
        """Return P(candidate i has a lower loss than the candidate at `row`), [n].

        The components are taken for Gaussians, whatever their degrees of freedom.
        """
        ndtr, chances = require("scipy.special").ndtr, np.zeros(len(self.components[0].location))
        for weight, x in zip(self.weights, self.components, strict=True):
            gap = x.location[row] - x.location
            chances += weight * ndtr(gap / np.hypot(x.scale, x.scale[row]))
        return chances

    def prob_best(self) -> Array:
        """Return P(candidate i has the lowest loss), [n].

        The uniform distribution is mixed in with weight `Constants.surprise`, as the mixture may be
        wrong for a table: no probability is below `surprise` / n.
        """
        lowest = self.weights @ np.stack([student.prob_lowest() for student in self.components])
        return (1 - CONSTANTS.surprise) * lowest + CONSTANTS.surprise / len(lowest)
