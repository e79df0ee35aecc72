"""Kinds of answers that logits stand for, and the divergence between two answers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["single", "multi", "regression"]
"""One of several classes, any number of several labels, or numbers."""


def kl_divergence(
    first: Tensor, second: Tensor, kind: Kind = "single", *, symmetric: bool = False
) -> Tensor:
    """Return KL(p‖q) of logits ``[..., C]``, or KL(p‖q) + KL(q‖p), per row.

    Args:
        kind: see `decision_kind`.  "multi" sums over the labels; "regression" takes the squared
            difference in place of a divergence.
    """
    wide = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(wide), second.to(wide)
    if kind == "regression":
        return (first - second).square().sum(-1)
    if kind == "multi":
        first, second = (torch.stack([z, torch.zeros_like(z)], -1) for z in (first, second))
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    weight = log_p.exp() - log_q.exp() if symmetric else log_p.exp()
    divergence = (weight * (log_p - log_q)).sum(-1)
    return divergence.sum(-1) if kind == "multi" else divergence


def decision_kind(model: nn.Module, logits: Tensor) -> Kind:
    """Return "single", "multi" or "regression", as transformers reads the model's config."""
    stated = getattr(getattr(model, "config", None), "problem_type", None)
    if stated == "regression" or (stated is None and logits.shape[-1] == 1):
        return "regression"
    return "multi" if stated == "multi_label_classification" else "single"
