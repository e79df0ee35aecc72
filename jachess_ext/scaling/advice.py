"""What is at stake in a choice: the expected regret of a few models, and who is run further."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .predictive import SURPRISE, Array, Index, Student, Worlds

TOLERANCE = 0.01
"""Of the best: 1 % of a loss or a perplexity, a point of 100 of a score."""
_EDGES = 4_000  # of cells, at most
_WIDTH = 0.7
"""Part of the width behind P(best) that regret has: that width has to hold surprises as well.  From
the development halves, as is P(best) without `SURPRISE` below which a model is dropped:"""
OUT = 0.03


@dataclass(frozen=True)
class Rung:
    """The next runs of a choice: who goes on, to which size, at what price.

    Attributes:
        names: the models that go on, best first.
        size: training examples.
        price: of these runs as a share of training all models in full; NaN where costs are unknown.
    """

    names: tuple[str, ...]
    size: float
    price: float


def staying(chances: Array) -> int:
    """Return how many of the first go on: to the last that is the best with `OUT` or more.

    Args:
        chances: P(best) in the order of the ranking, [n].
    """
    least = (1 - SURPRISE) * OUT + SURPRISE / len(chances)
    return 1 + int(np.flatnonzero(chances >= least).max(initial=0))


def expected_regret(worlds: Worlds, order: Index, *, ratio: bool) -> Array:
    """Return how much higher the lowest of the first k is expected to be than that of all, [n].

    In each world E[min of k] − E[min of all] = ∫ P(min of k > x) − P(min of all > x) dx, by
    trapezoids between quantiles of all the quantities.  That with `SURPRISE` any may be the best
    does not count: it does not tell by how much.

    Args:
        worlds: accounts of ln L, [n].
        order: their places, the first first, [n].
        ratio: of ln L; if not, of L itself.

    Returns:
        For k = 1 … n; the last is 0.
    """
    regrets = [_regret(account, order, ratio) for account in worlds.accounts]
    return worlds.weights @ np.stack(regrets)


def _regret(quantities: Student, order: Index, ratio: bool) -> Array:
    # Every minimum lies below the upper end of the first: there are the cells spent.
    quantities = Student(quantities.location, _WIDTH * quantities.scale, quantities.dof)
    edges = quantities.edges()
    edges = edges[edges <= quantities.rows(order[:1]).quantile(np.array([1 - 1e-9]))[0, 0]]
    edges = edges[:: 1 + len(edges) // _EDGES]
    steps = np.diff(edges if ratio else np.exp(edges)) / 2
    above, lowest = np.ones(len(edges)), np.empty(len(order))
    for place, row in enumerate(order):
        above *= 1 - quantities.rows(np.array([row])).cdf(edges)[0]
        lowest[place] = (above[1:] + above[:-1]) @ steps
    return lowest - lowest[-1]
