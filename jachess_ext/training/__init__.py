"""JacHess in transformers' Trainer, the alternating schedule by itself (docs/how_it_works.md,
How it is trained), and callbacks that look: a model's smoothness, the drift of its kernel."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "jachess_ext.training needs transformers, which is not installed: "
        "pip install 'jachess-ext[hf]'"
    ) from None

from .arguments import JacHessArguments
from .dual import DualSchedule, PassSummary
from .lora import with_lora
from .method_arguments import METHODS, MethodArguments
from .methods import MethodMixin, MethodTrainer
from .mixin import JacHessMixin, JacHessTrainer
from .monitor import SmoothnessMonitor
from .ntk_drift import DriftPoint, NTKDrift

__all__ = [
    "METHODS",
    "DriftPoint",
    "DualSchedule",
    "JacHessArguments",
    "JacHessMixin",
    "JacHessTrainer",
    "MethodArguments",
    "MethodMixin",
    "MethodTrainer",
    "NTKDrift",
    "PassSummary",
    "SmoothnessMonitor",
    "with_lora",
]
