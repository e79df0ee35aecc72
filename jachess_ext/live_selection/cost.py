"""Operations of training and judging, and what each method has to pay of a selection's runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..scaling.registry import REGISTRY
from ..scaling.selection import OPERATIONS

if TYPE_CHECKING:
    from .predict import Curve

FORWARD = 2.0
"""Per parameter and token; a backward pass to the inputs costs as much, one to the weights too."""


def training_flops(
    parameters: int, trained: int, tokens: float, epochs: float, checkpointing: bool = False
) -> float:
    """6 N × tokens × epochs where all N parameters are trained.

    Of the six, two are for the gradients of weights, which the weights that are not trained (below
    LoRA's adapters) do not have.  Gradient checkpointing runs the forward pass twice.
    """
    each = OPERATIONS * parameters - FORWARD * (parameters - trained)
    return (each + FORWARD * parameters * checkpointing) * tokens * epochs


def paid(curves: Sequence[Curve], method: str) -> float:
    """What choosing by a method costs: the trainings it reads, their judging, kernels, features.

    Losses before fine-tuning are charged to the methods that read them, Θ to lensllm alone; ats is
    taken to visit every size.
    """
    first = [curve.records[0] for curve in curves if curve.records[0].size == 0]
    trained = [[r for r in curve.records if r.size] for curve in curves]
    known = REGISTRY[method]
    if known.needs == "features":
        return sum(record.features_flops for record in first)
    if known.needs in ("parameters", "weights"):
        return 0.0
    zero = known.reads_zero or known.needs == "zero"
    start = sum(record.judging_flops for record in first) if zero else 0.0
    if known.trains == "none":
        return start
    if known.trains == "last":
        trained = [records[-1:] for records in trained]
    runs = [record for records in trained for record in records]
    kernels = sum(r.probe_flops for r in [*first, *runs]) if known.needs == "kernel" else 0.0
    return start + kernels + sum(r.training_flops + r.judging_flops for r in runs)
