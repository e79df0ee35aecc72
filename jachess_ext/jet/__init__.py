"""The engine: 2-jets through unmodified PyTorch code (docs/how_it_works.md)."""

from .api import jet, jvp
from .eager import Jet
from .errors import MissingJetRule
from .functions import forward_code
from .layout import JetLayout, composed_rules
from .registry import jet_rule
from .second_order import divergence, hessian_diagonal, hvp, laplacian
from .tensor import JetTensor

__all__ = [
    "Jet",
    "JetLayout",
    "JetTensor",
    "MissingJetRule",
    "composed_rules",
    "divergence",
    "forward_code",
    "hessian_diagonal",
    "hvp",
    "jet",
    "jet_rule",
    "jvp",
    "laplacian",
]
