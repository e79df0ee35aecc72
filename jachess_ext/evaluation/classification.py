"""Figures of class probabilities against labels, raw and after one temperature."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .calibration import brier_score, expected_calibration_error
from .extras import require

Floats = npt.NDArray[np.float64]
_RANGE = (0.05, 20.0)
"""Of the temperature; a few rows that are all right would ask for 0."""


def class_figures(probabilities: Floats, labels: npt.NDArray[Any]) -> dict[str, float | None]:
    """Accuracy, AUC, NLL, both Brier scores and ECE.

    `auc`: area under the ROC curve of class 1; of more classes, the mean of each against the rest;
    None where a class is missing among the labels.  `nll`: mean −log p of the label, nats.
    `brier`: mean over rows of Σ_c (p_c − 1[c = label])², from 0 to 2.  `brier_binary`: the JacHess
    paper's, mean (p₁ − y)², half of that; None with more than two classes.  `ece`: of the predicted
    class, 8 bins.

    Args:
        probabilities: [N, C], rows sum to 1.
        labels: [N].

    Raises:
        ValueError: as `brier_score`.
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


def nll(probabilities: Floats, labels: npt.NDArray[Any]) -> float:
    """Mean of −log p of the label, nats; p below the smallest normal number counts as that."""
    p = probabilities[np.arange(len(labels)), labels]
    return float(-np.mean(np.log(np.maximum(p, np.finfo(np.float64).tiny))))


def at_temperature(probabilities: Floats, temperature: float) -> Floats:
    """softmax(z / T) of the logits z behind the probabilities [N, C]."""
    logits = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny)) / temperature
    scaled = np.exp(logits - logits.max(1, keepdims=True))
    return scaled / scaled.sum(1, keepdims=True)


def fitted_temperature(probabilities: Floats, labels: npt.NDArray[Any]) -> float:
    """The temperature of least NLL (Guo et al. 2017), between 0.05 and 20.

    Args:
        probabilities: [N, C] of rows that are neither trained nor judged on.
        labels: [N].
    """
    found = require("scipy.optimize").minimize_scalar(
        lambda log_t: nll(at_temperature(probabilities, np.exp(log_t)), labels),
        bounds=tuple(np.log(_RANGE)),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(np.exp(found.x))


def _auc(probabilities: Floats, labels: npt.NDArray[Any]) -> float | None:
    count = probabilities.shape[1]
    if len(np.unique(labels)) < count:
        return None
    area = require("sklearn.metrics").roc_auc_score
    if count == 2:
        return float(area(labels, probabilities[:, 1]))
    return float(area(labels, probabilities, multi_class="ovr", average="macro"))
