"""Fine-tuning methods for transformers' Trainer; callbacks that measure smoothness and the NTK."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "jachess_ext.training needs transformers, which is not installed: "
        "pip install 'jachess-ext[hf]'"
    ) from None

from .callbacks import NTKDrift, SmoothnessMonitor
from .methods import METHODS, DualSchedule, JacHess, Method, parse_method, with_lora
from .trainer import MethodMixin, MethodTrainer

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
