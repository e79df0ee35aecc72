"""Counted operations and bytes of the two forms of a linear layer's kernel; the cheaper one wins.

With NT positions on the left and MT' on the right, inputs of size d, cotangents of total size e
(layers that share their inputs), C outputs:

    A   2 NT·MT' (d + C² e) operations; operands are packed anew for every tile of 256 × 128
        positions, (1/256 + 1/128) NT·MT' (d + C² e) numbers
    B   2 (NT + MT') C d e to materialise, 2 NC·MC d e to multiply; [NC + MC, d e] written and read

A symmetric block needs half the pairs in A and in B's product, and one side's materialising.

That count of B's bytes is of blocks of matrix products. Its operator (`jachess::ntk_materialised`)
keeps gradients in the cache, but computes whole groups of 64 bytes' worth of them, G = ⌈NC / 16⌉ in
fp32, and pairs of groups:

    B   2 · 16 d e (G T + G' T' + 16 G G') operations, G (G + 1) / 2 pairs where symmetric; packed
        operands are written once, and read once for every 16 numbers of a gradient that they make

The count is made by `_C.ntk_cost` (csrc/ntk_cost.h), or here in Python where that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import ceil
from typing import Literal

_compiled: Callable[..., Sequence[float]] | None
try:
    from .._C import ntk_cost as _compiled
except ImportError:  # not built, or an older build
    _compiled = None

Form = Literal["A", "B"]

_TILE = (256, 128)  # positions of form A's tiles (csrc/cpu/ntk_gram_plan.h)
_LINE, _MOST_GROUPS, _PIECE_SIDE = 64, 48, 16  # of form B (csrc/cpu/ntk_materialised_plan.h)
# Operations that take as long as moving one byte. Of the operators: fitted on one core (Zen 4,
# fp32) to 192 layers like those of benchmarks/ntk_forms.py, where the model's choices took 0.2 %
# longer than the faster forms; form B's packs lie in the order in which they are read, so that its
# bytes weigh less. Of blocks of matrix products: an old estimate; nothing on a GPU was fitted.
_GRAM_BYTE, _PACKED_BYTE = 8.0, 2.0
_BLOCKS_BYTE = 24.0


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
    """Floating-point operations and bytes moved, of both forms.

    Attributes:
        padded_flops, packed_bytes: of form B as its operator does it.
    """

    gram_flops: float
    gram_bytes: float
    materialise_flops: float
    materialise_bytes: float
    padded_flops: float
    packed_bytes: float

    def form(self, fused: bool) -> Form:
        """The form that should take less time; ``fused``: form B's operator can be used."""
        if fused:
            gram = self.gram_flops + _GRAM_BYTE * self.gram_bytes
            dense = self.padded_flops + _PACKED_BYTE * self.packed_bytes
        else:
            gram = self.gram_flops + _BLOCKS_BYTE * self.gram_bytes
            dense = self.materialise_flops + _BLOCKS_BYTE * self.materialise_bytes
        return "A" if gram <= dense else "B"


def count_cost(size: Size) -> Cost:
    """Operations and bytes of forms A and B."""
    return count_cost_reference(size) if _compiled is None else Cost(*_compiled(*astuple(size)))


def count_cost_reference(size: Size) -> Cost:
    """`count_cost` in Python."""
    rows, columns = size.samples * size.positions, size.other_samples * size.other_positions
    pairs = size.samples * size.other_samples * size.outputs**2
    features = size.inputs + size.outputs**2 * size.cotangents
    weights = size.inputs * size.cotangents
    share = 0.5 if size.symmetric else 1.0
    sides = rows if size.symmetric else rows + columns
    vectors = size.samples if size.symmetric else size.samples + size.other_samples
    packed = sum(1 / side for side in _TILE)
    padded_flops, packed_bytes = _fused_cost(size)
    return Cost(
        gram_flops=share * 2 * rows * columns * features,
        gram_bytes=share * rows * columns * packed * features * size.bytes_per_number,
        materialise_flops=2 * sides * size.outputs * weights + 2 * pairs * weights * share,
        materialise_bytes=2 * vectors * size.outputs * weights * size.bytes_per_number,
        padded_flops=padded_flops,
        packed_bytes=packed_bytes,
    )


def _fused_cost(size: Size) -> tuple[float, float]:
    """What form B's operator computes and moves."""
    lanes = _LINE / size.bytes_per_number
    left = ceil(size.samples * size.outputs / lanes)
    right = ceil(size.other_samples * size.outputs / lanes)
    positions = left * size.positions * ceil((left if size.symmetric else right) / _MOST_GROUPS)
    if not size.symmetric:
        positions += right * size.other_positions * ceil(left / _MOST_GROUPS)
    pairs = left * (left + 1) / 2 if size.symmetric else left * right
    weights = size.inputs * size.cotangents
    features = size.inputs + size.cotangents + weights / _PIECE_SIDE
    return 2 * weights * lanes * (positions + pairs * lanes), positions * _LINE * features
