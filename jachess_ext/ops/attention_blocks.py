"""Attention under a flex `BlockMask`: hidden tiles cost nothing, and no mask is T × Tk.

A `BlockMask` lists for each block of queries the fully visible and the partly visible blocks of
keys. All blocks of queries that see the same blocks of keys, each fully, are computed by one call
of attention; a block of queries with partly visible keys is a separate call, with a boolean mask.

Torch's `flex_attention` passes a call to the compiler without dispatching to tensor subclasses or
modes; `watch_flex_attention` makes it call the functions in `ANSWERS` first.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, zip_longest
from types import FunctionType
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..torch_private import functional as F

if TYPE_CHECKING:  # a module that takes a second to import
    from torch.nn.attention.flex_attention import BlockMask

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""Attention as a function of query, key, value and a boolean mask (True: visible) or None."""


# ---- attention by blocks -------------------------------------------------------------------


def attention_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, attention: Attention
) -> Tensor:
    """Compute attention under a block mask, without a T × Tk tensor if `attention` builds none.

    A query that sees no key gives zeros.  The list of visible blocks is copied to the host; the
    mask of a block of queries with partly visible keys takes one byte per score.

    Args:
        query: [..., B, H, T, D]; query, key and value are plain tensors, stacks or jets that
            ``attention`` accepts.
        key: [..., B, Hk, Tk, D]; Hk divides H.
        value: [..., B, Hk, Tk, Dv].
        block_mask: the mask for T queries and Tk keys, with 1 or B batch entries and 1 or H heads.
        attention: function that computes attention.

    Raises:
        ValueError: ``block_mask`` is for other numbers of queries or keys.

    Examples:
        >>> from jachess_ext.ops import attention_jet
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> causal = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 256, device="cpu")
        >>> heads = torch.ones(2, 1, 1, 256, 4)  # one direction
        >>> attention_by_blocks(heads, heads, heads, causal, partial(attention_jet, q=1)).shape
        torch.Size([2, 1, 1, 256, 4])
    """
    lengths = query.shape[-2], key.shape[-2]
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask is for {block_mask.seq_lengths} queries and keys; expected {lengths}: "
            "create it for these lengths."
        )
    counts, (rows, columns) = block_mask.kv_num_blocks, block_mask.BLOCK_SIZE
    partial_keys = _tiles(counts, block_mask.kv_indices)
    full_keys = _tiles(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    tiles = iter(zip_longest(partial_keys, full_keys, fillvalue=frozenset[int]()))
    batches, heads = (
        [slice(n, n + 1) for n in range(size)] if size > 1 else [slice(0, None)]
        for size in (1, 1, *counts.shape[:-1])[-2:]
    )
    queries_per_key = query.shape[-3] // key.shape[-3]

    def attend(batch: slice, head: slice) -> Tensor:
        """Return attention of the batch entries and heads in these slices, which see the same
        blocks of keys."""
        first = head.start // queries_per_key
        key_head = slice(first, head.stop and first + 1)
        # Split once, so that a backward accumulates only the gradients of visible blocks.
        q = query[..., batch, head, :, :].split(rows, -2)
        k, v = (x[..., batch, key_head, :, :].split(columns, -2) for x in (key, value))
        seen = [*islice(tiles, len(q))]
        calls = defaultdict(list)
        for n, tile in enumerate(seen):
            calls[tile, n if tile[0] else -1].append(n)
        shape = (*q[0].shape[-4:-1], k[0].shape[-2])
        masks = _masks(block_mask, seen, shape, (batch.start, head.start))
        outputs: dict[int, Tensor] = {}
        for ((some, full), _), blocks in calls.items():
            queries, visible, mask = _joined([q[n] for n in blocks], -2), sorted(some | full), None
            if visible:
                keys, values = (_joined([x[n] for n in visible], -2) for x in (k, v))
                if some:
                    of_tiles = [next(masks) if n in some else None for n in visible]
                    ones = torch.ones_like(next(x for x in of_tiles if x is not None))
                    mask = torch.cat([ones if x is None else x for x in of_tiles], -1)
                    mask = mask[..., : queries.shape[-2], : keys.shape[-2]]
                out = attention(queries, keys, values, mask)
            else:  # zeros with a graph, whose gradients are zeros
                zeros = queries[..., :0].sum(-1, keepdim=True)
                out = zeros.expand(*zeros.shape[:-1], v[0].shape[-1])
            outputs.update(
                zip(blocks, out.split([q[n].shape[-2] for n in blocks], -2), strict=True)
            )
        return _joined([outputs[n] for n in range(len(q))], -2)

    return _joined([_joined([attend(b, h) for h in heads], -3) for b in batches], -4)


def _tiles(counts: Tensor | None, blocks: Tensor | None) -> list[frozenset[int]]:
    """Return the set of visible blocks of keys for each block of queries, in the order of batch
    entries, heads and blocks.

    Args:
        counts: number of visible blocks of keys, [..., blocks of queries]; None: none.
        blocks: numbers of the blocks of keys, of which the first ``counts`` are visible.
    """
    if counts is None or blocks is None:
        return []
    lists = zip(counts.flatten().tolist(), blocks.flatten(0, -2).tolist(), strict=True)
    return [frozenset(numbers[:count]) for count, numbers in lists]


def _masks(
    block_mask: BlockMask,
    seen: list[tuple[frozenset[int], frozenset[int]]],
    shape: tuple[int, ...],
    first: tuple[int, int],
) -> Iterator[Tensor]:
    """Yield the mask of each partly visible tile, in the order of queries, then keys.

    A call of mask_mod takes milliseconds under torch's vmap, so that each computes several masks,
    but few enough that its int64 positions take less memory than a T × T mask.

    Args:
        seen: for each block of queries the partly visible and the fully visible blocks of keys.
        shape: shape of a tile, [B, H, rows, columns]; B or H is 1 if the mask does not depend on
            it.
        first: numbers of the first batch entry and the first head.
    """
    from torch.nn.attention.flex_attention import create_mask

    device, lengths = block_mask.kv_indices.device, block_mask.seq_lengths
    (*outer, height, width), (batch, head) = shape, first
    at_once = max(len(seen) // 2, 16)
    tiles = [(n, m) for n, (some, _) in enumerate(seen) for m in sorted(some)]
    for start in range(0, len(tiles), at_once):
        corners = torch.tensor(tiles[start : start + at_once], device=device)
        corners = corners * torch.tensor(block_mask.BLOCK_SIZE, device=device)
        rows = (corners[:, :1] + torch.arange(height, device=device)).clamp(max=lengths[0] - 1)
        row, column = rows.flatten(), corners[:, 1].repeat_interleave(height)

        def sees(
            b: Tensor, h: Tensor, i: Tensor, j: Tensor, row: Tensor = row, column: Tensor = column
        ) -> Tensor:
            key = (column[i] + j).clamp(max=lengths[1] - 1)
            return block_mask.mask_mod(b + batch, h + head, row[i], key)

        # mask_mod may read tensors that are empty for an empty batch: the mask has one entry then.
        mask = create_mask(sees, outer[0] or 1, outer[1] or 1, len(row), width, device)
        for dim in (0, 1):
            mask = mask if mask.stride(dim) else mask.narrow(dim, 0, 1)
        yield from mask.unflatten(-2, (-1, height)).unbind(-3)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]


# ---- torch's flex_attention ----------------------------------------------------------------

ANSWERS: list[Callable[..., object]] = []
"""Functions to call before torch's own `flex_attention`, with its arguments by name: the first
result other than NotImplemented replaces that of torch."""
_ORIGINALS: list[FunctionType] = []
"""Torch's own `flex_attention`, once it is replaced."""


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: object,
) -> Tensor:
    """Compute torch's `flex_attention` without a score_mod; the result has the memory layout of
    torch's.

    It calls torch's `scaled_dot_product_attention`, which dispatches to tensor subclasses and
    modes.
    """
    key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    attention = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
    if block_mask is None:
        out = attention(query, key, value)
    else:
        out = attention_by_blocks(query, key, value, block_mask, attention)
    order = sorted(range(3), key=query.stride, reverse=True)
    return out.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3)


def watch_flex_attention() -> None:
    """Make torch's `flex_attention` call `ANSWERS` from now on, if its module has been imported.

    The code of the function object is replaced, since programs may hold the function itself.
    """
    names = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "__dict__", {})
    function = names.get("flex_attention")
    if _ORIGINALS or not isinstance(function, FunctionType) or function.__globals__ is not names:
        return
    original = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__annotations__ = function.__annotations__
    _ORIGINALS.append(original)
    function.__code__, function.__defaults__, function.__kwdefaults__ = _run.__code__, None, None
    vars(function)["__wrapped__"] = original  # for `inspect.signature`


def _run(*args: object, **kwargs: object) -> object:
    from jachess_ext.ops import attention_blocks  # its globals are those of torch's module

    return attention_blocks.answer(*args, **kwargs)


def answer(*args: object, **kwargs: object) -> object:
    """Return the result of a call of `flex_attention`: of the first function in `ANSWERS` that
    handles it, otherwise torch's own."""
    if not is_dynamo_compiling():
        call = inspect.signature(_ORIGINALS[0]).bind(*args, **kwargs).arguments
        for function in ANSWERS:
            if (result := function(**call)) is not NotImplemented:
                return result
    return _ORIGINALS[0](*args, **kwargs)
