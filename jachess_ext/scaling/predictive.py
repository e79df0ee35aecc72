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
_MOST_EDGES = 12_000  # of all distributions together
_BLOCK_CELLS = 200_000  # pairs of a quantity and a cell that are in memory at a time

_SCALE_FACTOR, _FALL_FACTOR = 0.55, 1.3
"""Contributions of the candidates' median scale and of the spread of their falls to the standard
deviation of the idiosyncratic forecast error.  From the development halves, as is the weight in
P(best) of the uniform distribution over the candidates:"""
UNIFORM_WEIGHT = 0.1


@dataclass(frozen=True)
class Student:
    """Independent quantities, location + scale · t_dof, [n]; dof may be infinite (a Gaussian)."""

    location: Array
    scale: Array
    dof: Array

    def rows(self, index: Index) -> Student:
        """Return the quantities at these rows."""
        return Student(self.location[index], self.scale[index], self.dof[index])

    def with_noise(self, noise: Array) -> Student:
        """Return the quantities with independent noise of these standard errors, [n], added."""
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
        if not 0 < level < 1:
            text = f"level is {level}; expected a probability"
            raise ValueError(f"{text} between 0 and 1, such as 0.9")
        low, high = self.quantile(np.array([(1 - level) / 2, (1 + level) / 2])).T
        return low, high

    def exp_interval(self, level: float) -> tuple[Array, Array]:
        """Return `interval` of exp(quantities); an end beyond the largest double is infinite."""
        with np.errstate(over="ignore"):
            low, high = np.exp(self.interval(level))
        return low, high

    def edges(self) -> Array:
        """Return ends of cells for integrals, ascending: quantiles of all the distributions.

        So no cell has a large part of any of them, however different their widths and tails.
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
        lowest, count = np.zeros(len(self.location)), 1 + _BLOCK_CELLS // len(self.location)
        for first in range(0, len(edges) - 1, count):
            cumulative = self.cdf(edges[first : first + count + 1])
            # Within a cell half of another quantity's mass is taken to be above; the floor keeps
            # the logarithm of cells that nothing lies above, which then add nothing.
            above = 1 - (cumulative[:, 1:] + cumulative[:, :-1]) / 2
            logs = np.log(np.maximum(above, 1e-300))
            lowest += (np.diff(cumulative) * np.exp(logs.sum(0) - logs)).sum(-1)
        return lowest / lowest.sum()


@dataclass(frozen=True)
class Mixture:
    """A mixture of joint distributions of the candidates' ln L, without the error that all share.

    Curves of one recipe, on one data set, err together: that widens every interval and decides
    nothing between the candidates.

    Attributes:
        weights: probabilities of the components, [w], of sum 1.
        components: w Students of n quantities.
    """

    weights: Array
    components: tuple[Student, ...]

    @classmethod
    def gaussian(
        cls, location: Array, deviations: Array, weights: Array, doublings: Array
    ) -> Mixture:
        """Return Gaussians around one location, with one standard deviation in each component.

        How uncertain a single candidate is, is not known well enough to prefer an uncertain one: so
        the first of the ranking is the most probable to be the best.

        Args:
            location: what candidates are ranked by, [n].
            deviations, weights: of the components, [w].
            doublings: of the size from each candidate's last one to the target, [n]: errors are a
                random walk over them, so that a candidate with a larger last size errs by less.
        """
        walk, dof = np.sqrt(doublings / np.median(doublings)), np.full(len(location), np.inf)
        students = [Student(location, max(scale, 1e-12) * walk, dof) for scale in deviations]
        return cls(weights, tuple(students))

    def prob_best(self) -> Array:
        """Return P(candidate i has the lowest loss), [n], uniform with weight `UNIFORM_WEIGHT`.

        The mixture may be wrong for a table; no candidate's P(best) is below `UNIFORM_WEIGHT` / n.
        """
        lowest = self.weights @ np.stack([student.prob_lowest() for student in self.components])
        return (1 - UNIFORM_WEIGHT) * lowest + UNIFORM_WEIGHT / len(lowest)


def idiosyncratic_deviation(scale: Array, fall: Array) -> float:
    """Return the standard deviation of the idiosyncratic forecast error of ln L.

    Args:
        scale: of the candidates' own predictive distributions, [n].
        fall: predicted fall of ln L of each candidate from its last size to the target, [n].
    """
    deviation = np.hypot(_SCALE_FACTOR * np.median(scale), _FALL_FACTOR * np.std(fall))
    return max(float(deviation), 1e-12)
