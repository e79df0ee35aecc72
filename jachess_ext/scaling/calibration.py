"""Intervals calibrated on reference models, whose loss at the target is known already."""

from __future__ import annotations

import numpy as np

from .arrays import Array, Index
from .predictive import Student

FEWEST = 3


def calibrated(predictive: Student, references: Index, truth: Array) -> Student:
    """The distribution whose bias and width are those the method had on the references.

    Standardised errors z = (ln true − location) / scale of exchangeable models have a common mean
    and deviation; with z̄ and s estimated from n references, a new model's z is
    z̄ + s √(1 + 1/n) t_{n−1} (exact where z is Gaussian).

    Args:
        predictive: of all models.
        references: rows of the models whose truth is known, [r].
        truth: their losses at the target, [r].

    Raises:
        ValueError: fewer than three references.
    """
    count = len(references)
    if count < FEWEST:
        raise ValueError(
            f"{count} reference models are too few to calibrate intervals; expected {FEWEST} or "
            "more"
        )
    z = (np.log(truth) - predictive.location[references]) / predictive.scale[references]
    spread = max(float(z.std(ddof=1)), 1e-6) * np.sqrt(1 + 1 / count)
    return Student(
        predictive.location + predictive.scale * z.mean(),
        predictive.scale * spread,
        np.full(len(predictive.location), count - 1.0),
    )
