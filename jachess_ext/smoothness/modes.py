"""What a model is for a while, module by module and parameter by parameter as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


@contextmanager
def trained(wanted: Mapping[nn.Parameter, bool]) -> Iterator[None]:
    """Within it these parameters ask for a gradient, or do not."""
    before = {parameter: parameter.requires_grad for parameter in wanted}
    try:
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)
        yield
    finally:
        for parameter, wants in before.items():
            parameter.requires_grad_(wants)
