"""Smoothness of a model (docs/how_it_works.md): estimators, layer weights, the regulariser."""

from .calibration import BaseNorms
from .decision import DecisionOutput, DecisionPenalty
from .estimate import Smoothness, smoothness
from .perturbations import Isotropic, Substitution
from .probe import SmoothnessProbe, decision_slopes
from .regulariser import JacHess, JacHessOutput
from .weights import layer_profile

__all__ = [
    "BaseNorms",
    "DecisionOutput",
    "DecisionPenalty",
    "Isotropic",
    "JacHess",
    "JacHessOutput",
    "Smoothness",
    "SmoothnessProbe",
    "Substitution",
    "decision_slopes",
    "layer_profile",
    "smoothness",
]
