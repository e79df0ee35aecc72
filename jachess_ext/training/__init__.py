"""JacHess in transformers' Trainer, and the alternating schedule by itself (spec 01, "How it is
trained")."""

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
from .mixin import JacHessMixin
from .trainer import JacHessTrainer

__all__ = ["DualSchedule", "JacHessArguments", "JacHessMixin", "JacHessTrainer", "PassSummary"]
