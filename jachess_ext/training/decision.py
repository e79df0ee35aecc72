"""Kinds of predictions that logits represent, and the divergence between two predictions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["single", "multi", "regression"]
"""Kind of prediction: one of several classes, any number of several labels, or numbers."""


def kl_divergence(
    first: Tensor, second: Tensor, kind: Kind = "single", *, symmetric: bool = False
) -> Tensor:
    """Return KL(p‖q), ``[...]``, of the distributions of two tensors of logits, ``[..., C]``.

    Args:
        first, second: logits of p and of q.
        kind: see `decision_kind`.  "multi" sums over the labels; "regression" returns the squared
            difference, summed over C, in place of a divergence.
        symmetric: whether to return KL(p‖q) + KL(q‖p).
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
    """Return the kind of prediction that the model's logits represent, derived from its config in
    the same way as in transformers."""
    problem_type = getattr(getattr(model, "config", None), "problem_type", None)
    if problem_type == "regression" or (problem_type is None and logits.shape[-1] == 1):
        return "regression"
    return "multi" if problem_type == "multi_label_classification" else "single"
