"""Random directions with identity covariance, for the forward estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..ops.directions import Distribution as Distribution
from ..ops.directions import sample_directions, token_numbers

Use = Literal["directions", "dimensions", "calibration directions", "calibration dimensions"]
# With 2 bits for the use, these are the 62 bits of the operator's offset.
_RANK_BITS, _STEP_BITS, _DRAW_BITS = 11, 27, 22


def fresh_seed() -> int:
    """Return a seed of 63 random bits from torch's global CPU generator (`torch.manual_seed`).

    Directions depend on the seed only, so they are the same on every device.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@dataclass
class DrawCounter:
    """Counter of draws, which gives each draw the seed and an offset of its own for the operator.

    The offset's 62 bits are, from the top: the use (2 bits), the rank (11), the step (27) and the
    number of the draw within the step (22).  No two draws with one seed share random numbers, and a
    resumed run needs only the seed and the step.

    Attributes:
        seed: any 64-bit integer, or an int64 scalar on the drawing device.
        use: the purpose of the numbers.
        step: number of the training step, or of the calibration batch; as an int64 scalar on the
            drawing device, it may change between the replays of a CUDA graph.
        rank: rank of this process, if ranks draw for different rows.
        drawn: number of draws so far in this step.

    Examples:
        >>> counter = DrawCounter(seed=0)
        >>> counter.next_offset(), counter.next_offset()
        (0, 1)
    """

    seed: int | Tensor
    use: Use = "directions"
    step: int | Tensor = 0
    rank: int = 0
    drawn: int = 0

    def next_offset(self) -> int | Tensor:
        """Return the offset of the next draw, and count the draw; a tensor if the step is a tensor.

        Raises:
            ValueError: the step, the rank or the number of draws does not fit in its bits.
        """
        # A step on the device cannot be checked without a copy to the host: its bits are left zero
        # here, and it is added at the end.
        on_device = isinstance(self.step, Tensor)
        offset = get_args(Use).index(self.use)
        bits_by_part = {"rank": _RANK_BITS, "step": _STEP_BITS, "drawn": _DRAW_BITS}
        for name, bits in bits_by_part.items():
            value = 0 if name == "step" and on_device else getattr(self, name)
            if not 0 <= value < 2**bits:
                raise ValueError(
                    f"{name} is {value}; expected 0 to {2**bits - 1}: go on with another seed"
                )
            offset = offset << bits | value
        self.drawn += 1
        return offset + (self.step << _DRAW_BITS) if isinstance(self.step, Tensor) else offset


def draw_directions(
    like: Tensor,
    count: int,
    *,
    mask: Tensor | None = None,
    distribution: Distribution = "gaussian",
    counter: DrawCounter | None = None,
) -> Tensor:
    """Draw ``count`` independent random directions for token embeddings.

    The draw depends on the real tokens' numbers, counted row by row, but not on padding, dtype or
    device.

    Args:
        like: embeddings ``[B, T, d]``, whose shape, dtype and device the directions have.
        mask: ``[B, T]``, true at real tokens; None: all.
        distribution: "gaussian" or "rademacher" (entries ±1); both have identity covariance.
        counter: the counter that selects the random numbers; None: one with a fresh seed.

    Returns:
        ``[count, B, T, d]``, zero at padded positions.

    Raises:
        TypeError: ``like`` is not a floating-point tensor.

    Examples:
        >>> draw_directions(torch.zeros(2, 5, 8), count=3).shape
        torch.Size([3, 2, 5, 8])
    """
    if not like.is_floating_point():
        raise TypeError(
            f"the embeddings have dtype {like.dtype}, but directions need a floating-point tensor: "
            "pass embeddings, not token ids"
        )
    counter = DrawCounter(fresh_seed()) if counter is None else counter
    if mask is None:
        mask = torch.ones(like.shape[:-1], dtype=torch.bool, device=like.device)
    token = token_numbers(mask.to(like.device))
    return sample_directions(
        token,
        count,
        like.shape[-1],
        seed=counter.seed,
        offset=counter.next_offset(),
        distribution=distribution,
        dtype=like.dtype,
    )
