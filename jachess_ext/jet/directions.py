"""Random directions with identity covariance, for the forward estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..ops.directions import Distribution as Distribution
from ..ops.directions import sample_directions, token_numbers

Use = Literal["directions", "dimensions", "calibration directions", "calibration dimensions"]
_USES: tuple[Use, ...] = (
    "directions",
    "dimensions",
    "calibration directions",
    "calibration dimensions",
)
_RANK_BITS, _STEP_BITS, _DRAW_BITS = 11, 27, 22


def fresh_seed() -> int:
    """63 random bits from torch's global CPU generator, which `torch.manual_seed` makes repeatable.

    The directions themselves are counted from the seed, so they are the same on every device.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@dataclass
class DrawCounter:
    """Which random numbers a draw gets: the operator's (seed, offset), another for every draw.

    The offset's 62 bits are, from the top: what the numbers are for (2 bits), the rank (11), the
    step (27) and the number of the draw within the step (22).  So two draws of one seed share no
    number, and a seed and a step are all that must be stored to go on where a run stopped.

    Attributes:
        seed: any 64-bit integer.
        step: counts training steps, or calibration batches.
        rank: of a process that draws for other rows of the batch than its neighbours do.
        drawn: how many draws were made in this step.
    """

    seed: int
    use: Use = "directions"
    step: int = 0
    rank: int = 0
    drawn: int = 0

    def next_offset(self) -> int:
        """The offset of the next draw.

        Raises:
            ValueError: the step, the rank or the number of draws does not fit in its bits.
        """
        offset = _USES.index(self.use)
        parts = {"rank": _RANK_BITS, "step": _STEP_BITS, "drawn": _DRAW_BITS}
        for name, bits in parts.items():
            value = getattr(self, name)
            if not 0 <= value < 2**bits:
                raise ValueError(
                    f"{name} is {value}; expected 0 to {2**bits - 1}: go on with another seed"
                )
            offset = offset << bits | value
        self.drawn += 1
        return offset


def draw_directions(
    like: Tensor,
    count: int,
    *,
    mask: Tensor | None = None,
    distribution: Distribution = "gaussian",
    counter: DrawCounter | None = None,
) -> Tensor:
    """``count`` independent directions for embeddings ``like``.

    Real positions are numbered row by row and the numbers decide what is drawn, so padding on
    either side changes neither the random numbers nor which token gets which; nor do dtype and
    device.

    Args:
        like: ``[B, T, d]`` embeddings; gives shape, dtype and device.
        mask: ``[B, T]``, true at real tokens; padded positions carry no direction.
        distribution: both have identity covariance; Rademacher entries are ±1.
        counter: says which random numbers, and counts this draw; None: of a fresh seed.

    Returns:
        ``[count, B, T, d]``, zero at padded positions.

    Raises:
        TypeError: ``like`` is not a floating-point tensor.
    """
    if not like.is_floating_point():
        raise TypeError(
            f"the embeddings have dtype {like.dtype}, but directions need a floating-point tensor: "
            "pass embeddings, not token ids"
        )
    counter = DrawCounter(fresh_seed()) if counter is None else counter
    real = torch.ones(like.shape[:-1], dtype=torch.bool, device=like.device)
    token = token_numbers(real if mask is None else mask.to(like.device))
    return sample_directions(
        token,
        count,
        like.shape[-1],
        seed=counter.seed,
        offset=counter.next_offset(),
        distribution=distribution,
        dtype=like.dtype,
    )
