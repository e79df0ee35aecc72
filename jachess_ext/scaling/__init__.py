"""Scaling laws of fine-tuning, and choosing a model to fine-tune from small subsets."""

from .bound import Bound, pac_bayes
from .fitted import FittedLaw, Transition
from .fitting import fit
from .metrics import coverage, log_rmse, pear_corr, rel_acc
from .selecting import select, sufficient_budget
from .selection import Selection
from .table import LossTable, TableError, read_table

__all__ = [
    "Bound",
    "FittedLaw",
    "LossTable",
    "Selection",
    "TableError",
    "Transition",
    "coverage",
    "fit",
    "log_rmse",
    "pac_bayes",
    "pear_corr",
    "read_table",
    "rel_acc",
    "select",
    "sufficient_budget",
]
