"""The engine: 2-jets through unmodified PyTorch code (docs/how_it_works.md)."""

from .adapters.functions import forward_code
from .api import jet, jvp
from .engine.errors import MissingJetRule
from .engine.layout import JetLayout, composed_rules
from .engine.registry import jet_rule
from .engine.tensor import JetTensor
from .passes.eager import Jet
from .second_order import divergence, hessian_diagonal, hvp, laplacian

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
