"""Calibration of class probabilities: Brier score, expected calibration error, reliability.

Sources: Brier 1950; Guo et al. 2017, *On Calibration of Modern Neural Networks* (equal-width bins
of the predicted class's probability); 8 bins as in the JacHess paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BINS = 8


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram: `edges` [bins + 1]; the others [bins], NaN in bins without examples."""

    edges: Floats
    confidence: Floats
    accuracy: Floats
    counts: npt.NDArray[np.int64]


def brier_score(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Multi-class Brier score, mean over examples of Σ_c (p_c − 1[c = label])²; from 0 to 2.

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N], integers in 0 … C − 1.

    Raises:
        ValueError: shapes that do not fit, no example, rows that are no distribution, or a label
            out of range.
    """
    p, y = _checked(probabilities, labels)
    return float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1)))


def binary_brier_score(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Brier score of two classes, mean of (p − y)²; from 0 to 1, half the multi-class score.

    Args:
        probabilities: [N], of class 1.
        labels: [N], 0 or 1.

    Raises:
        ValueError: as `brier_score`.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 1:
        raise ValueError(f"probabilities of class 1 must be [N]; got shape {list(p.shape)}")
    return brier_score(np.stack([1 - p, p], axis=1), labels) / 2


def reliability(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS
) -> Reliability:
    """Mean confidence and accuracy of the predicted class in equal-width bins (lower, upper].

    Args:
        probabilities: [N, C].
        labels: [N].
        bins: number of bins on [0, 1].

    Raises:
        ValueError: fewer than one bin, or as `brier_score`.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}")
    p, y = _checked(probabilities, labels)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
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
    """ECE = Σ_b (n_b / N) |accuracy_b − confidence_b| (Guo et al. 2017, Eq. 3).

    Arguments and errors are those of `reliability`.
    """
    diagram = reliability(probabilities, labels, bins)
    filled = diagram.counts > 0
    gap = np.abs(diagram.accuracy[filled] - diagram.confidence[filled])
    return float(np.sum(gap * diagram.counts[filled]) / diagram.counts.sum())


def _checked(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[Floats, npt.NDArray[np.int64]]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if p.ndim != 2 or y.shape != p.shape[:1] or len(y) == 0:
        raise ValueError(
            "expected probabilities [N, C] and labels [N] with N > 0; "
            f"got shapes {list(p.shape)} and {list(y.shape)}"
        )
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= p.shape[1]:
        raise ValueError(f"labels must be integers in 0 … {p.shape[1] - 1}; got {np.unique(y)[:9]}")
    off = np.abs(p.sum(axis=1) - 1).max()
    if not (np.isfinite(p).all() and p.min() >= 0 and off < 1e-3):
        raise ValueError("each row of probabilities must be finite, non-negative and sum to 1")
    return p, y.astype(np.int64)
