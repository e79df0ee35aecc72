"""Judging a fine-tuned model: metrics, calibration, robustness, statistics, and reports.

Needs numpy and torch to import; scipy, scikit-learn and matplotlib only where they are used.
"""

from .calibration import (
    Reliability,
    binary_brier_score,
    brier_score,
    expected_calibration_error,
    reliability,
)
from .extras import MissingExtra
from .metrics import ACCURACY, F1, GLUE, MATTHEWS, SPEARMAN, Metric, glue_metric
from .robustness import corrupt_tokens, embedding_scale, perturbed_embeddings, unknown_token_id
from .statistics import Summary, holm_bonferroni, mann_whitney, summarise

__all__ = [
    "ACCURACY",
    "F1",
    "GLUE",
    "MATTHEWS",
    "SPEARMAN",
    "Metric",
    "MissingExtra",
    "Reliability",
    "Summary",
    "binary_brier_score",
    "brier_score",
    "corrupt_tokens",
    "embedding_scale",
    "expected_calibration_error",
    "glue_metric",
    "holm_bonferroni",
    "mann_whitney",
    "perturbed_embeddings",
    "reliability",
    "summarise",
    "unknown_token_id",
]
