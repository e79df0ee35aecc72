"""Figures of predictions against definitions, sums by hand, counted permutations and sklearn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import logit, softmax
from sklearn.metrics import brier_score_loss, log_loss

from jachess_ext.lab.compare.metrics import (
    apply_temperature,
    class_figures,
    cluster_flip_test,
    expected_calibration_error,
    fit_temperature,
    holm,
    reliability,
    sign_test,
)
from jachess_ext.lab.workbench.metrics import GLUE, brier_score

PREDICTIONS = np.array([1, 1, 1, 0, 0, 0, 1, 0, 1, 1])
REFERENCES = np.array([1, 0, 1, 0, 1, 0, 1, 0, 0, 1])
TP, FP, FN, TN = 4, 2, 1, 3


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("sst2", (TP + TN) / 10),
        ("mrpc", 2 * TP / (2 * TP + FP + FN)),
        ("cola", (TP * TN - FP * FN) / math.sqrt((TP + FP) * (TP + FN) * (TN + FP) * (TN + FN))),
    ],
)
def test_scores_of_two_classes(task: str, expected: float) -> None:
    assert GLUE[task](PREDICTIONS, REFERENCES) == pytest.approx(expected)


def test_spearman_is_the_rank_formula() -> None:
    predictions, references = [0.1, 0.5, 0.3, 9.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    ranks = [1, 3, 2, 5, 4]
    squares = sum((a - b) ** 2 for a, b in zip(ranks, range(1, 6), strict=True))
    expected = 1 - 6 * squares / (5 * 24)
    assert GLUE["stsb"](predictions, references) == pytest.approx(expected)


@pytest.mark.parametrize("task", sorted(GLUE))
def test_perfect_and_constant_predictions(task: str) -> None:
    references = [0.5, 1.0, 2.0, 3.0] if task == "stsb" else [0, 1, 0, 1]
    assert GLUE[task](references, references) == pytest.approx(1.0)
    if task not in ("mrpc", "qqp"):
        chance = 0.5 if GLUE[task].name == "accuracy" else 0.0
        assert GLUE[task]([1, 1, 1, 1], references) == pytest.approx(chance)


def test_bad_predictions_are_named() -> None:
    with pytest.raises(ValueError, match="one shape"):
        GLUE["rte"]([1, 0], [1])
    with pytest.raises(ValueError, match="finite"):
        GLUE["stsb"]([float("nan"), 1.0], [1.0, 2.0])


def test_brier_score_by_hand() -> None:
    probabilities = [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]
    # (0.3² + 0.2² + 0.1²) = 0.14 and (0.1² + 0.7² + 0.6²) = 0.86
    assert brier_score(probabilities, [0, 1]) == pytest.approx((0.14 + 0.86) / 2, abs=1e-12)


def test_ece_by_hand() -> None:
    # confidences 0.9, 0.95 (bin 8 of 8, one right) and 0.6, 0.55 (bin 5, both right)
    probabilities = [[0.9, 0.1], [0.05, 0.95], [0.6, 0.4], [0.45, 0.55]]
    labels = [0, 0, 0, 1]
    expected = 0.5 * abs(0.5 - 0.925) + 0.5 * abs(1.0 - 0.575)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-12)


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
        ([[0.5, 0.6]], [0], "sum to 1"),
        ([[np.nan, 0.5]], [0], "finite"),
        ([[0.5, 0.5]], [-1], "0 … 1"),
        ([[0.5, 0.5]], [0.5], "integers"),
    ],
)
def test_bad_input_is_named(probabilities: object, labels: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        brier_score(probabilities, labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        reliability(probabilities, labels)  # type: ignore[arg-type]


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
        apply_temperature(softmax(logits, -1), 2.5), softmax(logits / 2.5, -1), rtol=1e-12
    )


@pytest.mark.parametrize("right", [6, 9])
def test_the_fitted_temperature(right: int) -> None:
    """Confidence everywhere σ(4), `right` of ten right: best at 4/T = logit(right/10)."""
    p = np.tile([1 / (1 + np.exp(4.0)), 1 / (1 + np.exp(-4.0))], (10, 1))
    y = np.array([1] * right + [0] * (10 - right))
    assert fit_temperature(p, y) == pytest.approx(4 / logit(right / 10), rel=1e-3)
    assert fit_temperature(p, np.ones(10, int)) < 0.1, "all right: as low as makes p = 1"


def test_holm_by_hand() -> None:
    assert holm([0.02, 0.3, 0.01, 0.5]) == pytest.approx([0.06, 0.6, 0.04, 0.6])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_the_sign_test_by_hand() -> None:
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
