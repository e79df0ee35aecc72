"""Figures of a model's smoothness on fixed rows: looking, without penalising."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .estimate import smoothness
from .model_pass import hooked_embeddings, on_device_of, padding_mask, without_labels
from .modes import in_mode

PREFIX = "smoothness/"


def check_every(every: Any) -> None:
    """Raise ValueError unless it is a whole number from 1 up."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}; expected a number of steps from 1 up")


class SmoothnessProbe:
    """Measures a model on a fixed batch, the same way each time.

    The model is run in evaluation mode and gets its modes back; parameters, their gradients and
    torch's random numbers stay as they were.

    Example:
        >>> probe = jx.SmoothnessProbe(batch)
        >>> probe(model)["smoothness/logit_jacobian"]

    Args:
        batch: rows as a collator yields them: input_ids, attention_mask, and "labels" for the
            margin.  It is moved to the model's device.
        every: optimiser steps between two measurements of the callbacks that use this.
        hessian: whether second derivatives are measured too.
        directions: random directions of the hidden states' norms (see `jx.smoothness`).
        seed: of these directions, the same in every measurement.

    Attributes:
        history: of each measurement of a callback its figures and "step".

    Raises:
        ValueError: ``every`` is not a whole number from 1 up, or a row of the batch is all padding.
    """

    def __init__(
        self,
        batch: Mapping[str, Any],
        *,
        every: int = 100,
        hessian: bool = False,
        directions: int = 2,
        seed: int = 0,
    ) -> None:
        check_every(every)
        padding_mask(batch)  # a batch that cannot be measured is refused before training
        self.batch = dict(batch)
        self.every, self.seed = every, seed
        self.hessian, self.directions = hessian, directions
        self.history: list[dict[str, float]] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The figures, by name:

        - ``smoothness/jacobian_k``: of block k, mean over the rows of Σ_t ‖∂h_t/∂x‖_F, estimated
          along random directions; ``smoothness/jacobian`` their sum over the blocks.
        - ``smoothness/hessian_k`` and ``smoothness/hessian``: of second derivatives, where asked.
        - ``smoothness/logit_jacobian``, ``smoothness/margin_over_slope``: see `decision_slopes`;
          only of models that decide once a row.

        Raises:
            MissingJetRule: the model uses an operation that the engine has no rule for.
        """
        batch = on_device_of(model, self.batch)
        how: dict[str, Any] = {"hessian": self.hessian, "directions": self.directions}
        with torch.no_grad(), in_mode(model, training=False):
            norms = smoothness(model, without_labels(batch), seed=self.seed, **how)
        found: dict[str, float] = {}
        for name, values in (("jacobian", norms.jacobian), ("hessian", norms.hessian)):
            if values is not None:
                found[name] = float(values.sum())
                found |= {f"{name}_{k}": value for k, value in enumerate(values.tolist())}
        found |= decision_slopes(model, batch)
        return {PREFIX + name: value for name, value in found.items()}

    def measure(self, model: nn.Module, step: int) -> dict[str, float]:
        """The figures, which ``history`` gets as well."""
        found = self(model)
        self.history.append({"step": step, **found})
        return found

    def measured(self, step: int) -> bool:
        """Whether the last measurement was at this step."""
        return bool(self.history) and self.history[-1]["step"] == step


def decision_slopes(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, float]:
    """How fast the logits and the margin change with the token embeddings x, by exact gradients.

    ``logit_jacobian``: mean over rows of ‖∂z/∂x‖_F.  With the margin m = z_y − max of the other
    logits, y the label, ``margin_over_slope``: mean over rows of m/‖∂m/∂x‖, which is about the
    distance of x from the decision's border (Sokolić et al. 2017), negative where the row is
    wrong, and unmoved by a scale of the logits.  Padding has no part in x.

    Args:
        model: measured in evaluation mode, which it need not be in.
        batch: on the model's device; class numbers ``[N]`` under "labels" are needed for the
            margin.

    Returns:
        Neither where the logits are not ``[N, C]`` (language models, token classifiers); no margin
        without class numbers (no labels, a regression, several labels a row).
    """
    batch = dict(batch)
    labels, leaves = batch.pop("labels", None), []

    def leaf(x: Tensor) -> Tensor:
        leaves.append(x.detach().requires_grad_())
        return leaves[0]

    with torch.enable_grad(), in_mode(model, training=False), hooked_embeddings(model, leaf):
        logits = model(**batch).logits
        if logits.ndim != 2:
            return {}
        real = padding_mask(batch).unsqueeze(-1)

        def norms(of: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(of.sum(), leaves, retain_graph=True)
            return (found * real).flatten(1).double().norm(dim=1)

        squares = torch.stack([norms(z).square() for z in logits.unbind(1)])
        result = {"logit_jacobian": squares.sum(0).sqrt().mean().item()}
        if _are_classes(labels) and logits.shape[1] > 1:
            own = logits.gather(1, labels.unsqueeze(1))[:, 0]
            others = logits.scatter(1, labels.unsqueeze(1), -math.inf).amax(1)
            margin = own - others
            distance = margin.detach().double() / norms(margin)
            result["margin_over_slope"] = distance.mean().item()
    return result


def _are_classes(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
