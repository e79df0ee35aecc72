"""The empirical neural tangent kernel and the loss it predicts (LensLLM, Eq. 8 and 9)."""

from .api import Measurement, measure_ntk, ntk
from .loss import Spectrum, ntk_loss
from .report import Report

__all__ = ["Measurement", "Report", "Spectrum", "measure_ntk", "ntk", "ntk_loss"]
