"""First and second derivatives through unmodified PyTorch models, and penalties and kernels of
them.

Every public name is imported with its submodule at first use: the command line's help needs no
torch, and only ``compare``, ``training`` and the callbacks need the extras (transformers,
lightning, scikit-learn, matplotlib).

Public are the names of ``__all__`` here and in `ops`, `scaling` and `training`, and what the
reference's pages list beside them; the rest may change in any release.
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

from .torch_private import require_torch as _require_torch

if TYPE_CHECKING:
    from . import ops, scaling, training
    from .differentiable.mode import differentiable
    from .graphs import graphed
    from .jet import (
        Jet,
        JetTensor,
        MissingJetRule,
        divergence,
        forward_code,
        hessian_diagonal,
        hvp,
        jet,
        laplacian,
    )
    from .jet.api import jvp
    from .jet.gradient_loss import gradient_loss
    from .lightning import LightningSmoothnessMonitor
    from .ntk import Spectrum, measure_ntk, ntk, ntk_loss
    from .smoothness import JacHess, Smoothness, SmoothnessProbe, smoothness
    from .training import SmoothnessMonitor

_require_torch()  # first, since the rest fails with an older torch in many ways

__version__ = "0.2.0.dev0"
__all__ = [
    "JacHess",
    "Jet",
    "JetTensor",
    "LightningSmoothnessMonitor",
    "MissingJetRule",
    "Smoothness",
    "SmoothnessMonitor",
    "SmoothnessProbe",
    "Spectrum",
    "differentiable",
    "divergence",
    "forward_code",
    "gradient_loss",
    "graphed",
    "hessian_diagonal",
    "hvp",
    "jet",
    "jvp",
    "laplacian",
    "measure_ntk",
    "ntk",
    "ntk_loss",
    "ops",
    "scaling",
    "smoothness",
    "training",
]

_MODULES = ("ops", "scaling", "training")
_HOMES = {
    "graphs": ("graphed",),
    "jet": (
        *("Jet", "JetTensor", "MissingJetRule", "divergence", "forward_code", "hessian_diagonal"),
        *("hvp", "jet", "jvp", "laplacian"),
    ),
    "jet.gradient_loss": ("gradient_loss",),
    "differentiable.mode": ("differentiable",),
    "lightning": ("LightningSmoothnessMonitor",),
    "ntk": ("Spectrum", "measure_ntk", "ntk", "ntk_loss"),
    "smoothness": ("JacHess", "Smoothness", "SmoothnessProbe", "smoothness"),
    "training": ("SmoothnessMonitor",),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # where a checker saw it, it would take any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return _import_module(f"{__name__}.{name}")
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f"{__name__}.{_NAMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _Package(_ModuleType):
    """Bind `differentiable`, `jet`, `ntk` and `smoothness` to functions.

    Python would bind each name to the subpackage of that name when it is imported.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _NAMES and isinstance(value, _ModuleType):
            if not hasattr(value, name):
                return  # the function is in a module of it, which is imported at first use
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # Pickled by name, as plain modules are: cloudpickle, joblib and Ray send functions that use
        # it.
        return _import_module, (self.__name__,)


_sys.modules[__name__].__class__ = _Package
