"""Attention on jets by Triton's kernels (attention_triton_kernels.py).

They store what the C++ kernels do, so that either backward takes either forward. Triton's backward
is of a value and its tangent: of heads of at most 64 numbers it is three kernels; for larger ones a
kernel stores weights and scores' gradients, and large matrix products do the rest
(attention_chunks.py).
"""

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .attention_chunks import Gradients, backward_from_scores, check_call, empty_by_token
from .attention_reference import Call
from .library import OLDEST_GPU, OPS, available, constant_when_compiled

LARGEST_HEAD_WITHOUT_SCORES = 64
"""Numbers of a head at most in the backward that stores no scores."""
HEAD_SIZES = (16, 32, 64, 128)
"""Numbers of a head that tensor descriptors take."""


class Tile(NamedTuple):
    """Queries and keys of a tile, a program's warps, tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


Tiles: TypeAlias = Mapping[tuple[str, int, int], tuple[Tile, Tile, Tile]]
TILES: Tiles = {
    ("forward", 2, 64): (Tile(128, 32, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("forward", 2, 128): (Tile(64, 32, 4, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("forward", 3, 64): (Tile(64, 16, 4, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 4, 64): (Tile(32, 32, 4, 2), Tile(128, 32, 8, 2), Tile(64, 16, 4, 1)),
    ("query_gradient", 2, 64): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("key_gradient", 2, 64): (Tile(32, 32, 4, 2), Tile(32, 128, 8, 2), Tile(32, 128, 8, 1)),
    ("value_gradient", 2, 64): (Tile(32, 32, 4, 2), Tile(32, 128, 8, 2), Tile(16, 128, 8, 2)),
    ("score_jets", 2, 128): (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
}
"""By kernel, streams, and the numbers of a head at most: the tile by pointers, and by tensor
descriptors on GPUs of capability 9 and 10.  Registers and instructions chose them, not a clock."""


@constant_when_compiled
def enabled() -> bool:
    """Return whether Triton is installed and JACHESS_TRITON=1 asks for it.

    The kernels have run in Triton's interpreter and been compiled, but never on a GPU: until they
    have, they are asked for.
    """
    return os.environ.get("JACHESS_TRITON") == "1" and find_spec("triton") is not None


@constant_when_compiled
def _capability(device: int) -> tuple[int, int]:
    # Without a GPU, CUDA tensors are fake tensors, as for `gpu_is_supported`.
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else OLDEST_GPU


def _has_descriptors(x: Tensor) -> bool:
    """Return whether tensor descriptors serve on a tensor's GPU, and in the interpreter."""
    return not x.is_cuda or _capability(x.device.index)[0] in (9, 10)


def accepts(call: Call) -> bool:
    """Return whether the kernels compute a call.

    That is bfloat16, with heads of at most 64 numbers on a GPU that the C++ kernels, too, run on,
    and squares of a single direction; a value and its tangent also with heads of 128
    where tensor descriptors serve.
    """
    query, key, value, _, _, settings = call
    if not (enabled() and query.is_cuda and query.dim() == value.dim() == 5 and len(query) > 1):
        return False
    if settings.summed and settings.q > 1:
        return False
    sizes = {int(query.shape[-1]), int(value.shape[-1])}
    return (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and _capability(query.device.index) >= OLDEST_GPU
        and (
            max(sizes) <= 64
            or (len(query) == 2 and sizes <= {*HEAD_SIZES} and _has_descriptors(query))
        )
    )


