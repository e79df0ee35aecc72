"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

Nothing here imports torch before a fit reads a kernel: the command line reads `selection` without.
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
