"""From texts to what a model takes: token ids in padded batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .examples import DataError, Examples, Task

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Encoded:
    """Tokenised examples; batches are padded to their own longest, on the right."""

    rows: list[dict[str, list[int]]]
    labels: Sequence[float]
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """What the tokenizer made of one example, and its label."""
        return {**self.rows[index], "labels": self.labels[index]}

    def collate(self, items: Sequence[dict[str, Any]]) -> Batch:
        """A batch of items as `__getitem__` gives them: [B, T]; labels [B] where there are any.

        Labels that are whole numbers are classes; others are float32 targets of a regression.
        """
        rows = [{k: v for k, v in item.items() if k != "labels"} for item in items]
        side = self.tokenizer.padding_side
        self.tokenizer.padding_side = "right"  # encoders' heads read the first token
        try:
            batch = dict(self.tokenizer.pad(rows, return_tensors="pt"))
        finally:
            self.tokenizer.padding_side = side
        if all("labels" in item for item in items):
            batch["labels"] = torch.tensor([item["labels"] for item in items])
        return batch

    def batch(self, indices: list[int]) -> Batch:
        """input_ids, attention_mask (and what else the tokenizer gives) [B, T]; labels [B]."""
        return self.collate([self[i] for i in indices])

    def in_order(self, size: int) -> Iterator[Batch]:
        """Batches of `size` examples in the order given; the last may be smaller."""
        for start in range(0, len(self.rows), size):
            yield self.batch(list(range(start, min(start + size, len(self.rows)))))

    def by_length(self) -> Encoded:
        """The same examples, shortest first: batches in order then hold little padding."""
        order = sorted(range(len(self)), key=lambda i: len(self.rows[i]["input_ids"]))
        return Encoded(
            [self.rows[i] for i in order], [self.labels[i] for i in order], self.tokenizer
        )

    def shuffled(self, size: int, seed: int) -> Iterator[Batch]:
        """Endless batches of `size`, each epoch in a new order that `seed` decides.

        What does not fill a batch at the end of an epoch waits for the next one's order.
        """
        generator = torch.Generator().manual_seed(seed)
        size = min(size, len(self.rows))
        while True:
            order = torch.randperm(len(self.rows), generator=generator).tolist()
            for start in range(0, len(order) - size + 1, size):
                yield self.batch(order[start : start + size])


def encode(examples: Examples, tokenizer: Any, max_length: int) -> Encoded:
    """Tokenises `examples`, cut to `max_length` tokens (or the tokenizer's own limit, if lower)."""
    if not len(examples):
        return Encoded([], examples.labels, tokenizer)  # tokenizers do not take nothing
    max_length = min(max_length, tokenizer.model_max_length)
    second = () if examples.pairs is None else (examples.pairs,)
    made = tokenizer(examples.texts, *second, truncation=True, max_length=max_length)
    rows = [dict(zip(made.keys(), values, strict=True)) for values in zip(*made.values())]  # noqa: B905
    return Encoded(rows, examples.labels, tokenizer)


def check_tokens(
    drawn: Task, whole: Task, tokenizer: Any, parts: Sequence[str] = ("train", "unlabelled", "dev")
) -> None:
    """Whether a model has something to read in every row drawn.

    Most tokenizers put a start or end round any text; of those that do not (many decoders') an
    empty text has no token at all.

    Args:
        drawn: the task as it is used.
        whole: as it was loaded; its numbers are the user's own.

    Raises:
        DataError: a row is without a token.
    """
    for part in parts:
        rows, all_rows = _texts(getattr(drawn, part)), _texts(getattr(whole, part))
        if not rows or tokenizer.num_special_tokens_to_add(pair=len(rows[0]) == 2):
            continue
        ids = tokenizer(*map(list, zip(*rows, strict=True)))["input_ids"]
        empty = next((row for row, found in zip(rows, ids, strict=True) if not found), None)
        if empty is not None:
            raise DataError(
                f"{whole.name}: row {all_rows.index(empty) + 1} of its {part} rows is empty for "
                f"the model, whose tokenizer makes no token of {' and '.join(map(repr, empty))}; "
                "expected some text in each: leave that row out"
            )


def _texts(examples: Examples) -> list[tuple[str, ...]]:
    columns = [examples.texts] if examples.pairs is None else [examples.texts, examples.pairs]
    return list(zip(*columns, strict=True))
