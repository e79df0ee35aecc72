"""Metrics of predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..._io import require

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A score, the higher the better, computed from predictions and references [N].

    Examples:
        >>> ACCURACY([0, 1, 1], [0, 1, 0])
        0.6666666666666666
    """

    name: str
    function: Callable[[npt.ArrayLike, npt.ArrayLike], float]

    def __call__(self, predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
        """Return the score of predictions [N] against references [N].

        Raises:
            ValueError: there is no example, the shapes are not [N] and [N], or a prediction is not
                finite.
        """
        p, r = np.asarray(predictions), np.asarray(references)
        if p.ndim != 1 or p.shape != r.shape or len(p) == 0:
            raise ValueError(
                f"expected predictions and references of one shape [N], N > 0; "
                f"got {list(p.shape)} and {list(r.shape)}"
            )
        if np.issubdtype(p.dtype, np.floating) and not np.isfinite(p).all():
            raise ValueError("predictions must be finite; some are NaN or infinite")
        return self.function(p, r)


def _accuracy(predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def _matthews(predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
    return float(require("sklearn.metrics").matthews_corrcoef(references, predictions))


def _f1(predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
    return float(require("sklearn.metrics").f1_score(references, predictions, zero_division=0.0))


def _spearman(predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
    """Return the rank correlation; 0 if predictions or references are constant."""
    if np.ptp(np.asarray(predictions)) == 0 or np.ptp(np.asarray(references)) == 0:
        return 0.0
    return float(require("scipy.stats").spearmanr(predictions, references).statistic)


ACCURACY = Metric("accuracy", _accuracy)
MATTHEWS = Metric("Matthews correlation", _matthews)


F1 = Metric("F1", _f1)


SPEARMAN = Metric("Spearman correlation", _spearman)
GLUE = {
    **dict.fromkeys(("sst2", "mnli", "qnli", "rte"), ACCURACY),
    **dict.fromkeys(("mrpc", "qqp"), F1),
    **{"cola": MATTHEWS, "stsb": SPEARMAN},
}
"""The metric of each GLUE task, as on the leaderboard and in the JacHess paper."""


def probabilities_and_labels(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return probabilities [N, C] and labels [N] as arrays; raise ValueError if they are
    invalid."""
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


def brier_score(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the mean over examples of Σ_c (p_c − 1[c = label])², from 0 to 2 (Brier 1950).

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N], integers in 0 … C − 1.

    Raises:
        ValueError: shapes do not match, there is no example, a row of probabilities is not a
            distribution, or a label is out of range.

    Examples:
        >>> round(brier_score([[0.7, 0.3], [0.2, 0.8]], [0, 1]), 3)
        0.13
    """
    p, y = probabilities_and_labels(probabilities, labels)
    return float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1)))
