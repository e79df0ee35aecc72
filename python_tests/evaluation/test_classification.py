"""Figures of probabilities: scikit-learn's own, pairs counted by hand, and a solved temperature."""

from __future__ import annotations

import numpy as np
import pytest
from jachess_ext.evaluation.classification import (
    at_temperature,
    class_figures,
    fitted_temperature,
)
from scipy.special import logit, softmax
from sklearn.metrics import brier_score_loss, log_loss

RNG = np.random.default_rng(0)


def drawn(rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    logits = 2 * RNG.normal(size=(rows, classes))
    return softmax(logits, -1), RNG.integers(0, classes, rows)


def test_two_classes() -> None:
    p, y = drawn(60, 2)
    found = class_figures(p, y)
    assert found["nll"] == pytest.approx(log_loss(y, p), rel=1e-12)
    assert found["brier_binary"] == pytest.approx(brier_score_loss(y, p[:, 1]), rel=1e-12)
    assert found["brier"] == pytest.approx(2 * brier_score_loss(y, p[:, 1]), rel=1e-12)
    assert found["accuracy"] == np.mean((p[:, 1] > 0.5) == y)
    ones, zeros = p[y == 1, 1], p[y == 0, 1]
    assert found["auc"] == pytest.approx((ones[:, None] > zeros[None]).mean(), rel=1e-12)


def test_three_classes() -> None:
    p, y = drawn(60, 3)
    found = class_figures(p, y)
    areas = [(p[y == c, c][:, None] > p[y != c, c][None]).mean() for c in range(3)]
    assert found["auc"] == pytest.approx(np.mean(areas), rel=1e-12)
    assert found["brier_binary"] is None
    assert class_figures(p, np.zeros(60, int))["auc"] is None


def test_a_temperature_divides_the_logits() -> None:
    logits = 3 * RNG.normal(size=(5, 4))
    np.testing.assert_allclose(
        at_temperature(softmax(logits, -1), 2.5), softmax(logits / 2.5, -1), rtol=1e-12
    )


@pytest.mark.parametrize("right", [6, 9])
def test_the_fitted_temperature(right: int) -> None:
    """Confidence everywhere σ(4), `right` of ten right: best at 4/T = logit(right/10)."""
    p = np.tile([1 / (1 + np.exp(4.0)), 1 / (1 + np.exp(-4.0))], (10, 1))
    y = np.array([1] * right + [0] * (10 - right))
    assert fitted_temperature(p, y) == pytest.approx(4 / logit(right / 10), rel=1e-3)
    assert fitted_temperature(p, np.ones(10, int)) < 0.1, "all right: as low as makes p = 1"
