"""The empirical neural tangent kernel and the loss it predicts (LensLLM, Eq. 8 and 9)."""

from .api import Measurement, Report, measure_ntk, ntk
from .loss import Spectrum, kernel_drift, label_alignment, ntk_loss

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
