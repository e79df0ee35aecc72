"""The training steps that are compared: plain fine-tuning and JacHess in both modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import jachess_ext as jx

from .models import Batch
from .timing import Step


def plain_step(model: nn.Module, batch: Batch) -> Step:
    """Forward and backward of the task loss; no optimiser step, as in all the others."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step


def regulariser(model: nn.Module, **settings: Any) -> jx.JacHess:
    """JacHess with uniform λ, two directions and all dimensions unless said otherwise."""
    given: dict[str, Any] = {"weights": "uniform", "directions": 2, "dimensions": "all"}
    return jx.JacHess(model, **(given | settings))


def penalty_step(model: nn.Module, batch: Batch, **settings: Any) -> Step:
    """unlab mode: R alone, forward and backward, on a batch without labels."""
    reg = regulariser(model, **settings)
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}

    def step() -> None:
        model.zero_grad(set_to_none=True)
        reg(unlabelled).loss.backward()

    return step


def train_step(model: nn.Module, batch: Batch, **settings: Any) -> Step:
    """train mode: task loss + R from one forward, and its backward."""
    reg = regulariser(model, **settings)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        reg(batch).total.backward()

    return step


def gradient_norm(model: nn.Module) -> float:
    """Norm of all gradients: benchmarks check that a step really trained something."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
