"""Fine-tuning methods in transformers' Trainer, JacHess among them (docs/how_it_works.md, How it is
trained), and callbacks that measure: a model's smoothness, the drift of its kernel."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "jachess_ext.training needs transformers, which is not installed: "
        "pip install 'jachess-ext[hf]'"
    ) from None

from .callbacks import DriftPoint, NTKDrift, SmoothnessMonitor
from .methods import METHODS, DualSchedule, JacHess, Method, parse_method, with_lora
from .trainer import MethodMixin, MethodTrainer

__all__ = [
    "METHODS",
    "DriftPoint",
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
