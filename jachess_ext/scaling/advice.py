"""Expected regret of the first models of a ranking, and the models that are worth a further run."""

from __future__ import annotations

import numpy as np

from .constants import CONSTANTS
from .predictive import Array, Index, Mixture, Student

TOLERANCE = 0.01
"""Default of the largest expected regret: 1 % of a loss or a perplexity, 0.01 of a score."""
_MOST_CELLS = 4_000  # of an integral


def survivor_count(mixture: Mixture, order: Index) -> int:
    """Return the number of models, from the first of the ranking, that are worth a further run.

    The last of them is the last model that beats the first one with a probability of
    `Constants.survival` or more.  The probability compares two models, so that additional
    candidates never exclude a model.

    Args:
        mixture: distribution of the n models' ln L.
        order: row of each model in the order of the ranking, [n].
    """
    chances = mixture.prob_lower(int(order[0]))[order]
    return 1 + int(np.flatnonzero(chances >= CONSTANTS.survival).max(initial=0))


def expected_regret(mixture: Mixture, order: Index, *, ratio: bool) -> Array:
    """Return the expected excess of the best of the first k models over the best of all, [n].

    In each component of the mixture, E[min of k] − E[min of all] is
    ∫ P(min of k > x) − P(min of all > x) dx, computed by the trapezoidal rule.  The uniform
    distribution that is mixed into P(best) is left out, as it has no losses.

    Args:
        mixture: distribution of the n models' ln L.
        order: row of each model in the order of the ranking, [n].
        ratio: whether the excess is that of ln L, rather than of L.

    Returns:
        The expected excess for k = 1 … n; the last is 0.
    """
    regrets = [_component_regret(losses, order, ratio) for losses in mixture.components]
    return mixture.weights @ np.stack(regrets)


def _component_regret(losses: Student, order: Index, ratio: bool) -> Array:
    """Return `expected_regret` for one component of the mixture, [n]."""
    # Every minimum lies below the first model's loss, so that no cell above its range is needed.
    edges = losses.edges()
    edges = edges[edges <= losses.rows(order[:1]).quantile(np.array([1 - 1e-9]))[0, 0]]
    edges = edges[:: 1 + len(edges) // _MOST_CELLS]
    steps = np.diff(edges if ratio else np.exp(edges)) / 2
    survival, expected_minima = np.ones(len(edges)), np.empty(len(order))
    for rank, row in enumerate(order):
        survival *= 1 - losses.rows(np.array([row])).cdf(edges)[0]
        expected_minima[rank] = (survival[1:] + survival[:-1]) @ steps
    return expected_minima - expected_minima[-1]
