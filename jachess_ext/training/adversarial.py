"""Noise on the token embeddings: NEFTune, and adversarial, FreeLB and SMART."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.robustness import embedding_scale
from ..smoothness.model_pass import hooked_embeddings, unwrapped, without_labels
from ..smoothness.modes import trained
from .method import Batch, Loss, Method, Run, logits_of
from .penalties import draw_noise, row_mean, symmetric_divergence
from .random_state import RandomState, drawing_apart


class NEFTune(Method):
    """Uniform noise of size α / √(T d) on the token embeddings (Jain et al. 2023).

    The Trainer's own, which draws from torch's generator: dropout masks are not the plain run's.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        trainer.neftune_noise_alpha = self.settings.alpha


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
                noise = self._first(embeddings, inputs)
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

    def _first(self, embeddings: Tensor, inputs: Batch) -> Tensor:
        real = _real_tokens(embeddings, inputs)
        noise = draw_noise(embeddings.shape, 1.0, "uniform", self.generator()).to(real)
        size = (real.sum(1, keepdim=True) * embeddings.shape[-1]).clamp(min=1).sqrt()
        return (real * noise * self.settings.adv_start / size).requires_grad_()

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
                real = _real_tokens(embeddings, inputs)
                size = settings.adv_start * self._scale
                drawn = draw_noise(embeddings.shape, size, "normal", self.generator())
                noise = (real * drawn.to(real)).requires_grad_()
            return embeddings + noise.to(embeddings.dtype)

        box = settings.adv_radius * self._scale
        for _ in range(settings.adv_steps):
            # the ascent's backward pass is of δ alone
            with trained(dict.fromkeys(model.parameters(), False)):
                found = apart(logits.detach()).sum()
                assert noise is not None
                (gradient,) = torch.autograd.grad(found, noise)
            largest = gradient.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            moved = noise.detach() + settings.adv_lr * self._scale * gradient / largest
            noise = moved.clamp(-box, box).requires_grad_()
        return row_mean(apart(logits), inputs)


def _real_tokens(embeddings: Tensor, inputs: Batch) -> Tensor:
    """``[B, T, 1]``, float32 or wider on the embeddings' device: 1 on real tokens."""
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(embeddings.shape[:2])
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return mask.to(embeddings.device, wide).unsqueeze(-1)
