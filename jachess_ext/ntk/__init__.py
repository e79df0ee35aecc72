"""The empirical neural tangent kernel and the loss it predicts (LensLLM, Eq. 8 and 9)."""

from .api import Measurement, measure_ntk, ntk
from .drift import kernel_drift, label_alignment
from .loss import Spectrum, ntk_loss
from .report import Report

__all__ = [
    "Measurement",
    "Report",
    "Spectrum",
    "kernel_drift",
    "label_alignment",
    "measure_ntk",
    "ntk",
    "ntk_loss",
]
