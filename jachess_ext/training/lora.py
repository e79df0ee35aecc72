"""LoRA by peft, as the paper sets it (r = 8, α = 16)."""

from __future__ import annotations

from typing import Any

from ..evaluation.extras import require
from .random_state import drawing_apart

RANK, ALPHA = 8, 16


def with_lora(model: Any, rank: int = RANK, alpha: int = ALPHA, *, seed: int = 0) -> Any:
    """The model with low-rank adapters; only these and the new head are trained, and saved.

    The head is what peft takes for one (``classifier``, ``score``) and what `load_model` had to
    draw, such as a pooler that a masked language model's checkpoint lacks.  Adapters go where peft
    puts them for the model's family, or on every linear layer of a family that peft does not know.

    Args:
        seed: of the adapters' first values.

    Raises:
        MissingExtra: peft is not installed.
    """
    peft = require("peft")
    known = require("peft.utils").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = None if model.config.model_type in known else "all-linear"
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        modules_to_save=list(getattr(model, "drawn_modules", ())) or None,
    )
    with drawing_apart(seed):
        return peft.get_peft_model(model, config)
