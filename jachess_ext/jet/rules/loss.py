"""Losses that models compute from their own logits when a batch carries labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import general_rule, jet_rule
from ..tensor import JetTensor


@jet_rule(F.nll_loss)
def nll_loss(
    input: JetTensor, target: Tensor, weight: Tensor | None = None, *args: Any, **named: Any
) -> JetTensor:
    """Linear in the log-probabilities, so the same on every stream."""
    losses = [F.nll_loss(stream, target, weight, *args, **named) for stream in input.streams]
    return input.with_streams(torch.stack(losses))


@jet_rule(F.cross_entropy)
def cross_entropy(
    input: JetTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    deprecated = size_average is not None or reduce is not None
    if target.is_floating_point() or label_smoothing or deprecated:
        rule = general_rule(F.cross_entropy, "class probabilities, label smoothing")
        settings = (size_average, ignore_index, reduce, reduction, label_smoothing)
        return rule(input, target, weight, *settings)
    logs = F.log_softmax(input, dim=0 if input.ndim == 1 else 1)
    return F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)


def _reduced(losses: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


@jet_rule(F.mse_loss)
def mse_loss(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    if size_average is not None or reduce is not None or weight is not None:
        rule = general_rule(F.mse_loss, "weight, size_average and reduce are not covered")
        return rule(input, target, size_average, reduce, reduction, weight)
    difference = input - target
    return _reduced(difference * difference, reduction)


@jet_rule(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Any:
    """(1 − y) x − ln σ(x), which overflows nowhere."""
    if pos_weight is not None or size_average is not None or reduce is not None:
        rule = general_rule(
            F.binary_cross_entropy_with_logits,
            "pos_weight, size_average and reduce are not covered",
        )
        return rule(input, target, weight, size_average, reduce, reduction, pos_weight)
    losses = (1 - target) * input - F.logsigmoid(input)
    return _reduced(losses if weight is None else losses * weight, reduction)


@jet_rule(*([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []))
def linear_cross_entropy(input: Any, linear_weight: Any, target: Tensor, **named: Any) -> Any:
    """torch has no forward mode of the loss by chunks, which ``options`` ask for; the loss is the
    same without them."""
    rule = general_rule(F.linear_cross_entropy, "")
    return rule(input, linear_weight, target, **named | {"options": None})


linear_cross_entropy.under_autocast = True  # type: ignore[attr-defined]
