"""jachess_ext: Jacobian and Hessian regularisation, and a lens on fine-tuning.

The public names; ``evaluation``, ``training`` and the callbacks are imported at first use, since
they need the extras (transformers, lightning, scikit-learn, matplotlib).
"""

from importlib import import_module
from typing import Any

from .torch_floor import require_torch as _require_torch

_require_torch()  # before the rest, which would fail with an older torch in many ways

# ruff: noqa: E402
from .jet import Jet, JetTensor, MissingJetRule, jet, jvp
from .ntk import ntk, ntk_loss
from .smoothness import DecisionPenalty, JacHess, Smoothness, SmoothnessProbe, smoothness

__version__ = "0.1.0"
__all__ = [
    "DecisionPenalty",
    "JacHess",
    "Jet",
    "JetTensor",
    "LightningSmoothnessMonitor",
    "MissingJetRule",
    "Smoothness",
    "SmoothnessMonitor",
    "SmoothnessProbe",
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
_LAZY_NAMES = {"SmoothnessMonitor": "training", "LightningSmoothnessMonitor": "lightning"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        return getattr(import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
