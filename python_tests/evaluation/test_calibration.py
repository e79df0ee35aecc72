"""Calibration figures against closed forms and sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from jachess_ext.evaluation.calibration import (
    binary_brier_score,
    brier_score,
    expected_calibration_error,
    reliability,
)


def test_brier_score_by_hand() -> None:
    probabilities = [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]
    # (0.3² + 0.2² + 0.1²) = 0.14 and (0.1² + 0.7² + 0.6²) = 0.86
    assert brier_score(probabilities, [0, 1]) == pytest.approx((0.14 + 0.86) / 2, abs=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_brier_score_of_uniform_and_certain_predictions(classes: int) -> None:
    labels = np.arange(30) % classes
    uniform = np.full((30, classes), 1 / classes)
    certain = np.eye(classes)[labels]
    wrong = np.eye(classes)[(labels + 1) % classes]
    assert brier_score(uniform, labels) == pytest.approx(1 - 1 / classes, abs=1e-12)
    assert brier_score(certain, labels) == 0
    assert brier_score(wrong, labels) == 2


def test_binary_brier_is_the_mean_square_and_half_the_multiclass_score() -> None:
    p = np.array([0.9, 0.4, 0.5, 0.0])
    labels = np.array([1, 1, 0, 0])
    expected = (0.01 + 0.36 + 0.25 + 0.0) / 4
    assert binary_brier_score(p, labels) == pytest.approx(expected, abs=1e-12)
    assert brier_score(np.stack([1 - p, p], 1), labels) == pytest.approx(2 * expected, abs=1e-12)


def test_ece_by_hand() -> None:
    # confidences 0.9, 0.95 (bin 8 of 8, one right) and 0.6, 0.55 (bin 5, both right)
    probabilities = [[0.9, 0.1], [0.05, 0.95], [0.6, 0.4], [0.45, 0.55]]
    labels = [0, 0, 0, 1]
    expected = 0.5 * abs(0.5 - 0.925) + 0.5 * abs(1.0 - 0.575)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_ece_of_a_constant_confidence_is_its_gap_to_the_accuracy() -> None:
    probabilities = np.tile([0.8, 0.2], (10, 1))
    labels = np.array([0] * 6 + [1] * 4)
    for bins in (1, 8, 15):
        assert expected_calibration_error(probabilities, labels, bins) == pytest.approx(0.2)


def test_one_bin_is_mean_confidence_against_accuracy() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), size=200)
    labels = rng.integers(0, 4, 200)
    gap = abs(p.max(1).mean() - (p.argmax(1) == labels).mean())
    assert expected_calibration_error(p, labels, 1) == pytest.approx(gap, abs=1e-12)


def test_labels_drawn_from_the_probabilities_are_calibrated() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(3), size=60_000)
    labels = (p.cumsum(1) < rng.random((60_000, 1))).sum(1)
    assert expected_calibration_error(p, labels) < 0.01
    assert brier_score(p, labels) == pytest.approx(1 - (p**2).sum(1).mean(), abs=0.01)


def test_reliability_counts_and_edges() -> None:
    probabilities = [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75], [0.126, 0.874]]
    diagram = reliability(probabilities, [0, 0, 0, 1], bins=8)
    # bins are (lower, upper]: 0.5 falls in the fourth, 0.75 in the sixth, 0.874 in the seventh
    assert diagram.counts.tolist() == [0, 0, 0, 1, 0, 1, 1, 1]
    assert diagram.accuracy[[3, 5, 6, 7]].tolist() == [1, 0, 1, 1]
    assert np.isnan(diagram.accuracy[[0, 1, 2, 4]]).all()
    assert diagram.edges.tolist() == [i / 8 for i in range(9)]


@pytest.mark.parametrize(
    ("probabilities", "labels", "words"),
    [
        ([[0.5, 0.5]], [0, 1], "shapes"),
        (np.zeros((0, 2)), np.zeros(0, int), "N > 0"),
        ([[0.5, 0.6]], [0], "sum to 1"),
        ([[np.nan, 0.5]], [0], "finite"),
        ([[0.5, 0.5]], [2], "0 … 1"),
        ([[0.5, 0.5]], [-1], "0 … 1"),
        ([[0.5, 0.5]], [0.5], "integers"),
    ],
)
def test_bad_input_is_named(probabilities: object, labels: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        brier_score(probabilities, labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        reliability(probabilities, labels)  # type: ignore[arg-type]


def test_zero_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        reliability([[0.5, 0.5]], [0], bins=0)
