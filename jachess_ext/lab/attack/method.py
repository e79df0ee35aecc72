"""Training on rows whose words an attack replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...models import (
    gradient_of_tokens,
    in_mode,
    leaf_embeddings,
    padding_mask,
    token_table,
    trained,
    unwrapped,
    without_engine,
)
from ...training.batches import Batch, seeded_rng
from ...training.methods.base import Loss, Penalised, Run
from ...training.methods.settings import count, nonnegative, setting, share, share_or_zero
from .candidates import NEAREST, candidates_from
from .tokens import TokenSwaps, steepest_swaps, swap_counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AttackAugment(Penalised, name="attack-augment"):
    """Task loss + strength · (task loss under attack − task loss); strength 0.5: the mean of both.

    Under attack, words are swapped for the candidates that raise the loss most, to first order.

    Further arguments: those of `Penalised`.

    Args:
        synonyms: path of a file of synonyms or of WordNet's folder, or "embeddings": the nearest
            rows of the model's embedding table at the time when the trainer is made.
        candidates: largest number of candidates of a word.
        steps: number of steps in which the swaps are made, each by the gradient at the copy so far.
        swapped: fraction of the tokens that are swapped.
    """

    needs_tokenizer, needs_outputs = True, False
    strength: float = nonnegative(0.5)
    synonyms: str = setting(
        NEAREST, f"a path, or {NEAREST!r}", lambda value: isinstance(value, str) and value != ""
    )
    candidates: int = count(8)
    steps: int = count(1)
    swapped: float = share(0.15)
    smoothing: float = share_or_zero(0.0)

    def prepare(self) -> None:
        super().prepare()
        tokenizer = cast("PreTrainedTokenizerBase", self.trainer.processing_class)
        model = unwrapped(self.trainer.model)
        table = token_table(model)
        words = candidates_from(self.synonyms, model, tokenizer)
        self._swaps = TokenSwaps(tokenizer, words, len(table.weight), self.candidates)
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))

    def options(self, inputs: Batch) -> tuple[Tensor, Tensor]:
        """Return the candidate ids, [B, T, K], and the number of tokens to swap in each row,
        [B]."""
        if "input_ids" not in inputs:
            raise ValueError(f"expected a batch with input_ids to swap; it has {', '.join(inputs)}")
        ids, mask = inputs["input_ids"], padding_mask(inputs)
        return self._swaps.options(ids, mask), swap_counts(ids, mask, self._special, self.swapped)

    def attacked(self, run: Run, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the token ids of the batch under attack, [B, T]; gradients are without dropout."""
        options, count = self.options(inputs)
        table = token_table(model)
        frozen = dict.fromkeys(model.parameters(), False)
        first = ids = inputs["input_ids"]
        for step in range(self.steps):
            hooked = leaf_embeddings(model, {**inputs, "input_ids": ids})
            with trained(frozen), in_mode(model, False), hooked as (batch, leaves):
                inner = without_engine(model)
                task, _ = run(batch) if inner is model else run(batch, inner)
            gradient = gradient_of_tokens(task, leaves)
            step_count = (count * (step + 1)) // self.steps - (count * step) // self.steps
            # Tokens that are already swapped have no candidates but themselves.
            open_options = torch.where((ids == first).unsqueeze(-1), options, ids.unsqueeze(-1))
            ids = steepest_swaps(ids, open_options, gradient, table.forward, step_count)
        return ids

    def loss(self, run: Run, model: nn.Module, inputs: Batch) -> Loss:
        ids = self.attacked(run, model, inputs)
        task_loss, outputs = run(inputs)
        with seeded_rng(self.key()):
            attacked_task, _ = run({**inputs, "input_ids": ids})
        return Loss(task_loss, outputs, self.strength * (attacked_task - task_loss))
