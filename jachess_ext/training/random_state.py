"""torch's generators kept and put back, so that a method's own draws leave the task's alone.

Two methods fine-tuned from one seed then see the same order of rows and the same dropout masks in
their steps of task loss, and differ by what they do, not by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..smoothness import JacHess
from ..smoothness.parallel import ranks_of

_WORD = 2**64


class RandomState:
    """torch's generators (CPU and CUDA) as they are now, to draw the same dropout masks again."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def mixed_seed(*words: int) -> int:
    """One seed for torch out of several numbers; unlike their sum, other words give another."""
    sequence = np.random.SeedSequence([word % _WORD for word in words])
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def drawing_apart(*key: int) -> Iterator[None]:
    """Within it torch's generators draw what the key decides; afterwards they are as before."""
    seed = mixed_seed(*key)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def step_key(regulariser: JacHess) -> tuple[int, int, int]:
    """A key of the regulariser's next step on this rank, for `drawing_apart`.

    Without a seed of its own, the one torch was last given, so that `torch.manual_seed` makes it
    repeatable.
    """
    seed = torch.initial_seed() if regulariser.seed is None else regulariser.seed
    return seed, regulariser.step, ranks_of(regulariser.model).rank
