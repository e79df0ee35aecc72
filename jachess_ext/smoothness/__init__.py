"""Smoothness of a model (docs/how_it_works.md): estimators, layer weights, the regulariser."""

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
