"""Choosing a model to fine-tune by fine-tuning the candidates on subsets; the page of a choice.

The names are imported at first use: the page of a table's selection needs no transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ..._io import require

if TYPE_CHECKING:
    from .choice import LiveSelection, read_selection, select_live
    from .plan import LiveSettings

__all__ = ["LiveSelection", "LiveSettings", "read_selection", "select_live"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers")
    return getattr(import_module(f"{__name__}.choice"), name)  # where they are all imported
