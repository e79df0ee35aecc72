"""How fast the kernel's contraction runs, and how fast matrix products do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jachess_ext.ntk.api import Job
from jachess_ext.ntk.contract import Settings, contract, plan

_SIZE = 2048


@dataclass(frozen=True)
class Work:
    """Something that takes so many floating-point operations."""

    step: Callable[[], object]
    operations: float


def contraction_rate(model: nn.Module, batch: dict[str, Any]) -> Work:
    """The contraction of one captured block: linear layers' operations, as counted per form.

    What is not a linear layer (embeddings, norms, biases) takes its time too and counts nothing.
    """
    job = Job(model, batch, None)
    captured = job.capture(0, list(range(len(batch["input_ids"]))))
    settings: Settings = job._settings
    operations = 0.0
    for choice in plan(captured, (len(batch["input_ids"]),) * 2, 2, True, settings):
        if choice.cost is not None:
            cost = choice.cost
            operations += cost.gram_flops if choice.form == "A" else cost.materialise_flops

    def step() -> None:
        with torch.no_grad():
            for _ in contract(captured, captured, True, settings):
                pass

    return Work(step, operations)


def gemm_rate(device: torch.device) -> Work:
    """A product of two square matrices."""
    a, b = torch.randn(2, _SIZE, _SIZE, device=device).unbind()
    return Work(lambda: a @ b, 2.0 * _SIZE**3)
