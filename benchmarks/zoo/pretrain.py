"""Pretraining of one model by masked or next words, for a fixed number of steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForLanguageModeling

from jachess_ext.tasks.vocabulary import LONGEST
from jachess_ext.training.methods.weights import is_masked

_WARM_UP = 0.06
_JUDGED = 64  # blocks of held-out text at most
_SEED_OF_MASKS = 12345  # of the held-out text: the same words are masked for every model


@dataclass(frozen=True)
class Recipe:
    """How the models are trained: AdamW, linear warm-up and decay.

    Attributes:
        block: tokens of a row, its start and end tokens among them.
        rows: of a batch.
        masked: share of an encoder's tokens that are predicted.
    """

    block: int = LONGEST
    rows: int = 4
    masked: float = 0.2


def blocks(texts: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Token ids [blocks, length]: the texts end to end, cut, each cut between start and end.

    Raises:
        ValueError: less text than one block.
    """
    start = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    # verbose=False: texts longer than the model's are cut here, so no warning is due
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for row in rows for token in [*row, end]])
    inner = length - 2
    count = len(stream) // inner
    if count == 0:
        raise ValueError(f"the text has {len(stream)} tokens, less than one block of {inner}")
    cut = stream[: count * inner].reshape(count, inner)
    column = torch.ones(count, 1, dtype=torch.long)
    return torch.cat([start * column, cut, end * column], 1)


def pretrain(
    model: nn.Module,
    tokenizer: Any,
    rows: Tensor,
    steps: int,
    rate: float,
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Trains in place; batches and masks depend on the seed alone.

    Args:
        rate: the learning rate at its highest.
        on_step: told the step, from 1, and its loss.

    Raises:
        FloatingPointError: a loss that is not finite.
    """
    collate = _collator(model, tokenizer, recipe, seed)
    optimiser = torch.optim.AdamW(_groups(model), lr=rate, betas=(0.9, 0.98), eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _share(step, steps))
    model.train()
    for step, places in zip(range(steps), _batches(len(rows), recipe.rows, seed), strict=False):
        loss = loss_of(model, collate(list(rows[places])))
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss of step {step} is not finite; lower the rate")
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        on_step(step + 1, loss.item())


@torch.no_grad()
def held_out_loss(model: nn.Module, tokenizer: Any, rows: Tensor, recipe: Recipe) -> float:
    """Mean loss in nats a predicted token, over held-out rows spread evenly."""
    collate = _collator(model, tokenizer, recipe, _SEED_OF_MASKS)
    model.eval()
    total = count = 0.0
    for part in rows[:: -(-len(rows) // _JUDGED)].split(recipe.rows):
        batch = collate(list(part))
        predicted = float((batch["labels"][:, _first(model) :] != -100).sum())
        total += loss_of(model, batch).item() * predicted
        count += predicted
    return total / count


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean loss over the predicted tokens; an encoder's head (BERT's) runs on those alone."""
    ids, labels = batch["input_ids"], batch["labels"]
    if not is_masked(model.config):
        return cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    chosen = labels != -100
    hidden = model.base_model(ids).last_hidden_state[chosen]
    return cross_entropy(model.cls(hidden), labels[chosen])


def _first(model: Any) -> int:
    """The first place predicted: a decoder predicts nothing at its start token."""
    return 0 if is_masked(model.config) else 1


def _collator(model: Any, tokenizer: Any, recipe: Recipe, seed: int) -> Any:
    masked = is_masked(model.config)
    share = recipe.masked if masked else None
    return DataCollatorForLanguageModeling(tokenizer, masked, mlm_probability=share, seed=seed)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]


def _share(step: int, steps: int) -> float:
    """Of the highest learning rate: up over the first steps, then down to zero."""
    warm = max(1.0, _WARM_UP * steps)
    return min((step + 1) / warm, (steps - step) / max(steps - warm, 1.0))


def _batches(rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Places of rows, epoch after epoch, without end."""
    shuffle = random.Random(seed)
    queue: list[int] = []
    while True:
        while len(queue) < size:
            epoch = list(range(rows))
            shuffle.shuffle(epoch)
            queue += epoch
        yield torch.tensor(queue[:size])
        del queue[:size]
