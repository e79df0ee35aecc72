"""Counted operations and bytes of the two forms of a linear layer's kernel; the cheaper one wins.

With NT positions on the left and MT' on the right, inputs of size d, cotangents of total size e
(layers that share their inputs), C outputs:

    A   2 NT·MT' (d + C² e) operations; operands are packed anew for every tile of 256 × 128
        positions, (1/256 + 1/128) NT·MT' (d + C² e) numbers
    B   2 (NT + MT') C d e to materialise, 2 NC·MC d e to multiply; [NC + MC, d e] written and read

A symmetric block needs half the pairs in A and in B's product, and one side's materialising.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["A", "B"]

_TILE = (256, 128)  # positions of form A's tiles (csrc/cpu/ntk_gram_plan.h)
# Operations that take as long as moving one byte. On 144 layers (N 8 and 48, T 1 to 64; two idle
# cores, fp32) they choose forms that take 0.3 % longer than always the faster one (geometric mean).
# Blocks of gradients go through the cache, so their bytes weigh more. Nothing on a GPU was fitted.
_GRAM_BYTE, _MATERIALISED_BYTE = 8.0, 96.0


@dataclass(frozen=True)
class Size:
    """Sizes of one contraction; `positions` are those kept, per sample."""

    samples: int
    positions: int
    other_samples: int
    other_positions: int
    outputs: int
    inputs: int
    cotangents: int
    symmetric: bool
    bytes_per_number: int = 4


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved, of both forms."""

    gram_flops: float
    gram_bytes: float
    materialise_flops: float
    materialise_bytes: float

    @property
    def form(self) -> Form:
        """The form that should take less time."""
        gram = self.gram_flops + _GRAM_BYTE * self.gram_bytes
        dense = self.materialise_flops + _MATERIALISED_BYTE * self.materialise_bytes
        return "A" if gram <= dense else "B"


def count_cost(size: Size) -> Cost:
    """Operations and bytes of forms A and B."""
    rows, columns = size.samples * size.positions, size.other_samples * size.other_positions
    pairs = size.samples * size.other_samples * size.outputs**2
    features = size.inputs + size.outputs**2 * size.cotangents
    weights = size.inputs * size.cotangents
    share = 0.5 if size.symmetric else 1.0
    sides = rows if size.symmetric else rows + columns
    vectors = size.samples if size.symmetric else size.samples + size.other_samples
    packed = sum(1 / side for side in _TILE)
    return Cost(
        gram_flops=share * 2 * rows * columns * features,
        gram_bytes=share * rows * columns * packed * features * size.bytes_per_number,
        materialise_flops=2 * sides * size.outputs * weights + 2 * pairs * weights * share,
        materialise_bytes=2 * vectors * size.outputs * weights * size.bytes_per_number,
    )
