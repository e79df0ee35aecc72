"""Smoothness of a model: estimators, and the regulariser (docs/how_it_works.md)."""

from . import reverse as reverse  # registers its engine
from .estimators import Smoothness, smoothness
from .jachess import BaseNorms, JacHess, JacHessOutput, layer_profile
from .probe import SmoothnessProbe, decision_slopes

__all__ = [
    "BaseNorms",
    "JacHess",
    "JacHessOutput",
    "Smoothness",
    "SmoothnessProbe",
    "decision_slopes",
    "layer_profile",
    "smoothness",
]
