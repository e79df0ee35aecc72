"""One kernel computed by several processes of torch.distributed.

Every rank holds the model and both batches; pairs of blocks are shared out, and the sum arrives at
the group's first rank.  A pair is computed by one rank alone, so that the numbers are those of one
process with the same blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .samples import Samples

T = TypeVar("T")
_SAME_WEIGHTS = 1e-6


@dataclass(frozen=True)
class KernelRanks:
    """The processes at work.

    Attributes:
        group: of torch.distributed; None: this process alone.
        rank, count: of this process in the group, and how many there are.
    """

    group: Any
    rank: int
    count: int

    @classmethod
    def of(cls, group: Any) -> KernelRanks:
        """The ranks of ``group``.

        Raises:
            RuntimeError: torch.distributed is not there or not initialised.
            ValueError: this process is not in the group.
        """
        if group is None:
            return cls(None, 0, 1)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "group was given, but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first (torchrun starts the processes)"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group; call ntk on the group's ranks only")
        return cls(group, rank, dist.get_world_size(group))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def least_blocks(self, symmetric: bool) -> int:
        """Blocks a side that give every rank as many pairs: 2R − 1 (R (2R − 1) pairs), or R."""
        return 2 * self.count - 1 if symmetric else self.count

    def share(self, work: Sequence[T]) -> Sequence[T]:
        """This rank's part, contiguous: neighbouring pairs have a block in common."""
        size, rest = divmod(len(work), self.count)
        start = self.rank * size + min(self.rank, rest)
        return work[start : start + size + (self.rank < rest)]

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """What is raised on one rank is raised on all, so that none waits for it forever."""
        try:
            yield
        except Exception as error:
            self._exchange(f"{type(error).__name__}: {error}")
            raise
        found = self._exchange(None)
        failed = [(rank, message) for rank, message in enumerate(found) if message is not None]
        if failed:
            rank, message = failed[0]
            raise RuntimeError(f"rank {rank} failed: {message}")

    def least(self, value: int) -> int:
        """The smallest of all ranks' numbers."""
        return min(self._exchange(value))

    def require_same(self, model: nn.Module, sides: Sequence[Samples]) -> None:
        """Raises ValueError where the ranks' batches or weights differ."""
        if self.count == 1:
            return
        found = self._exchange((_batches(sides), _weights(model)))
        batches = {batch for batch, _ in found}
        if len(batches) > 1:
            raise ValueError(
                "the ranks have different batches; expected the same batch and other on every "
                "rank (ntk itself shares out the work)"
            )
        weights = [weight for _, weight in found]
        if max(weights) - min(weights) > _SAME_WEIGHTS * max(map(abs, weights)):
            raise ValueError("the ranks have different weights; expected the same model on all")

    def total(self, values: Tensor) -> None:
        """Sum over ranks, in place; right on the first rank only."""
        if self.count > 1:
            dist.reduce(values, group=self.group, group_dst=0)

    def total_number(self, value: float) -> float:
        """Sum over ranks."""
        return sum(self._exchange(value))

    def _exchange(self, value: Any) -> list[Any]:
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found


def _batches(sides: Sequence[Samples]) -> int:
    """Of every tensor of the batches."""
    sums = 0
    for side in sides:
        values = {"": side.batch} if isinstance(side.batch, Tensor) else side.batch
        for name in sorted(values):
            value = values[name]
            if isinstance(value, Tensor):
                plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
                sums = zlib.crc32(plain.numpy().tobytes(), zlib.crc32(name.encode(), sums))
                sums = zlib.crc32(str(list(value.shape)).encode(), sums)
    return sums


def _weights(model: nn.Module) -> float:
    return sum(float(p.detach().abs().sum(dtype=torch.float64)) for p in model.parameters())
