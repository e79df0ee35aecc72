"""Training or evaluation mode for a while, module by module as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Within it the whole model is in training mode, or in evaluation mode (no dropout)."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
