"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

torch is imported only for the PAC-Bayesian bound and when a fit is given a kernel, so that
`jachess select` starts without it.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .fitted import FittedLaw, Transition
from .fitting import fit
from .loss_table import LossTable
from .readers import read_runs
from .search import Ask, Search
from .selection import Selection, select
from .table_error import TableError
from .tables import read_table

if TYPE_CHECKING:
    from .bound import PacBayesBound, pac_bayes_bound
    from .tails import mean_tail_exponent

__all__ = [
    "Ask",
    "FittedLaw",
    "LossTable",
    "PacBayesBound",
    "Search",
    "Selection",
    "TableError",
    "Transition",
    "fit",
    "mean_tail_exponent",
    "pac_bayes_bound",
    "read_runs",
    "read_table",
    "select",
]


_HOMES = {"PacBayesBound": "bound", "pac_bayes_bound": "bound", "mean_tail_exponent": "tails"}

if not TYPE_CHECKING:  # where a checker saw it, it would take any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
