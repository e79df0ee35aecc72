"""Fine-tuning methods for transformers' Trainer; callbacks that measure smoothness and the NTK."""

from .._io import TRAINING, require_all

require_all("jachess_ext.training", TRAINING)  # before the imports below fail in words of their own

from . import attention as attention  # noqa: E402  registers its name
from .callbacks import NTKDrift, SmoothnessMonitor  # noqa: E402
from .methods import (  # noqa: E402
    METHODS,
    DualSchedule,
    JacHess,
    Method,
    parse_method,
    with_lora,
)
from .trainer import MethodMixin, MethodTrainer  # noqa: E402

__all__ = [
    "METHODS",
    "DualSchedule",
    "JacHess",
    "Method",
    "MethodMixin",
    "MethodTrainer",
    "NTKDrift",
    "SmoothnessMonitor",
    "parse_method",
    "with_lora",
]
