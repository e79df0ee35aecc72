"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets.

Nothing here imports torch before a fit reads a kernel: the command line reads `selection` without.
"""

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
