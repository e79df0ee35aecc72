"""Scores of dev rows beside the loss, and how the one a selection ranks by is forecast."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..evaluation.calibration import brier_score
from ..evaluation.extras import require
from ..evaluation.metrics import ACCURACY, MATTHEWS, SPEARMAN

LOSS = "loss"
"""Mean negative log-likelihood, or in a regression the mean squared error."""
OF_CLASSES = ("accuracy", "f1", "matthews", "brier")
OF_NUMBERS = ("mae", "pearson", "spearman")
_LOWER = (LOSS, "brier", "mae")  # the better; of the others 1 is the best there is

Floats = npt.NDArray[Any]


def class_scores(probabilities: Floats, labels: Floats) -> dict[str, float]:
    """`OF_CLASSES` of probabilities [n, C] and labels [n]; f1 is the mean over classes."""
    chosen = probabilities.argmax(1)
    f1 = require("sklearn.metrics").f1_score
    return {
        "accuracy": ACCURACY(chosen, labels),
        "f1": float(f1(labels, chosen, average="macro", zero_division=0.0)),
        "matthews": MATTHEWS(chosen, labels),
        "brier": float(brier_score(probabilities, labels)),
    }


def number_scores(predictions: Floats, labels: Floats) -> dict[str, float]:
    """`OF_NUMBERS` of predictions [n] and labels [n]; constant predictions correlate by 0."""
    flat = np.ptp(predictions) == 0 or np.ptp(labels) == 0
    return {
        "mae": float(np.abs(predictions - labels).mean()),
        "pearson": 0.0 if flat else float(np.corrcoef(predictions, labels)[0, 1]),
        "spearman": SPEARMAN(predictions, labels),
    }


def to_forecast(name: str, value: float, rows: int) -> float:
    """What methods extrapolate: lower is better and above 0.

    A loss is itself.  Of a score whose best is 1 it is what is missing, 1 − value; where nothing is
    missing in so many rows, half a row's worth.
    """
    return value if name in _LOWER else max(1.0 - value, 0.5 / rows)


def from_forecast(name: str, value: float) -> float:
    """A forecast in the score's own terms."""
    return value if name in _LOWER else 1.0 - value


def title(name: str) -> str:
    """What `to_forecast` makes of a score, in words."""
    return f"dev {name}" if name in _LOWER else f"1 − dev {name}"
