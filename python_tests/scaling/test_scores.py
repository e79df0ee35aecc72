"""Scores of predictions against other computations of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from jachess_ext.lab.live.trial import class_scores, regression_scores

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 24)


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
    found = regression_scores(numbers, truth)
    assert found["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(truth, numbers))
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(numbers, truth).statistic)
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(numbers, truth).statistic)
    assert regression_scores(np.ones(24), truth)["pearson"] == 0.0
