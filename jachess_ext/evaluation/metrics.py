"""Scores of the GLUE tasks, each the one its leaderboard and the JacHess paper use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .extras import require


@dataclass(frozen=True)
class Metric:
    """A score, the higher the better: its `name`, and a function of two arrays [N]."""

    name: str
    function: Callable[[npt.ArrayLike, npt.ArrayLike], float]

    def __call__(self, predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
        """The score.

        Raises:
            ValueError: no example, shapes other than [N] and [N], or NaN among the predictions.
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
    """Rank correlation; 0 where one side is constant and has no ranks to correlate."""
    if np.ptp(np.asarray(predictions)) == 0 or np.ptp(np.asarray(references)) == 0:
        return 0.0
    return float(require("scipy.stats").spearmanr(predictions, references).statistic)


ACCURACY = Metric("accuracy", _accuracy)
MATTHEWS = Metric("Matthews correlation", _matthews)
F1 = Metric("F1", _f1)
SPEARMAN = Metric("Spearman correlation", _spearman)

GLUE = {
    "cola": MATTHEWS,
    "mrpc": F1,
    "qqp": F1,
    "stsb": SPEARMAN,
    "sst2": ACCURACY,
    "mnli": ACCURACY,
    "qnli": ACCURACY,
    "rte": ACCURACY,
}
"""The metric of each GLUE task, by the task's name in the `glue` data set."""


def glue_metric(task: str) -> Metric:
    """The metric of a GLUE task.

    Raises:
        ValueError: the task is none of `GLUE`.
    """
    if task not in GLUE:
        raise ValueError(f"unknown GLUE task {task!r}; known are {', '.join(sorted(GLUE))}")
    return GLUE[task]
