"""Whether a model keeps the promise to divide its loss by ``num_items_in_batch``.

The Trainer takes any ``**kwargs`` in ``forward`` for that promise and then leaves the loss
undivided under gradient accumulation.  Models that swallow the argument (in transformers 5.23 the
sequence classifiers of BERT, RoBERTa, GPT-2, OPT and Llama, measured) so get a task loss as many
times too large as there are micro-batches, beside which a penalty would count that much less.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..smoothness.estimators import in_mode


def ignores_item_count(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the loss is the same for one item and for two; leaves the model as it was."""
    with torch.no_grad(), in_mode(model, training=False):
        one, two = (model(**batch, num_items_in_batch=torch.tensor(n)).get("loss") for n in (1, 2))
    return one is not None and torch.equal(one, two)


def warn_of_ignored_item_count(steps: int) -> None:
    """Say what was off and what has been done."""
    warnings.warn(
        f"the model accepts num_items_in_batch but does not use it, so with {steps} accumulation "
        f"steps transformers' Trainer would make the task loss {steps} times too large; this "
        "trainer divides it. For a plain Trainer set model.accepts_loss_kwargs = False first",
        stacklevel=2,
    )
