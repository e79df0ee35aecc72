"""Tables that are out of the ordinary: a sensible answer or a sentence, never a crash."""

from __future__ import annotations

import numpy as np
import pytest

from jachess_ext.scaling import LossTable, TableError, select
from jachess_ext.scaling.registry import REGISTRY

SIZES = 100.0 * 2.0 ** np.arange(6)
BUDGET, TARGET = 1600.0, 12800.0
FALL = -0.1 * np.arange(6)
LEVELS = np.array([[1.0], [1.2], [1.5]])

ODD = {
    "rising": LEVELS * np.exp(-3 * FALL),
    "constant": LEVELS * np.ones(6),
    "alike": np.ones((3, 1)) * np.exp(FALL),
    "all one": np.ones((3, 6)),
    "one exact power law": LEVELS * SIZES**-0.2,
    "a cliff": LEVELS * np.where(np.arange(6) < 4, 1.0, 1e-3),
    "tiny": 1e-12 * LEVELS * np.exp(FALL),
    "huge": 1e12 * LEVELS * np.exp(FALL),
    "far apart": np.array([[1e-3], [1.0], [1e3]]) * np.exp(FALL),
    "one model": LEVELS[:1] * np.exp(FALL),
    "errors near 0": np.array([[0.001], [0.002], [0.0005]]) * np.exp(FALL),
}
FORECASTERS = [name for name, method in REGISTRY.items() if method.forecasts]


def of(losses: np.ndarray) -> LossTable:
    names = tuple(f"m{place}" for place in range(len(losses)))
    return LossTable(names, SIZES, losses, None)


@pytest.mark.parametrize("method", FORECASTERS)
@pytest.mark.parametrize("kind", ODD)
def test_odd_losses_give_an_answer(kind: str, method: str) -> None:
    found = select(of(ODD[kind]), BUDGET, TARGET, method)
    assert sorted(found.ranking) == sorted(found.names)
    predicted = found.predicted_losses
    assert np.isfinite(predicted).all() and (predicted > 0).all()
    assert found.has_intervals
    low, high = found.interval_ends(0.9)
    assert not np.isnan(low).any() and (low <= predicted).all() and (predicted <= high).all()
    probability = found.best_probabilities
    assert probability.sum() == pytest.approx(1.0) and (probability >= 0).all()


def test_rising_curves_are_not_forecast_to_fall() -> None:
    """By `blend`: above the last loss less a tenth of what was gained, and in the same order."""
    losses = ODD["rising"]
    found = select(of(losses), BUDGET, TARGET)
    assert (found.predicted_losses > losses[:, 4] * 0.9).all()
    assert found.ranking == ["m0", "m1", "m2"]


def test_equal_models_are_equally_good() -> None:
    np.testing.assert_allclose(
        select(of(ODD["alike"]), BUDGET, TARGET).best_probabilities, 1 / 3, atol=1e-6
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "is 0; expected a positive number .*half a test example"),
        (np.nan, "size 400 is nan; expected a positive number$"),
        (np.inf, "is inf"),
        (-0.5, "is -0.5"),
    ],
)
def test_losses_without_a_logarithm(value: float, words: str) -> None:
    losses = LEVELS * np.exp(FALL)
    losses[1, 2] = value
    with pytest.raises(TableError, match=words):
        select(of(losses), BUDGET, TARGET)


def test_two_sizes() -> None:
    table = LossTable(("a", "b"), SIZES[:2], np.ones((2, 2)), None)
    with pytest.raises(ValueError, match="blend needs 3 sizes above 0 or more"):
        select(table, 200, TARGET)
    assert select(table, 200, TARGET, "ats").ranking == ["a", "b"]
