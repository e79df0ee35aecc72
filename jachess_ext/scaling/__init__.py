"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

The names are imported at first use: the command line reads `selection` and needs no torch for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fitting import FittedLaw, Transition, fit
    from .readers import read_runs
    from .runs import LossTable, TableError
    from .search import Ask, Search
    from .selection import Selection, select
    from .tables import read_table

__all__ = [
    "Ask",
    "FittedLaw",
    "LossTable",
    "Search",
    "Selection",
    "TableError",
    "Transition",
    "fit",
    "read_runs",
    "read_table",
    "select",
]

_MODULES = {
    "fitting": ("FittedLaw", "Transition", "fit"),
    "readers": ("read_runs",),
    "runs": ("LossTable", "TableError"),
    "search": ("Ask", "Search"),
    "selection": ("Selection", "select"),
    "tables": ("read_table",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
