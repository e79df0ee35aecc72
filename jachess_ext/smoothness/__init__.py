"""Smoothness of a model (docs/how_it_works.md): estimators, layer weights, the regulariser."""

from .estimators import Smoothness, SmoothnessProbe, decision_slopes, smoothness
from .jachess import BaseNorms, JacHess, JacHessOutput, layer_profile

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
