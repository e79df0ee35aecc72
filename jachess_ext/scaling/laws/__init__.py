"""Scaling laws, one file each; `LAWS` names those that need nothing but a curve."""

from ..arrays import Array
from .base import Law, Parameter, Points
from .kaplan import Kaplan
from .lensllm import FreeLens, MeasuredKernel, MeasuredLens
from .power import Power
from .rectified import Rectified

LAWS: dict[str, type[Law]] = {
    "lensllm": FreeLens,
    "rectified": Rectified,
    "power": Power,
    "kaplan": Kaplan,
}

__all__ = [
    "LAWS",
    "Array",
    "FreeLens",
    "Kaplan",
    "Law",
    "MeasuredKernel",
    "MeasuredLens",
    "Parameter",
    "Points",
    "Power",
    "Rectified",
]
