"""Comparing runs over seeds: mean and spread, Mann–Whitney U, Holm–Bonferroni."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from .extras import require

_FLIPPED = 16  # clusters of which every flip of signs is counted
_COUNTED = 20_000  # splits of two samples: C(16, 8) is 12,870


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n − 1) over `n` runs; the spread of one run is NaN."""

    mean: float
    spread: float
    n: int


def summarise(values: Sequence[float]) -> Summary:
    """Mean and spread of one figure over seeds.

    Raises:
        ValueError: no values.
    """
    if len(values) == 0:
        raise ValueError("nothing to summarise: no runs were given")
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    return Summary(float(np.mean(values)), spread, len(values))


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the Mann–Whitney U test: twice the smaller tail, at most 1.

    Up to 20,000 splits of n + m runs into n and m (eight a side) are all counted, with midranks
    where runs are equal: scipy on its own takes the normal approximation wherever there are ties,
    and calls three equal runs against three others significant.  Beyond that p is scipy's.  In no
    case is it below 2 / C(n + m, n): 0.1 for three seeds each.

    Raises:
        ValueError: a sample is empty or holds NaN.
    """
    if len(first) == 0 or len(second) == 0 or np.isnan([*first, *second]).any():
        raise ValueError("Mann–Whitney needs at least one number, and no NaN, on both sides")
    stats = require("scipy.stats")
    splits = comb(len(first) + len(second), len(first))
    if splits > _COUNTED:
        p = float(stats.mannwhitneyu(first, second, alternative="two-sided").pvalue)
        return max(p, 2 / splits)
    # scipy.stats.permutation_test would count as well, but refuses a sample of one
    ranks = 2 * stats.rankdata([*first, *second])  # doubled midranks are whole, so sums are exact
    sums = np.array(list(combinations(ranks, len(first)))).sum(1)
    observed = ranks[: len(first)].sum()
    tail = min((sums <= observed).mean(), (sums >= observed).mean())
    return min(1.0, 2 * float(tail))


def interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> float:
    """Half the width of the mean's confidence interval by Student's t; NaN of one value."""
    if len(values) < 2:
        return float("nan")
    t = require("scipy.stats").t.ppf((1 + level) / 2, len(values) - 1)
    return float(t * np.std(values, ddof=1) / len(values) ** 0.5)


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p that positive and negative differences are equally likely; zeros are left out."""
    d = np.asarray(differences)
    if np.isnan(d).any():
        raise ValueError("the sign test takes no NaN")
    count = int((d != 0).sum())
    if not count:
        return 1.0
    return float(require("scipy.stats").binomtest(int((d > 0).sum()), count).pvalue)


def cluster_flip_test(clusters: Sequence[Sequence[float]]) -> float:
    """Two-sided p of the mean of all differences, signs of whole clusters flipped together.

    A permutation test: under the hypothesis of no effect each cluster's differences are as likely
    as their negatives.  Differences within a cluster (all tasks of a seed, say) may depend on each
    other.  All 2^n flips up to n = 16 clusters, beyond that 65,536 random ones.

    Raises:
        ValueError: no clusters, or NaN.
    """
    sums = np.array([np.sum(cluster) for cluster in clusters], dtype=np.float64)
    if not len(sums) or np.isnan(sums).any():
        raise ValueError("the test needs at least one cluster, and no NaN")
    if len(sums) <= _FLIPPED:
        signs = 1 - 2 * ((np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**_FLIPPED, len(sums)))
        signs[0] = 1
    flipped = np.abs(signs @ sums)
    return float(np.mean(flipped >= np.abs(sums.sum()) * (1 - 1e-12)))


def holm_bonferroni(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: max over j ≤ i of min(1, (m − j + 1) p_(j)).

    scipy has Benjamini–Hochberg and –Yekutieli only (`false_discovery_control`).

    Raises:
        ValueError: a p-value outside [0, 1].
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.size and not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"p-values lie in [0, 1]; got {list(p_values)}")
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(1.0, p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(stepped)
    return [float(value) for value in adjusted]
