"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

torch is imported only when a fit is given a kernel, so that `jachess select` starts without it.
"""

from .fitted import FittedLaw, Transition
from .fitting import fit
from .loss_table import LossTable
from .readers import read_runs
from .search import Ask, Search
from .selection import Selection, select
from .table_error import TableError
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
