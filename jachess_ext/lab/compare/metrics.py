"""Scores and calibration of predictions, and significance tests of differences over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..._io import require
from ..workbench.metrics import Floats, brier_score, probabilities_and_labels

# Calibration of class probabilities

BINS = 8  # as in the JacHess paper
_TEMPERATURES = (0.05, 20.0)  # bounds: if all rows are predicted correctly, the optimum is 0
_TINY = np.finfo(np.float64).tiny
Labels = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram.

    Attributes:
        edges: edges of the bins of confidence, [bins + 1].
        confidence, accuracy: means over the examples of each bin, [bins]; NaN in empty bins.
        counts: number of examples in each bin, [bins].
    """

    edges: Floats
    confidence: Floats
    accuracy: Floats
    counts: npt.NDArray[np.int64]


def reliability(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS
) -> Reliability:
    """Return the mean confidence and accuracy of the predicted class in bins of equal width.

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N], integers in 0 … C − 1.
        bins: number of bins on [0, 1]; a bin is an interval (lower, upper].

    Raises:
        ValueError: as `brier_score`.

    Examples:
        >>> reliability([[0.7, 0.3], [0.2, 0.8]], [0, 1], bins=2).counts.tolist()
        [0, 2]
    """
    p, y = probabilities_and_labels(probabilities, labels)
    confidence, is_correct = p.max(axis=1), p.argmax(axis=1) == y
    # (lower, upper]: with two classes, a confidence of exactly 0.5 is in the lower bin
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            edges,
            np.bincount(index, weights=confidence, minlength=bins) / counts,
            np.bincount(index, weights=is_correct, minlength=bins) / counts,
            counts,
        )


def expected_calibration_error(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS
) -> float:
    """Return Σ_b (n_b / N) |accuracy_b − confidence_b| (Guo et al. 2017, Eq. 3).

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N], integers in 0 … C − 1.
        bins: number of bins on [0, 1].

    Raises:
        ValueError: as `brier_score`.

    Examples:
        >>> round(expected_calibration_error([[0.7, 0.3], [0.2, 0.8]], [0, 1]), 3)
        0.25
    """
    diagram = reliability(probabilities, labels, bins)
    nonempty = diagram.counts > 0
    gap = np.abs(diagram.accuracy[nonempty] - diagram.confidence[nonempty])
    return float(np.sum(gap * diagram.counts[nonempty]) / diagram.counts.sum())


def class_figures(probabilities: Floats, labels: Labels) -> dict[str, float | None]:
    """Return accuracy, AUC, NLL, both Brier scores and ECE, by name.

    `auc` is the area under the ROC curve of class 1, or the mean over classes against the rest if
    there are more than two; None if a class does not occur among the labels.  `nll` is the mean
    −log p of the label in nats.  `brier_binary` is that of the JacHess paper, mean (p₁ − y)², half
    of `brier`; None with more than two classes.  `ece` is that of the predicted class, in 8 bins.

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N].

    Raises:
        ValueError: as `brier_score`.

    Examples:
        >>> figures = class_figures(np.array([[0.7, 0.3], [0.2, 0.8]]), np.array([0, 1]))
        >>> figures["accuracy"], round(figures["brier_binary"], 3)
        (1.0, 0.065)
    """
    brier = brier_score(probabilities, labels)
    return {
        "accuracy": float(np.mean(probabilities.argmax(1) == labels)),
        "auc": _auc(probabilities, labels),
        "nll": nll(probabilities, labels),
        "brier": brier,
        "brier_binary": brier / 2 if probabilities.shape[1] == 2 else None,
        "ece": expected_calibration_error(probabilities, labels),
    }


def nll(probabilities: Floats, labels: Labels) -> float:
    """Return the mean −log p of the label in nats; p is clipped at the smallest normal number.

    Args:
        probabilities: [N, C].
        labels: [N].
    """
    p = probabilities[np.arange(len(labels)), labels]
    return float(-np.mean(np.log(np.maximum(p, _TINY))))


def _auc(probabilities: Floats, labels: Labels) -> float | None:
    """Return the AUC, see `class_figures`."""
    num_classes = probabilities.shape[1]
    if len(np.unique(labels)) < num_classes:
        return None
    roc_auc_score = require("sklearn.metrics").roc_auc_score
    if num_classes == 2:
        return float(roc_auc_score(labels, probabilities[:, 1]))
    return float(roc_auc_score(labels, probabilities, multi_class="ovr", average="macro"))


def apply_temperature(probabilities: Floats, temperature: float) -> Floats:
    """Return softmax(z / T), [N, C], for probabilities softmax(z), [N, C]."""
    # log p is z plus a constant for each row, which the softmax removes
    logits = np.log(np.maximum(probabilities, _TINY)) / temperature
    return require("scipy.special").softmax(logits, axis=1)  # type: ignore[no-any-return]


def fit_temperature(probabilities: Floats, labels: Labels) -> float:
    """Return the temperature T with the lowest NLL (Guo et al. 2017), between 0.05 and 20.

    Args:
        probabilities: [N, C], of validation rows.
        labels: [N].

    Examples:
        >>> confident = np.array([[0.9, 0.1]] * 4)
        >>> round(fit_temperature(confident, np.array([0, 0, 0, 1])), 2)
        2.0
    """
    # ln T is minimised over, in which the bounds 0.05 and 20 are equally far from T = 1
    least = require("scipy.optimize").minimize_scalar(
        lambda log_t: nll(apply_temperature(probabilities, np.exp(log_t)), labels),
        bounds=tuple(np.log(_TEMPERATURES)),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(np.exp(least.x))


# Tests over runs

_MAX_EXACT = 16  # largest number of clusters for which all sign flips are enumerated


def sign_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign test; zero differences are left out.

    Raises:
        ValueError: a difference is NaN.

    Examples:
        >>> sign_test([0.1, 0.2, 0.1, -0.1])
        0.625
    """
    d = np.asarray(differences)
    if np.isnan(d).any():
        raise ValueError("the sign test takes no NaN")
    count = int((d != 0).sum())
    if not count:
        return 1.0
    return float(require("scipy.stats").binomtest(int((d > 0).sum()), count).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm's step-down method.

    Examples:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    p = np.asarray(p_values)
    order, factors = p.argsort(), np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1)
    return adjusted.tolist()


def cluster_flip_test(clusters: Sequence[Sequence[float]]) -> float:
    """Return the two-sided p-value of a permutation test of the mean difference.

    Signs are flipped for whole clusters: under the null hypothesis, the differences of a cluster
    are as likely as their negatives.  Differences within a cluster (such as all tasks of a seed)
    may be dependent.  All 2^n flips are enumerated for n ≤ 16 clusters; for more, 65,536 random
    flips are drawn.

    Args:
        clusters: the differences of each cluster.

    Raises:
        ValueError: there are no clusters, or a difference is NaN.

    Examples:
        >>> cluster_flip_test([[0.1, 0.2], [0.1], [0.3]])
        0.25
    """
    sums = np.array([np.sum(cluster) for cluster in clusters], dtype=np.float64)
    if not len(sums) or np.isnan(sums).any():
        raise ValueError("the test needs at least one cluster, and no NaN")
    if len(sums) <= _MAX_EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**_MAX_EXACT, len(sums)))
        signs[0] = 1
    # Sums serve as well as means, as all flips have the same number of differences.  The margin
    # makes flips with an equal sum count in spite of rounding.
    flipped_sums = np.abs(signs @ sums)
    return float(np.mean(flipped_sums >= np.abs(sums.sum()) * (1 - 1e-12)))
