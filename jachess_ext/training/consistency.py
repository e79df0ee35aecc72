"""A second pass with other dropout masks or other tokens: R-Drop and corruption."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.robustness import chosen_tokens, unknown_token_id
from ..smoothness.model_pass import without_labels
from ..smoothness.modes import in_mode
from .method import Batch, Loss, Method, Run, logits_of
from .penalties import kl_divergence, row_mean, symmetric_divergence
from .random_state import drawing_apart


class RDrop(Method):
    """Two passes with dropout masks of their own: mean task loss, + strength · ½ (KL + KL).

    Liang et al. 2021, *R-Drop*.  The first pass has the plain run's masks.
    """

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """The mean of both passes' task losses; the symmetric divergence of their outputs."""
        first, outputs = run(inputs)
        with drawing_apart(self.key()):
            second, others = run(inputs)
        apart = symmetric_divergence(
            logits_of(outputs), logits_of(others), self.is_regression(model)
        )
        return Loss((first + second) / 2, outputs, row_mean(apart, inputs) / 2)


class _Corruption(Method):
    """Batches in which a share of the tokens is swapped for the unknown token or random ones."""

    tokenizer = True

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        tokenizer = trainer.processing_class
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self._unknown = unknown_token_id(tokenizer)
        ids = torch.arange(len(tokenizer))
        self._words = ids[~torch.isin(ids, self._special)]
        self._padding = tokenizer.pad_token_id

    def corrupted(self, inputs: Batch) -> dict[str, Any]:
        """The batch with other tokens; special tokens stay."""
        ids, generator = inputs["input_ids"], self.generator()
        mask = inputs.get("attention_mask")
        chosen = chosen_tokens(
            *(ids, torch.ones_like(ids) if mask is None else mask, self.settings.swapped),
            special=self._special,
            generator=generator,
            spared=self._padding if self._unknown == self._padding else None,
        )
        shape = tuple(ids.shape)
        words = self._words[torch.randint(len(self._words), shape, generator=generator)]
        unknown = torch.rand(shape, generator=generator) < self.settings.unknown
        swapped = torch.where(unknown, self._unknown, words).to(ids)
        return {**inputs, "input_ids": torch.where(chosen.to(ids.device), swapped, ids)}


class CorruptAugment(_Corruption):
    """clean · task loss + (1 − clean) · task loss of a copy with swapped tokens."""

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        """With ``clean`` 0 one pass, of the copy alone."""
        clean = self.settings.clean
        if clean == 0:
            return Loss(*run(self.corrupted(inputs)))
        task, outputs = run(inputs)
        with drawing_apart(self.key()):
            other, _ = run(self.corrupted(inputs))
        return Loss(clean * task + (1 - clean) * other, outputs)


class CorruptConsistency(_Corruption):
    """+ strength · KL(p(x) ‖ p(x′)), x′ a copy with swapped tokens.

    With dropout masks of its own in the copy's pass, which has no labels.  Mode train: x is the
    labelled batch; gradients through both passes.  Mode joint: x is an unlabelled batch, and p(x)
    a target without gradient and dropout (Xie et al. 2020, *Unsupervised Data Augmentation*).
    """

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        """In nats, mean over rows; every ``every``-th step ``every``-fold, else None."""
        if self.trainer.state.global_step % self.settings.every:
            return None
        target = outputs
        if self.settings.mode == "joint":
            inputs = self.trainer.next_unlabelled()
            with torch.no_grad(), in_mode(model, False):
                target = model(**inputs)
        passing = nullcontext() if self.settings.dropout else in_mode(model, False)
        with drawing_apart(self.key()), passing:
            others = model(**without_labels(self.corrupted(inputs)))
        apart = kl_divergence(logits_of(target), logits_of(others), self.is_regression(model))
        return self.settings.every * row_mean(apart, inputs)
