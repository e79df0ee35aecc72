"""Statistics over seeds against counted or textbook values."""

from __future__ import annotations

from itertools import combinations
from math import comb, isnan

import numpy as np
import pytest
from jachess_ext.evaluation.statistics import (
    cluster_flip_test,
    holm_bonferroni,
    interval,
    mann_whitney,
    sign_test,
    summarise,
)
from scipy import stats


def test_mean_and_sample_spread() -> None:
    summary = summarise([1.0, 2.0, 6.0])
    assert summary.mean == pytest.approx(3.0)
    assert summary.spread == pytest.approx(7.0**0.5)  # (4 + 1 + 9) / (3 − 1)
    assert summary.n == 3


def test_one_run_has_no_spread_and_none_is_refused() -> None:
    assert isnan(summarise([2.0]).spread)
    with pytest.raises(ValueError, match="no runs"):
        summarise([])


def counted_p(first: list[float], second: list[float]) -> float:
    """Twice the share of all splits of the pooled numbers whose U is as far out on one side.

    U counts pairs won, half for equal ones, written out in integers: 2 a win, 1 a tie.
    """
    pooled, n = first + second, len(first)

    def u(chosen: tuple[int, ...]) -> int:
        rest = [i for i in range(len(pooled)) if i not in chosen]
        return sum(
            2 * (pooled[i] > pooled[j]) + (pooled[i] == pooled[j]) for i in chosen for j in rest
        )

    observed = u(tuple(range(n)))
    every = [u(chosen) for chosen in combinations(range(len(pooled)), n)]
    low, high = sum(x <= observed for x in every), sum(x >= observed for x in every)
    return min(1.0, 2 * min(low, high) / len(every))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]),
        ([1.0, 5.0, 3.0, 8.0], [4.0, 2.0, 6.0]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [0.35, 0.6, 0.7, 0.8, 0.9]),
        ([0.5] * 3, [0.6] * 3),  # collapsed runs: scipy's own choice says .0469
        ([0.50, 0.51, 0.52, 0.53, 0.53], [0.54, 0.55, 0.56, 0.57, 0.58]),
        ([0.5, 0.5, 0.6, 0.7], [0.5, 0.7, 0.7, 0.8, 0.8]),
        ([0.5] * 4, [0.5] * 4),
        ([1.0], [2.0, 2.0, 3.0, 3.0]),
    ],
)
def test_mann_whitney_counts_permutations(first: list[float], second: list[float]) -> None:
    assert mann_whitney(first, second) == pytest.approx(counted_p(first, second))


def test_smallest_p_is_as_documented() -> None:
    assert mann_whitney([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / comb(6, 3))


@pytest.mark.parametrize(
    ("n", "m"), [(3, 3), (5, 5), (8, 8), (1, 20), (2, 60), (3, 100), (9, 9), (10, 12)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_no_p_is_below_the_share_of_two_splits(n: int, m: int, tied: bool) -> None:
    """Sides as far apart as can be, each collapsed to one number or all different."""
    first = [0.5] * n if tied else [i / 1000 for i in range(n)]
    second = [0.6] * m if tied else [1 + i / 1000 for i in range(m)]
    p, least = mann_whitney(first, second), 2 / comb(n + m, n)
    assert p >= least * (1 - 1e-12)
    if comb(n + m, n) <= 20_000:
        assert p == pytest.approx(least)


def test_mann_whitney_refuses_nan_and_nothing() -> None:
    with pytest.raises(ValueError, match="NaN"):
        mann_whitney([1.0, float("nan")], [2.0])
    with pytest.raises(ValueError, match="at least one"):
        mann_whitney([], [2.0])


def test_holm_by_hand() -> None:
    # sorted .005 .01 .03 .04, times 4 3 2 1: .02 .03 .06 .04, made monotone: .02 .03 .06 .06
    assert holm_bonferroni([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_caps_at_one_and_accepts_nothing() -> None:
    assert holm_bonferroni([0.6, 0.9]) == [1.0, 1.0]
    assert holm_bonferroni([]) == []
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        holm_bonferroni([1.2])


def test_intervals_and_the_sign_test_by_hand() -> None:
    assert interval([1, 2, 3, 4, 5]) == pytest.approx(2.776445 * (2.5 / 5) ** 0.5, rel=1e-6)
    assert np.isnan(interval([1.0]))
    assert sign_test([1.0] * 8 + [-3.0] * 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_test([0.0, 0.0]) == 1.0 and sign_test([0.0, 2.0]) == 1.0
    with pytest.raises(ValueError, match="no NaN"):
        sign_test([float("nan")])


def test_flips_of_clusters() -> None:
    assert cluster_flip_test([[1.0], [2.0], [3.0]]) == 0.25
    assert cluster_flip_test([[1.0, 2.0], [3.0]]) == 0.5, "as two values of 3"
    assert cluster_flip_test([[1.0], [2.0], [-3.0]]) == 1.0
    values = np.random.default_rng(1).normal(0.3, 1.0, 12)
    oracle = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert cluster_flip_test([[v] for v in values]) == pytest.approx(oracle.pvalue, abs=1e-9)
    many = np.random.default_rng(2).normal(0.6, 1.0, 24)
    near = stats.ttest_1samp(many, 0).pvalue
    assert cluster_flip_test([[v] for v in many]) == pytest.approx(near, abs=0.01)
    with pytest.raises(ValueError, match="at least one cluster"):
        cluster_flip_test([])
