"""Unlabelled batches in an order that a checkpoint can go on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader

from ..smoothness.estimators import without_labels
from .dual import Batch, endless
from .random_state import mixed_seed


class Position(TypedDict):
    """Whole rounds over the data, and batches taken of the one after them."""

    round: int
    taken: int


class UnlabelledBatches:
    """Rounds over unlabelled data; the seed and the round's number decide the order.

    Each iterator goes from where the last one stopped to the end of its round; where nothing is
    left of it, through the next round.

    Args:
        loader: made with ``generator``, and by it alone shuffled.
        generator: seeded anew for every round.
        seed: its words are mixed (`mixed_seed`); another one on every rank.
        prepare: brings a batch to the model's device.
    """

    def __init__(
        self,
        loader: DataLoader,
        generator: torch.Generator,
        *,
        seed: tuple[int, ...],
        prepare: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        self._loader, self._generator = loader, generator
        self._seed, self._prepare = seed, prepare
        self._round = self._taken = 0
        self._endless = endless(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = self._taken
        self._generator.manual_seed(mixed_seed(*self._seed, self._round))
        for number, batch in enumerate(self._loader):
            if number >= before:
                self._taken = number + 1
                yield without_labels(self._prepare(batch))
        over = before > 0 and self._taken == before
        self._round, self._taken = self._round + 1, 0
        if over:
            yield from self

    def next(self) -> Batch:
        """The next batch, of the next round where one is over.

        Raises:
            ValueError: there is no data.
        """
        batch = next(self._endless, None)
        if batch is None:
            raise ValueError("unlabelled_dataset gave no batch; expected at least one example")
        return batch

    def state_dict(self) -> Position:
        """Where it stands."""
        return {"round": self._round, "taken": self._taken}

    def load_state_dict(self, state: Position) -> None:
        """Go on from there; the batches before are read once more, and left out."""
        self._round, self._taken = state["round"], state["taken"]
        self._endless = endless(self)
