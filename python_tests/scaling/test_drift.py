"""Intervals of the law that `fit` chooses: how they widen, against the formula written out."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from jachess_ext.scaling import FittedLaw, fit
from jachess_ext.scaling.drift import measure_drift
from python_tests.scaling import curves

AHEAD = 8 * curves.SIZES[-1]


def bending(seed: int) -> np.ndarray:
    """Return three curves of no law that `fit` knows, [3, 14]."""
    generator = np.random.default_rng(seed)
    slopes = np.abs(generator.normal(0.15, 0.1, (3, 14))).cumsum(-1) / np.arange(1, 15)
    return np.exp(-(slopes * np.log(2)).cumsum(-1) + 0.003 * generator.standard_normal((3, 14)))


def slope_errors(losses: np.ndarray, law: str) -> np.ndarray:
    """Return the backtest's root mean square error of the slope, a curve at a time."""
    found = []
    for row in losses:
        means = []
        for k in range(7, 14):
            forecast = np.asarray(fit(curves.SIZES[:k], row[:k], law).predict(curves.SIZES[k:]))
            reach = np.log(curves.SIZES[k:] / curves.SIZES[k - 1])
            means.append(np.mean((np.log(forecast / row[k:]) / reach) ** 2))
        found.append(np.sqrt(np.mean(means)))
    return np.array(found)


LOSSES = bending(0)


@cache
def fits() -> tuple[FittedLaw, FittedLaw]:
    """The law chosen for `LOSSES`, and the same law named."""
    chosen = fit(curves.SIZES, LOSSES)
    return chosen, fit(curves.SIZES, LOSSES, chosen.law)


def test_the_interval_is_the_formulas() -> None:
    chosen, exact = fits()
    end = np.log(curves.SIZES[-3:])
    slope = np.abs([np.polyfit(end, np.log(row[-3:]), 1)[0] for row in LOSSES])
    reach, span = np.log(AHEAD / curves.SIZES[-1]), np.log(curves.SIZES[-1] / curves.SIZES[0])
    drift = 0.85 * np.sqrt(slope * slope_errors(LOSSES, chosen.law) * reach / span) * reach
    own = exact.predictive(curves.SIZES[-1])
    total = own.scale**2 + drift**2
    predictive = chosen.predictive(AHEAD)
    np.testing.assert_allclose(predictive.scale, np.sqrt(total), rtol=1e-6)
    np.testing.assert_allclose(predictive.dof, total**2 / (own.scale**4 / own.dof + drift**4 / 2))
    np.testing.assert_allclose(predictive.location, exact.predictive(AHEAD).location, rtol=1e-12)
    assert exact.drift is None and chosen.drift is not None, "a named law is taken as exact"


def test_within_the_sizes_measured_it_is_the_laws_own() -> None:
    found, exact = fits()
    for size in (curves.SIZES[0] / 2, curves.SIZES[3], curves.SIZES[-1]):
        ends, own = np.array(found.interval(size)), np.array(exact.interval(size))
        np.testing.assert_allclose(ends, own, rtol=1e-9)
    low, high = found.interval(AHEAD * 2.0 ** np.arange(5))
    assert (np.diff(np.log(high / low)) > 0).all()  # [n, 5]: further ahead, wider


def test_without_a_backtest_the_slope_counts_twice() -> None:
    sizes = curves.SIZES[:4]
    losses = curves.noisy(sizes**-0.3, np.random.default_rng(0), 0.05)
    found = fit(sizes, losses)
    assert found.law == "ats"
    assert not found.backtest
    slope = abs(np.polyfit(np.log(sizes[-3:]), np.log(losses[-3:]), 1)[0])
    own = fit(sizes, losses, "ats").predictive(sizes[-1])
    drift = 0.85 * slope * np.sqrt(np.log(8) ** 3 / np.log(8))
    given = found.predictive(8 * sizes[-1])
    np.testing.assert_allclose(given.scale, np.sqrt(own.scale**2 + drift**2))


@pytest.mark.parametrize("dropped", [13, 10, 0])
def test_a_loss_of_weight_0_counts_nowhere(dropped: int) -> None:
    generator = np.random.default_rng(0)
    kept, losses = np.arange(14) != dropped, bending(1)
    errors = {k: generator.standard_normal((3, 14 - k)) for k in (7, 9)}
    left_out = {
        k - (dropped < k): np.delete(e, dropped - k, 1) if dropped >= k else e
        for k, e in errors.items()
    }
    expected = measure_drift(
        curves.SIZES[kept], losses[:, kept], np.ones((3, 13), dtype=bool), left_out
    )
    for each in errors.values():
        if dropped >= 9:
            each[1, dropped - 14] = 100.0
    counted = np.where([[True], [False], [True]], True, kept)
    found = measure_drift(curves.SIZES, np.where(counted, losses, 50.0), counted, errors)
    for name in ("last", "span", "rate"):
        assert getattr(found, name)[1] == pytest.approx(getattr(expected, name)[1])
        assert np.isfinite(getattr(found, name)).all()


def test_of_a_backtest_that_saw_nothing_the_slope_stands_in() -> None:
    losses, counted = bending(0), np.ones((3, 14), dtype=bool)
    counted[1, 12:] = False
    found = measure_drift(curves.SIZES, losses, counted, {12: np.full((3, 2), 0.4)})
    slope = abs(np.polyfit(np.log(curves.SIZES[9:12]), np.log(losses[1, 9:12]), 1)[0])
    assert found.rate[1] == pytest.approx(0.85 * slope)


def test_a_backtest_that_went_to_infinity_counts() -> None:
    losses = bending(0)
    errors = {7: np.zeros((3, 7)), 8: np.array([[0.1] * 6, [np.inf] * 6, [np.nan] * 6])}
    rate = measure_drift(curves.SIZES, losses, losses > 0, errors).rate
    assert np.isfinite(rate[[0, 2]]).all() and rate[1] == np.inf