class Launcher:
    """Launches the kernels of one call.

    Args:
        jets: query, key and value; in the backward also the result's cotangent.
        tiles: as `TILES`.
    """

    def __init__(self, call: Call, jets: Sequence[Tensor], tiles: Tiles) -> None:
        check_call(call)
        query, key, value, mask, seed, settings = call
        _, batch, heads, rows, size = query.shape
        key_heads, keys = key.shape[2:4]
        self.tiles, self.largest = tiles, max(size, value.shape[4])
        self.jets = [x if x.stride(-1) == 1 else x.contiguous() for x in jets]
        if self.largest > 64:  # pointers to such tiles do not fit a program's registers
            self.jets = [
                x if _takes_descriptor(x) else x.clone(memory_format=torch.contiguous_format)
                for x in self.jets
            ]
        self.descriptors = all(map(_takes_descriptor, self.jets))
        mask_kind = 0 if mask is None else 1 + mask.is_floating_point()
        mask = query[0] if mask is None else mask.expand(batch, heads, rows, keys)
        self.mask = mask.view(torch.uint8) if mask_kind == 1 else mask
        self.seed = query if seed is None else seed
        self.sizes = (batch * heads, heads, heads // max(key_heads, 1), rows, keys)
        p = settings.dropout_p  # a weight is kept where (word >> 8) · 2⁻²⁴ ≥ p
        self.numbers = (settings.scale, settings.softcap, math.ceil(p * 2**24), 1 / (1 - p))
        right = 0 if settings.causal else settings.right
        flags = (settings.softcap > 0, p > 0, self.descriptors, settings.scale <= 0)
        streams = (len(query), settings.summed > 0)
        self.plan = (size, value.shape[4], mask_kind, settings.left, right, *flags, *streams)

    def run(
        self,
        name: str,
        strided: Sequence[Tensor],
        contiguous: Sequence[Tensor],
        heads: int,
        count: int,
        *rectangle: int,
    ) -> None:
        """Launch a kernel of `TILES`.

        Args:
            strided, contiguous: what it loads and stores beside jets and mask, in its order.
            heads, count: its programs have the tiles of so many heads of so many rows or keys.
            rectangle: of `score_jets`.
        """
        from triton.tools.tensor_descriptor import TensorDescriptor

        from . import attention_triton_kernels as kernels

        owns_keys = name in ("key_gradient", "value_gradient")
        streams = len(self.jets[0])
        width = 64 if self.largest <= 64 and (name, streams, 64) in self.tiles else 128
        way = 0
        if self.descriptors:
            way = 2 if self.seed.is_cuda and _capability(self.seed.device.index)[0] == 10 else 1
        tile = self.tiles[name, streams, width][way]
        programs = -(-count // (tile.keys if owns_keys else tile.rows)) * heads
        if not programs:
            return
        jets: Sequence[object] = self.jets
        if self.descriptors:
            boxes = zip(self.jets, (tile.rows, tile.keys, tile.keys, tile.rows), strict=False)
            jets = [TensorDescriptor.from_tensor(x, [1, 1, 1, n, x.shape[-1]]) for x, n in boxes]
            if rectangle:
                box = [1, 1, tile.rows, tile.keys]
                pair = (TensorDescriptor.from_tensor(x, box) for x in contiguous[:2])
                contiguous = [*pair, *contiguous[2:]]
        with_strides = (*self.jets[:3], self.mask, *self.jets[3:], *strided)
        kernel = kernels.key_gradient if owns_keys else getattr(kernels, name)
        with torch.cuda.device_of(self.seed):
            kernel[(programs,)](
                *(*jets[:3], self.mask, *jets[3:], *strided, *contiguous, self.seed),
                tuple(x.stride()[:4] for x in with_strides),
                *(self.sizes, self.numbers, *((rectangle,) if rectangle else ())),
                **({"VALUES": name == "value_gradient"} if owns_keys else {}),
                P=kernels.Plan(tile.rows, tile.keys, *self.plan, tile.stages),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )

    def output_products(self, y: Tensor) -> Tensor:
        """Return Σ_d g₀ y₀ + g₁ y₁ and Σ_d g₁ y₀ of the result and its cotangent, [2, B, H, T]."""
        gy = self.jets[3]
        if available("attention_jet_delta", gy.device):
            return OPS.attention_jet_delta(gy, y, 1)
        g, y = gy.float(), y.float()
        return torch.stack([(g * y).sum((0, -1)), (g[1] * y[0]).sum(-1)])


def forward(call: Call, tiles: Tiles = TILES) -> tuple[Tensor, Tensor]:
    """Return y, [S, B, H, T, Dv], and the jet of log Σ exp(s), [S, B, H, T] float32."""
    query, _, value = call[:3]
    heads, rows = query.shape[2:4]
    y = empty_by_token(query, heads, rows, value.shape[4])
    statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
    launcher = Launcher(call, call[:3], tiles)
    launcher.run("forward", [y], [statistics], launcher.sizes[0], rows)
    return y, statistics


def backward(
    gy: Tensor, call: Call, y: Tensor, statistics: Tensor, tiles: Tiles = TILES
) -> Gradients:
    """Return the gradients of query, key and value from the forward's results."""
    launcher = Launcher(call, (*call[:3], gy), tiles)
    numbers = [statistics, launcher.output_products(y)]
    if launcher.largest > LARGEST_HEAD_WITHOUT_SCORES:

        def scores(head: int, heads: int, row: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
            line = -(-keys // 8) * 8  # whole units of 16 bytes, as cuBLAS wants them
            p, gs = (gy.new_empty(2, heads, rows, line)[..., :keys] for _ in range(2))
            rectangle = (head, row, rows, keys, line)
            launcher.run("score_jets", [], [p, gs, *numbers], heads, rows, *rectangle)
            return p, gs

        return backward_from_scores(scores, gy, call)
    query, key, value = (empty_by_token(x, *x.shape[2:]) for x in call[:3])
    all_heads, _, group, rows, keys = launcher.sizes
    launcher.run("query_gradient", [query], numbers, all_heads, rows)
    launcher.run("key_gradient", [key], numbers, all_heads // group, keys)
    launcher.run("value_gradient", [value], numbers, all_heads // group, keys)
    return query, key, value


def _takes_descriptor(x: Tensor) -> bool:
    """Return whether a tensor descriptor takes a jet: its strides are multiples of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(n > 0 and n % unit == 0 for n in x.stride()[:4])
    return x.numel() > 0 and aligned and x.shape[-1] in HEAD_SIZES and _has_descriptors(x)
