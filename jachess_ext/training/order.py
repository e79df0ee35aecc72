"""The order of rows, the same for every method whatever its steps draw."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from .random_state import mixed_seed


class SeededOrder(Sampler[int]):
    """`LengthGroupedSampler`'s order, decided by seed and epoch.

    By itself it draws from torch's generator, so that what a method draws in its steps would
    decide the next epoch's order; and a run resumed within an epoch would have another one.

    Args:
        sampler: its generator is replaced.
        seed: from 0 up.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._epoch = 0
        sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer's loader before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator.manual_seed(mixed_seed(self._seed, self._epoch))
        return iter(self._sampler)
