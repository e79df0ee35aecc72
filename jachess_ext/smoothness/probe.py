"""`jx.SmoothnessProbe`: a model's smoothness on a fixed batch, measured without penalising it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._io import axes_or_new
from ..models import (
    SEVERAL_EMBEDDINGS_MESSAGE,
    in_mode,
    leaf_embeddings,
    on_device_of,
    padding_mask,
    without_labels,
)
from .estimators import smoothness
from .settings import check_every

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "smoothness/"


class SmoothnessProbe:
    """Measure a model's smoothness on a fixed batch, along the same directions each time.

    The model runs in evaluation mode; its mode and torch's generators are unchanged afterwards.
    The figures are

    - ``smoothness/jacobian_k``: mean over rows of Σ_t ‖∂h_t/∂x‖_F of block k, estimated along
      random directions; ``smoothness/jacobian``: the sum over blocks;
    - ``smoothness/hessian_k``, ``smoothness/hessian``: the same with second derivatives;
    - ``smoothness/logit_jacobian``, ``smoothness/margin_over_slope``: see `decision_slopes`.

    Examples:
        >>> probe = jx.SmoothnessProbe(batch)
        >>> sorted(probe(model))[:3]
        ['smoothness/jacobian', 'smoothness/jacobian_0', 'smoothness/jacobian_1']

    Args:
        batch: rows as a collator yields them: input_ids, attention_mask, and "labels" for the
            margin.  It is moved to the model's device.
        every: optimiser steps between two measurements of a callback.
        hessian: whether to measure second derivatives too.
        directions: number of random directions, as for `jx.smoothness`.
        seed: seed of the directions.

    Attributes:
        history: the figures of each measurement of a callback, with its "step".

    Raises:
        ValueError: ``every`` is not a whole number from 1 up, or a row of the batch is all padding.
    """

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        *,
        every: int = 100,
        hessian: bool = False,
        directions: int = 2,
        seed: int = 0,
    ) -> None:
        check_every(every)
        padding_mask(batch)  # raises if a row is all padding
        self.batch = dict(batch)
        self.every, self.seed = every, seed
        self.hessian, self.directions = hessian, directions
        self.history: list[dict[str, float]] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the figures by name.

        Raises:
            MissingJetRule: the model uses an operation that the engine has no rule for.
        """
        batch = on_device_of(model, self.batch)
        options: dict[str, Any] = {"hessian": self.hessian, "directions": self.directions}
        with torch.no_grad(), in_mode(model, training=False):
            norms = smoothness(model, without_labels(batch), seed=self.seed, **options)
        figures: dict[str, float] = {}
        for name, values in (("jacobian", norms.jacobian), ("hessian", norms.hessian)):
            if values is not None:
                figures[name] = float(values.sum())
                figures |= {f"{name}_{k}": value for k, value in enumerate(values.tolist())}
        figures |= decision_slopes(model, batch)
        return {PREFIX + name: value for name, value in figures.items()}

    def measure(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the figures and add them to ``history``."""
        figures = self(model)
        self.history.append({"step": step, **figures})
        return figures

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the Jacobian norms of ``history`` over the steps, with one line per block.

        Args:
            ax: matplotlib axes to draw on; None: new axes.

        Returns:
            The axes.

        Raises:
            ValueError: ``history`` is empty.
            MissingExtra: matplotlib is not installed.
        """
        if not self.history:
            raise ValueError("nothing was measured yet; train with the monitor first")
        ax = axes_or_new(ax)
        steps = [entry["step"] for entry in self.history]
        block = 0
        while (name := f"{PREFIX}jacobian_{block}") in self.history[0]:
            ax.plot(steps, [entry[name] for entry in self.history], "o-", label=f"block {block}")
            block += 1
        ax.set_yscale("log")
        ax.set_xlabel("optimiser step")
        ax.set_ylabel("Jacobian norm")
        ax.legend()
        return ax

    def measured(self, step: int) -> bool:
        """Return whether the last measurement was at this step."""
        return bool(self.history) and self.history[-1]["step"] == step


def decision_slopes(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure how fast the logits and the margin change with the embeddings x, by exact gradients.

    The model runs in evaluation mode, and embeddings of padding are not part of x.

    Args:
        batch: a batch on the model's device; "labels" are class numbers ``[N]``, for the margin.

    Returns:
        ``logit_jacobian``: mean over rows of ``‖∂z/∂x‖_F``; and ``margin_over_slope``: mean over
        rows of m/‖∂m/∂x‖ with the margin ``m = z_y − max_{c≠y} z_c`` of the label y.  This is
        approximately the distance of x from the decision boundary (Sokolić et al. 2017), negative
        for a misclassified row, and independent of the logits' scale.  Without class numbers the
        margin is left out; if the logits are not ``[N, C]`` (language models, token classifiers),
        {}.

    Examples:
        >>> sorted(decision_slopes(model, batch))
        ['logit_jacobian', 'margin_over_slope']
    """
    batch = dict(batch)
    labels = batch.pop("labels", None)
    embeddings_hook = leaf_embeddings(model, batch)
    with torch.enable_grad(), in_mode(model, training=False), embeddings_hook as (batch, leaves):
        logits = model(**batch).logits
        if logits.ndim != 2:
            return {}
        if len(leaves) > 1:
            raise ValueError(SEVERAL_EMBEDDINGS_MESSAGE)
        real = padding_mask(batch).unsqueeze(-1)

        def gradient_norms(values: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(values.sum(), leaves, retain_graph=True)
            return (gradient * real).flatten(1).double().norm(dim=1)

        squares = torch.stack([gradient_norms(z).square() for z in logits.unbind(1)])
        result = {"logit_jacobian": squares.sum(0).sqrt().mean().item()}
        has_label = isinstance(labels, Tensor) and labels.ndim == 1 and logits.shape[1] > 1
        if labels is not None and has_label and not labels.is_floating_point():
            label_logit = logits.gather(1, labels.unsqueeze(1))[:, 0]
            other_logit = logits.scatter(1, labels.unsqueeze(1), -math.inf).amax(1)
            margin = label_logit - other_logit
            distance = margin.detach().double() / gradient_norms(margin)
            result["margin_over_slope"] = distance.mean().item()
    return result
