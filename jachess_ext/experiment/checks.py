"""What can be known of a model before any training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor, nn

from ..smoothness.settings import layer_indices
from ..tasks.examples import DataError
from ..tasks.models import check_corruptible, load_config, load_tokenizer
from ..training import MethodArguments
from ..training.tapt import is_masked
from .grid import Grid

_NEED_MORE = {  # schedulers: a metric, or settings of their own
    *("reduce_lr_on_plateau", "greedy", "warmup_stable_decay"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr"),
}


def check_methods(methods: Sequence[str]) -> list[MethodArguments]:
    """The methods, parsed.

    Raises:
        DataError: one of them is unknown or has a bad setting.
    """
    try:
        return [MethodArguments.parse(method) for method in methods]
    except ValueError as error:
        raise DataError(str(error)) from error


def check_scheduler(name: str) -> None:
    """Whether the learning rate's course can be built from its name alone.

    Raises:
        DataError: transformers has none of that name, or it needs more than a name.
    """
    known = sorted({kind.value for kind in transformers.SchedulerType} - _NEED_MORE)
    if name not in known:
        raise DataError(f"scheduler is {name!r}; expected one of {', '.join(known)}")


def check_model(grid: Grid, methods: Sequence[MethodArguments]) -> Any:
    """Whether the model and its tokenizer serve all of the grid's methods and conditions.

    Returns:
        The tokenizer.

    Raises:
        DataError: one of them cannot be loaded; a token that is needed is missing; a method names
            layers the model has not, or needs a language model that its family has not.
    """
    tokenizer, config = load_tokenizer(grid.model), load_config(grid.model)
    if grid.conditions.corruption:
        check_corruptible(tokenizer, grid.model)
    try:
        for method in methods:
            _check(method, tokenizer, config)
    except ValueError as error:
        raise DataError(f"{grid.model}: {error}") from error
    return tokenizer


def _check(method: MethodArguments, tokenizer: Any, config: transformers.PretrainedConfig) -> None:
    if method.method == "tapt" and is_masked(config) and tokenizer.mask_token is None:
        raise ValueError("method 'tapt' masks tokens, and the tokenizer has no mask token")
    count = getattr(config, "num_hidden_layers", None)
    if not method.smooths or count is None:
        return
    regulariser = method.regulariser(nn.Module())
    layers = regulariser.settings.layers
    chosen = 1 if layers == "logits" else len(layer_indices(layers, count))
    if isinstance(regulariser.weights, Tensor) and len(regulariser.weights) != chosen:
        raise ValueError(
            f"method {method.label!r} has {len(regulariser.weights)} weights for {chosen} layers"
        )
