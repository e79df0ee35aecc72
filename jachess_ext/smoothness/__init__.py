"""Smoothness of a model (docs/how_it_works.md): estimators, layer weights, the regulariser."""

from .calibration import BaseNorms
from .decision import DecisionOutput, DecisionPenalty
from .estimate import Smoothness, smoothness
from .perturbations import Isotropic, Substitution
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
    "Substitution",
    "layer_profile",
    "smoothness",
]
