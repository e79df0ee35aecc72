"""Smoothness of a model: estimators, layer weights and the JacHess regulariser (spec 01)."""

from .calibration import BaseNorms
from .estimate import Smoothness, smoothness
from .regulariser import JacHess, JacHessOutput
from .weights import layer_profile

__all__ = ["BaseNorms", "JacHess", "JacHessOutput", "Smoothness", "layer_profile", "smoothness"]
