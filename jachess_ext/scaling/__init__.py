"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

The names are imported at first use: the command line reads `selection` and needs no torch for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bound import Bound, pac_bayes
    from .fitting import FittedLaw, Transition, fit
    from .readers import read_runs
    from .runs import LossTable, TableError
    from .search import Ask, Search
    from .selection import Selection, select
    from .tables import read_table

__all__ = [
    "Ask",
    "Bound",
    "FittedLaw",
    "LossTable",
    "Search",
    "Selection",
    "TableError",
    "Transition",
    "fit",
    "pac_bayes",
    "read_runs",
    "read_table",
    "select",
]

_MODULES = {
    "Ask": "search",
    "Bound": "bound",
    "FittedLaw": "fitting",
    "LossTable": "runs",
    "Search": "search",
    "Selection": "selection",
    "TableError": "runs",
    "Transition": "fitting",
    "fit": "fitting",
    "pac_bayes": "bound",
    "read_table": "tables",
    "read_runs": "readers",
    "select": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
