"""Metrics, baselines and P(lowest), against numpy, scipy, drawing and numbers by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import linregress, norm, pearsonr

from benchmarks.forecast_scores import coverage, log_rmse, pear_corr, rel_acc
from jachess_ext.scaling import fit, predictive
from jachess_ext.scaling.ats import accept_then_stop
from jachess_ext.scaling.predictive import Student


def test_metrics() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.uniform(1, 3, 9), generator.uniform(1, 3, 9)
    assert pear_corr(x, y) == pytest.approx(100 * pearsonr(x, y).statistic)
    assert np.isnan(pear_corr(np.ones(3), [1.0, 2.0, 3.0]))
    assert rel_acc([3.0, 1.0, 2.0], [1.0, 1.5, 3.0]) == pytest.approx(75.0)
    assert log_rmse([1.0, 2.0], [np.e, 2.0]) == pytest.approx(np.sqrt(0.5))
    assert coverage([0, 0, 0, 2], [1, 1, 1, 3], [0.5, 1.0, 1.5, 2.5]) == 75.0
    assert coverage([0.0, -np.inf], [np.inf, 1.0], [5.0, 2.0]) == 50.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pear_corr([1.0], [1.0]), "n ≥ 2"),
        (lambda: rel_acc([1.0, np.nan], [1.0, 2.0]), "finite"),
        (lambda: rel_acc([1.0, 2.0], [1.0, 1.0]), "nothing to choose"),
        (lambda: log_rmse([0.0, 1.0], [1.0, 1.0]), "finite"),
        (lambda: coverage([0.0, np.nan], [1.0, 1.0], [1.0, 1.0]), "NaN"),
        (lambda: coverage([0.0, 0.0], [np.inf, np.inf], [1.0, np.inf]), "finite"),
    ],
)
def test_bad_metrics(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()


def walk(x: np.ndarray, y: np.ndarray, gamma: int, tau: float) -> int:
    """How many points are accepted, one curve and one step at a time."""
    count = gamma
    if len(x) <= gamma:
        return len(x)
    while count < len(x):
        line = linregress(x[-count:], y[-count:])
        residual = y[-count:] - line.intercept - line.slope * x[-count:]
        following = len(x) - count - 1
        away = abs(y[following] - line.intercept - line.slope * x[following])
        if away > tau * residual.std() or count == len(x) - 1:
            return count
        count += 1
    return count


@pytest.mark.parametrize(("gamma", "tau"), [(3, 5.0), (3, 1.0), (4, 2.0), (5, 0.5), (3, 1e9)])
def test_the_walk_and_its_line(gamma: int, tau: float) -> None:
    generator = np.random.default_rng(0)
    x = np.log(200.0 * 2.0 ** np.arange(10))
    y = -0.1 * x + 0.05 * np.minimum(x - 8, 0) ** 2 + 0.003 * generator.standard_normal((40, 10))
    found = accept_then_stop(x, y, gamma, tau)
    if tau > 1e6:  # nothing is refused: the walk ends one short of the smallest, as published
        assert (found.count == 9).all() and (found.visited == 10).all()
    else:
        assert len(set(found.count)) > 1
    law = fit(np.exp(x), np.exp(y), "ats", gamma=gamma, tau=tau)
    ahead, at = law.predictive(1e6), np.log(1e6)
    for row in range(40):
        count = walk(x, y[row], gamma, tau)
        assert found.count[row] == count
        line = linregress(x[-count:], y[row, -count:])
        assert found.slope[row] == pytest.approx(line.slope)
        assert ahead.location[row] == pytest.approx(line.intercept + line.slope * at)
        design = np.stack([np.ones(count), x[-count:]], -1)
        residual = y[row, -count:] - design @ [line.intercept, line.slope]
        one = np.array([1.0, at])
        leverage = one @ np.linalg.inv(design.T @ design) @ one
        error = np.sqrt(residual @ residual / (count - 2) * (1 + leverage))
        assert ahead.scale[row] == pytest.approx(error)


def test_few_points_are_all_used() -> None:
    y = np.array([[1.0, 0.8, 0.5]])
    assert accept_then_stop(np.arange(3.0), y).count[0] == 3
    assert accept_then_stop(np.arange(3.0), y).visited[0] == 3
    two = accept_then_stop(np.arange(2.0), y[:, :2])
    assert np.isnan(two.variance[0]) and two.slope[0] == pytest.approx(-0.2)


# Who is probably the lowest: against drawing from the distributions with numpy ------------------

DRAWS = 100_000
CASES = {
    "nearly separated": ([0.0, 0.1, 0.2, 0.5], [0.02] * 4),
    "tied": ([0.3] * 5, [0.02] * 5),
    "two tied, one behind": ([0.0, 0.0, 0.05], [0.02, 0.02, 0.02]),
    "narrow among wide": ([0.0, 0.02, 0.0, 0.1], [1e-4, 0.5, 0.03, 2.0]),
    "far apart": ([-3.0, 0.0, 2.0, 40.0], [0.01, 0.02, 0.01, 3.0]),
    "twelve": (np.linspace(0, 1, 12).tolist(), np.geomspace(0.01, 0.5, 12).tolist()),
}


def shares(location: np.ndarray, scale: np.ndarray, dof: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(0)
    shape = (DRAWS, len(location))
    normal = generator.standard_normal(shape)
    chi = generator.chisquare(np.where(np.isinf(dof), 1.0, dof), shape)
    t = normal / np.where(np.isinf(dof), 1.0, np.sqrt(chi / dof))
    return np.bincount((location + scale * t).argmin(1), minlength=len(location)) / DRAWS


@pytest.mark.parametrize("dof", [1, np.inf])
@pytest.mark.parametrize("case", CASES)
def test_prob_lowest_against_drawing(case: str, dof: float) -> None:
    location, scale = map(np.array, CASES[case])
    every = np.full(len(location), float(dof))
    found = Student(location, scale, every).prob_lowest()
    assert found.sum() == pytest.approx(1.0)
    # 100,000 draws err by 0.0016.
    np.testing.assert_allclose(found, shares(location, scale, every), atol=0.005)


def test_prob_lowest_of_unequal_tails() -> None:
    location, scale = np.array([0.0, 0.05, 0.2, 0.3]), np.array([0.05, 0.02, 0.1, 1.0])
    dof = np.array([1.0, 30.0, 2.0, np.inf])
    found = Student(location, scale, dof).prob_lowest()
    np.testing.assert_allclose(found, shares(location, scale, dof), atol=0.005)


def test_prob_lowest_of_many_takes_little_memory() -> None:
    """1,000 of two kinds, against an integral; their cells at once would take 100 MB an array."""
    location = np.repeat([0.0, 0.7], [300, 700]) + 1e-9 * np.arange(1000)  # so no cells coincide
    many = Student(location, np.ones(1000), np.full(1000, np.inf))
    tracemalloc.start()
    found = many.prob_lowest()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e7

    def density(z: float) -> float:
        return norm.pdf(z) * norm.sf(z) ** 299 * norm.sf(z - 0.7) ** 700

    first = quad(density, -8, 2, points=[-3], epsabs=1e-12)[0]
    np.testing.assert_allclose(found[:300], first, rtol=1e-3)
    np.testing.assert_allclose(found[300:], (1 - 300 * first) / 700, rtol=1e-3)


def test_prob_lowest_is_the_same_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell between two parts is neither lost nor counted twice."""
    few = Student(*map(np.array, CASES["twelve"]), np.full(12, np.inf))
    whole = few.prob_lowest()
    monkeypatch.setattr(predictive, "_BLOCK_CELLS", 100)
    np.testing.assert_allclose(few.prob_lowest(), whole, rtol=1e-12)
