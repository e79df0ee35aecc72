"""The engine: 2-jets through unmodified PyTorch code (docs/how_it_works.md)."""

from .api import Jet, jet
from .jvp import jvp
from .layout import JetLayout
from .registry import MissingJetRule, jet_rule
from .settings import composed_rules
from .tensor import JetTensor

__all__ = [
    "Jet",
    "JetLayout",
    "JetTensor",
    "MissingJetRule",
    "composed_rules",
    "jet",
    "jet_rule",
    "jvp",
]
