"""Advice on a ranking: the expected regret of its first models, and which to run further."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .predictive import UNIFORM_WEIGHT, Array, Index, Mixture, Student

TOLERANCE = 0.01
"""Of the best: 1 % of a loss or a perplexity, a point of 100 of a score."""
_MOST_CELLS = 4_000
_REGRET_FACTOR = 0.7
"""Ratio of the standard deviation for regret to the one behind P(best), which has to hold surprises
as well.  From the development halves, as is the P(best) below which a model is dropped, without the
part of it that is `UNIFORM_WEIGHT`'s:"""
OUT = 0.03


@dataclass(frozen=True)
class NextRuns:
    """The next runs of a choice: of which models, on which size, at what price.

    Attributes:
        names: the models, best first.
        size: training examples.
        price: of these runs as a share of training all models in full; NaN where costs are unknown.
    """

    names: tuple[str, ...]
    size: float
    price: float


def survivor_count(probabilities: Array) -> int:
    """Return the length of the prefix of the ranking down to the last model with P(best) ≥ `OUT`.

    Args:
        probabilities: P(best) in the order of the ranking, [n].
    """
    least = (1 - UNIFORM_WEIGHT) * OUT + UNIFORM_WEIGHT / len(probabilities)
    return 1 + int(np.flatnonzero(probabilities >= least).max(initial=0))


def expected_regret(mixture: Mixture, order: Index, *, ratio: bool) -> Array:
    """Return the expected excess of the best of the first k models over the best of all, [n].

    In each component E[min of k] − E[min of all] = ∫ P(min of k > x) − P(min of all > x) dx, by
    the trapezoidal rule between quantiles of all the quantities.  The uniform part of P(best) does
    not count: it does not tell by how much a model may be better.

    Args:
        mixture: of ln L, [n].
        order: rows of the models in the order of the ranking, [n].
        ratio: of ln L; if not, of L itself.

    Returns:
        For k = 1 … n; the last is 0.
    """
    regrets = [_component_regret(students, order, ratio) for students in mixture.components]
    return mixture.weights @ np.stack(regrets)


def _component_regret(students: Student, order: Index, ratio: bool) -> Array:
    # Every minimum lies below the upper end of the first model: the cells are spent there.
    students = Student(students.location, _REGRET_FACTOR * students.scale, students.dof)
    edges = students.edges()
    edges = edges[edges <= students.rows(order[:1]).quantile(np.array([1 - 1e-9]))[0, 0]]
    edges = edges[:: 1 + len(edges) // _MOST_CELLS]
    steps = np.diff(edges if ratio else np.exp(edges)) / 2
    survival, lowest = np.ones(len(edges)), np.empty(len(order))
    for rank, row in enumerate(order):
        survival *= 1 - students.rows(np.array([row])).cdf(edges)[0]
        lowest[rank] = (survival[1:] + survival[:-1]) @ steps
    return lowest - lowest[-1]
