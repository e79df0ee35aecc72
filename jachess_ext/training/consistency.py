"""A second pass with other dropout masks or other tokens: R-Drop and corruption."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.robustness import chosen_tokens, known_unknown_token
from ..smoothness.decision import kl_divergence
from ..smoothness.estimators import in_mode, unwrapped, without_labels
from .method import Batch, Loss, Method, Run, logits_of
from .penalties import row_mean, symmetric_divergence
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
            logits_of(outputs), logits_of(others), self.kind(model, outputs)
        )
        return Loss((first + second) / 2, outputs, row_mean(apart, inputs) / 2)


class TokenSwaps:
    """Copies of batches in which tokens are swapped for the unknown token or for random ones.

    Args:
        tokenizer: its special tokens stay; all others can come that the model has a row for.
        model: whose embedding table says which those are.
        share: of the tokens swapped.
        unknown: share of those that become the unknown token; none do where the tokenizer has
            neither that nor a mask token.
    """

    def __init__(self, tokenizer: Any, model: nn.Module, share: float, unknown: float) -> None:
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self._unknown = known_unknown_token(tokenizer)
        self._share, self._unknown_share = share, 0.0 if self._unknown is None else unknown
        table: Any = unwrapped(model).get_input_embeddings()  # type: ignore[operator]
        ids = torch.arange(min(len(tokenizer), getattr(table, "num_embeddings", len(tokenizer))))
        self._words = ids[~torch.isin(ids, self._special)]
        self._padding = tokenizer.pad_token_id

    def __call__(self, batch: Batch, generator: torch.Generator) -> dict[str, Any]:
        """The batch with other ``input_ids``, on the same device; the generator is the CPU's.

        Raises:
            ValueError: it has no ``input_ids``.
        """
        if "input_ids" not in batch:
            raise ValueError(f"expected a batch with input_ids to swap; it has {', '.join(batch)}")
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        chosen = chosen_tokens(
            *(ids, torch.ones_like(ids) if mask is None else mask, self._share),
            special=self._special,
            generator=generator,
            spared=self._padding if self._unknown == self._padding else None,
        )
        count = int(chosen.sum())
        words = self._words[torch.randint(len(self._words), (count,), generator=generator)]
        unknown = torch.rand(count, generator=generator) < self._unknown_share
        swapped = ids.clone()
        swapped[chosen.to(ids.device)] = torch.where(unknown, self._unknown or 0, words).to(ids)
        return {**batch, "input_ids": swapped}


class _Corruption(Method):
    """A method with copies of its batches with swapped tokens."""

    tokenizer = True

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        if self.tokenizer:
            shares = self.settings.swapped, self.settings.unknown
            self._swaps = TokenSwaps(trainer.processing_class, trainer.model, *shares)

    def corrupted(self, inputs: Batch) -> dict[str, Any]:
        """The batch with other tokens; special tokens stay."""
        return self._swaps(inputs, self.generator())


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
        kind = self.kind(model, outputs)
        apart = kl_divergence(logits_of(target), logits_of(others), kind)
        return self.settings.every * row_mean(apart, inputs)


class Recommended(CorruptConsistency):
    """What the comparisons of docs/finetuning.md chose: label smoothing, and consistency under
    swapped tokens on unlabelled rows.

    Without unlabelled rows label smoothing alone, of rows with several labels consistency alone; a
    regression is trained plainly.  A warning says what is left out.
    """

    any_task = True

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        unlabelled = trainer.unlabelled_dataset is not None
        self.tokenizer = unlabelled and not self.is_regression(trainer.model)
        super().__init__(trainer)
        if "labels" not in trainer.label_names and not self.is_regression(trainer.model):
            names = ", ".join(trainer.label_names) or "none"
            raise ValueError(
                f"method='recommended' is for models whose labels are called 'labels', and these "
                f"are not ({names}); use method=none, or a method that acts on embeddings"
            )

    def penalty(self, model: nn.Module, inputs: Batch, outputs: Any) -> Tensor | None:
        """As the task and the data allow."""
        return super().penalty(model, inputs, outputs) if self.tokenizer else None
