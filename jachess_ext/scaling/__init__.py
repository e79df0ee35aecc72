"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

The names are imported at first use: the command line reads `selection` and needs no torch for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._io import require

if TYPE_CHECKING:
    from .advice import Run
    from .bound import Bound, pac_bayes
    from .fitting import FittedLaw, Transition, fit
    from .live import LiveSelection, read_selection, select_live
    from .metrics import coverage, log_rmse, pear_corr, rel_acc
    from .readers import read_runs
    from .runs import LossTable, TableError
    from .search import Ask, Search
    from .selection import Selection, select, sufficient_budget
    from .tables import read_table

__all__ = [
    "Ask",
    "Bound",
    "FittedLaw",
    "LiveSelection",
    "LossTable",
    "Run",
    "Search",
    "Selection",
    "TableError",
    "Transition",
    "coverage",
    "fit",
    "log_rmse",
    "pac_bayes",
    "pear_corr",
    "read_runs",
    "read_selection",
    "read_table",
    "rel_acc",
    "select",
    "select_live",
    "sufficient_budget",
]

_MODULES = {
    "Ask": "search",
    "Bound": "bound",
    "FittedLaw": "fitting",
    "LiveSelection": "live",
    "LossTable": "runs",
    "Run": "advice",
    "Search": "search",
    "Selection": "selection",
    "TableError": "runs",
    "Transition": "fitting",
    "coverage": "metrics",
    "fit": "fitting",
    "log_rmse": "metrics",
    "pac_bayes": "bound",
    "pear_corr": "metrics",
    "read_table": "tables",
    "read_runs": "readers",
    "read_selection": "live",
    "rel_acc": "metrics",
    "select": "selection",
    "select_live": "live",
    "sufficient_budget": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] == "live":
        require("transformers")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
