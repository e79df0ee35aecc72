"""Scores of frozen features and of predictions against other computations of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import sklearn.covariance
import sklearn.metrics

from benchmarks.frozen_features import hscore, knn, logme
from jachess_ext.live.trial import class_scores, number_scores
from jachess_ext.scaling.runs import from_forecast, to_forecast

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 24)
FEATURES = RNG.normal(size=(24, 4)) + 0.8 * np.eye(3, 4)[LABELS]


def evidence(y: np.ndarray, features: np.ndarray) -> float:
    """The largest ln N(y; 0, FFᵀ/α + I/β) by the dense density and a search over both."""

    def negative(logs: np.ndarray) -> float:
        alpha, beta = np.exp(np.clip(logs, -30, 30))
        covariance = features @ features.T / alpha + np.eye(len(y)) / beta
        return -float(scipy.stats.multivariate_normal(cov=covariance).logpdf(y))

    starts = [(a, b) for a in (-2.0, 1.0, 4.0) for b in (0.0, 2.0)]
    found = [scipy.optimize.minimize(negative, start, method="Nelder-Mead") for start in starts]
    return -min(one.fun for one in found)


def test_logme_is_the_largest_evidence() -> None:
    each = [evidence(np.equal(LABELS, value).astype(float), FEATURES) for value in range(3)]
    assert logme(FEATURES, LABELS) == pytest.approx(np.mean(each) / 24, rel=1e-5)
    numbers = FEATURES @ [1.0, -0.5, 0.2, 0.0] + 0.3 * RNG.normal(size=24)
    expected = evidence(numbers, FEATURES) / 24
    assert logme(FEATURES, numbers, regression=True) == pytest.approx(expected, rel=1e-5)


def test_hscore_is_the_trace() -> None:
    model = sklearn.covariance.LedoitWolf().fit(FEATURES)
    middle, between = FEATURES.mean(0), np.zeros((4, 4))
    for value in range(3):
        apart = FEATURES[value == LABELS].mean(0) - middle
        between += np.mean(value == LABELS) * np.outer(apart, apart)
    expected = (1 - model.shrinkage_) * np.trace(np.linalg.solve(model.covariance_, between))
    assert hscore(FEATURES, LABELS) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="compares classes"):
        hscore(FEATURES, LABELS, regression=True)


def test_knn_asks_five_other_rows() -> None:
    right, means = 0, []
    for row in range(24):
        apart = np.linalg.norm(FEATURES - FEATURES[row], axis=1)
        near = [other for other in np.argsort(apart) if other != row][:5]
        right += int(np.bincount(LABELS[near], minlength=3).argmax() == LABELS[row])
        means.append(LABELS[near].mean())
    assert knn(FEATURES, LABELS) == pytest.approx(right / 24)
    expected = scipy.stats.pearsonr(means, LABELS).statistic
    assert knn(FEATURES, LABELS.astype(float), regression=True) == pytest.approx(expected)


def test_scores_are_those_of_other_libraries() -> None:
    probabilities = RNG.dirichlet(np.ones(3), 24)
    said, found = probabilities.argmax(1), class_scores(probabilities, LABELS)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(LABELS, said))
    assert found["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(LABELS, said))
    each = [
        2 * np.sum((said == c) & (c == LABELS)) / (np.sum(said == c) + np.sum(c == LABELS))
        for c in range(3)
    ]
    assert found["f1"] == pytest.approx(np.mean(each))
    square = ((probabilities - np.eye(3)[LABELS]) ** 2).sum(1).mean()
    assert found["brier"] == pytest.approx(square)
    numbers, truth = RNG.normal(size=24), RNG.normal(size=24)
    found = number_scores(numbers, truth)
    assert found["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(truth, numbers))
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(numbers, truth).statistic)
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(numbers, truth).statistic)
    assert number_scores(np.ones(24), truth)["pearson"] == 0.0


def test_forecasts_are_of_what_is_missing() -> None:
    assert to_forecast("loss", 0.3, 50) == to_forecast("brier", 0.3, 50) == 0.3
    assert to_forecast("accuracy", 0.75, 50) == 0.25 and to_forecast("accuracy", 1.0, 50) == 0.01
    assert from_forecast("f1", 0.25) == 0.75 and from_forecast("mae", 0.25) == 0.25
