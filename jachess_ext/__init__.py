"""jachess_ext: Jacobian and Hessian regularisation, and a lens on fine-tuning.

The public names; ``evaluation`` and ``training`` are imported at first use, since they need the
extras (transformers, scikit-learn, matplotlib).
"""

from importlib import import_module
from types import ModuleType

from .torch_floor import require_torch as _require_torch

_require_torch()  # before the rest, which would fail with an older torch in many ways

# ruff: noqa: E402
from .jet import Jet, JetTensor, MissingJetRule, jet, jvp
from .ntk import ntk, ntk_loss
from .smoothness import DecisionPenalty, JacHess, Smoothness, smoothness

__version__ = "0.1.0"
__all__ = [
    "DecisionPenalty",
    "JacHess",
    "Jet",
    "JetTensor",
    "MissingJetRule",
    "Smoothness",
    "evaluation",
    "jet",
    "jvp",
    "ntk",
    "ntk_loss",
    "ops",
    "scaling",
    "smoothness",
    "training",
]

_LAZY = ("evaluation", "ops", "scaling", "training")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
