"""Score predictions, measure their calibration, and test differences over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..._io import require
from ..workbench.metrics import Floats, brier_score, probabilities_and_labels

# Calibration of class probabilities

BINS = 8  # as in the JacHess paper
_TEMPERATURES = (0.05, 20.0)  # bounds: where all of a few rows are right, the NLL is least at 0
_TINY = np.finfo(np.float64).tiny
Labels = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram: `edges` [bins + 1]; the others [bins], NaN in bins without examples."""

    edges: Floats
    confidence: Floats
    accuracy: Floats
    counts: npt.NDArray[np.int64]


def reliability(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS
) -> Reliability:
    """Return confidence and accuracy of the predicted class, means in equal bins (lower, upper].

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N], integers in 0 … C − 1.
        bins: number of bins on [0, 1].

    Raises:
        ValueError: as `brier_score`.

    Examples:
        >>> reliability([[0.7, 0.3], [0.2, 0.8]], [0, 1], bins=2).counts.tolist()
        [0, 2]
    """
    p, y = probabilities_and_labels(probabilities, labels)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    # (lower, upper]: a confidence of exactly 0.5 of two classes is in the lower bin
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            edges,
            np.bincount(index, weights=confidence, minlength=bins) / counts,
            np.bincount(index, weights=right, minlength=bins) / counts,
            counts,
        )


def expected_calibration_error(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS
) -> float:
    """Return Σ_b (n_b / N) |accuracy_b − confidence_b| (Guo et al. 2017, Eq. 3).

    Arguments and errors are those of `reliability`.

    Examples:
        >>> round(expected_calibration_error([[0.7, 0.3], [0.2, 0.8]], [0, 1]), 3)
        0.25
    """
    diagram = reliability(probabilities, labels, bins)
    filled = diagram.counts > 0
    gap = np.abs(diagram.accuracy[filled] - diagram.confidence[filled])
    return float(np.sum(gap * diagram.counts[filled]) / diagram.counts.sum())


def class_figures(probabilities: Floats, labels: Labels) -> dict[str, float | None]:
    """Return accuracy, AUC, NLL, both Brier scores and ECE by name.

    `auc`: area under the ROC curve of class 1; of more classes, the mean of each against the rest;
    None where a class is missing among the labels.  `nll`: mean −log p of the label, nats.
    `brier_binary`: the JacHess paper's, mean (p₁ − y)², half of `brier`; None with more than two
    classes.  `ece`: of the predicted class, 8 bins.

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
    """Return the mean of −log p of the label in nats, p clipped at the smallest normal number."""
    p = probabilities[np.arange(len(labels)), labels]
    return float(-np.mean(np.log(np.maximum(p, _TINY))))


def _auc(probabilities: Floats, labels: Labels) -> float | None:
    count = probabilities.shape[1]
    if len(np.unique(labels)) < count:
        return None
    area = require("sklearn.metrics").roc_auc_score
    if count == 2:
        return float(area(labels, probabilities[:, 1]))
    return float(area(labels, probabilities, multi_class="ovr", average="macro"))


def apply_temperature(probabilities: Floats, temperature: float) -> Floats:
    """Return softmax(z / T) [N, C], where the probabilities are softmax(z)."""
    # log p is z up to a constant of the row, which the softmax removes
    logits = np.log(np.maximum(probabilities, _TINY)) / temperature
    return require("scipy.special").softmax(logits, axis=1)  # type: ignore[no-any-return]


def fit_temperature(probabilities: Floats, labels: Labels) -> float:
    """Return the temperature of least NLL (Guo et al. 2017), between 0.05 and 20.

    Args:
        probabilities: [N, C] of rows that are neither trained nor judged on.
        labels: [N].

    Examples:
        >>> sure = np.array([[0.9, 0.1]] * 4)
        >>> round(fit_temperature(sure, np.array([0, 0, 0, 1])), 2)
        2.0
    """
    # over ln T, where the bounds 0.05 and 20 are equally far from T = 1
    least = require("scipy.optimize").minimize_scalar(
        lambda log_t: nll(apply_temperature(probabilities, np.exp(log_t)), labels),
        bounds=tuple(np.log(_TEMPERATURES)),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(np.exp(least.x))


# Tests over runs

_MAX_EXACT = 16  # clusters; of more, only a sample of the flips of signs is drawn


def sign_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign test; differences of zero are left out.

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


def cluster_flip_test(clusters: Sequence[Sequence[float]]) -> float:
    """Return the two-sided p-value of the mean difference, flipping signs of whole clusters.

    A permutation test: under the hypothesis of no effect each cluster's differences are as likely
    as their negatives.  Differences within a cluster (all tasks of a seed, say) may depend on each
    other.  All 2^n flips up to n = 16 clusters, beyond that 65,536 random ones.

    Raises:
        ValueError: no clusters, or NaN.

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
    # sums, not means: all flips have the same number of differences.  The margin lets rounding not
    # decide whether a flip that is as large counts.
    flipped = np.abs(signs @ sums)
    return float(np.mean(flipped >= np.abs(sums.sum()) * (1 - 1e-12)))
