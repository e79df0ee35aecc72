"""Choosing a model to fine-tune by fine-tuning the candidates on small subsets (LensLLM)."""

from .records import Kernel, RunRecord, Seconds
from .result import Candidate, Flops, LiveSelection, Prediction
from .store import SelectionFolder, read_records, read_selection

__all__ = [
    "Candidate",
    "Flops",
    "Kernel",
    "LiveSelection",
    "Prediction",
    "RunRecord",
    "Seconds",
    "SelectionFolder",
    "read_records",
    "read_selection",
]
