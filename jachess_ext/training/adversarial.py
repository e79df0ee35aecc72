"""Noise on the token embeddings: NEFTune, and adversarial, FreeLB and SMART."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.robustness import embedding_scale
from ..smoothness.estimators import hooked_embeddings, trained, unwrapped, without_labels
from .method import Batch, Loss, Method, Run, logits_of
from .penalties import row_mean, row_noise, symmetric_divergence, token_noise
from .random_state import RandomState, drawing_apart


class NEFTune(Method):
    """Uniform noise of size α / √(n d) on a row's n token embeddings (Jain et al. 2023)."""

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """The task loss with noise; dropout masks are the plain run's."""

        def add(x: Tensor) -> Tensor:
            return x + row_noise(x, inputs, self.settings.alpha, self.generator()).to(x.dtype)

        with hooked_embeddings(model, add):
            return Loss(*run(inputs))


class FreeLB(Method):
    """The task loss's gradient, mean over K steps of ascent on noise δ (Zhu et al. 2020, FreeLB).

    δ starts uniform, ± adv_start / √(n d) for a row of n tokens, and moves by adv_lr · g/‖g‖ per
    row; with ``adv_radius`` above 0 it is put back into the ball of that norm.  All K passes have
    the plain run's dropout masks, as the paper has it.
    """

    one_process = True
    _share = 1.0  # of one pass in the loss

    def step(self, run: Callable[[Batch], Tensor], inputs: Batch) -> Tensor:
        """K passes forward and backward; the logged loss is their mean."""
        inputs = self.trainer._prepare_inputs(dict(inputs))
        count, before = self.settings.adv_steps, RandomState()
        noise: Tensor | None = None
        self._share, losses = 1.0 / count, []

        def add(embeddings: Tensor) -> Tensor:
            nonlocal noise
            if noise is None:
                size = self.settings.adv_start
                noise = row_noise(embeddings, inputs, size, self.generator()).requires_grad_()
            return embeddings + noise.to(embeddings.dtype)

        for number in range(count):
            if number:
                before.restore()
                assert noise is not None
                noise = self._climbed(noise)
            with hooked_embeddings(self.trainer.model, add):
                losses.append(run(inputs))
        self._share = 1.0
        return torch.stack(losses).sum()

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """One pass's share of the mean."""
        task, outputs = run(inputs)
        return Loss(task * self._share, outputs)

    def _climbed(self, noise: Tensor) -> Tensor:
        assert noise.grad is not None
        norm = noise.grad.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1)
        moved = noise.detach() + self.settings.adv_lr * (noise.grad / norm)
        if self.settings.adv_radius > 0:
            norm = moved.flatten(1).norm(dim=1).view(-1, 1, 1)
            moved = moved * (self.settings.adv_radius / norm.clamp(min=1e-30)).clamp(max=1.0)
        return moved.requires_grad_()


class SMART(Method):
    """+ strength · max over |δ| ≤ ε of KL(p ‖ q) + KL(q ‖ p), q at x + δ (Jiang et al. 2020).

    The maximum by ``adv_steps`` of δ ← δ + adv_lr · g/‖g‖_∞ per row from normal noise of deviation
    adv_start, put back into the box of half width ``adv_radius``; all three in units of the
    embedding table's root mean square entry before training.  The published sizes (an absolute
    1e-5) move p by less than the roundings of bfloat16.  Their second part, the Bregman proximal
    point, is left out.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._scale = embedding_scale(unwrapped(trainer.model))

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor:
        """In nats, mean over rows; the passes with noise share dropout masks."""
        batch, kind = without_labels(inputs), self.kind(model, outputs)
        logits, masks, settings = logits_of(outputs), self.key(), self.settings
        noise: Tensor | None = None

        def apart(target: Tensor) -> Tensor:
            with drawing_apart(masks), hooked_embeddings(model, add):
                return symmetric_divergence(target, logits_of(model(**batch)), kind)

        def add(embeddings: Tensor) -> Tensor:
            nonlocal noise
            if noise is None:
                size = settings.adv_start * self._scale
                noise = token_noise(embeddings, inputs, size, "normal", self.generator())
                noise.requires_grad_()
            return embeddings + noise.to(embeddings.dtype)

        box = settings.adv_radius * self._scale
        for _ in range(settings.adv_steps):
            # the ascent's backward pass is of δ alone
            with trained(dict.fromkeys(model.parameters(), False)):
                found = row_mean(apart(logits.detach()), inputs)
                assert noise is not None
                (gradient,) = torch.autograd.grad(found, noise)
            largest = gradient.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            moved = noise.detach() + settings.adv_lr * self._scale * gradient / largest
            noise = moved.clamp(-box, box).requires_grad_()
        return row_mean(apart(logits), inputs)
