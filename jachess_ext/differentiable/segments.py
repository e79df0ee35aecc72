"""Reductions of groups of rows, by a padded table of each group's rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.library import wide
from .formulas import formula, in_place

_NEUTRAL = {"prod": 1.0, "amax": -torch.inf, "max": -torch.inf, "amin": torch.inf, "min": torch.inf}
_ALL = "forward, second, mixed"


def _rows(x: Tensor, table: Tensor) -> Tensor:
    """Return x[table], with a backward that supports the batched tensors of is_grads_batched."""
    return x.index_select(0, table.flatten()).reshape(*table.shape, *x.shape[1:])


def ragged_table(starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors ``[groups, longest]``: the indices starts[n] + j of each group's rows,
    padded with 0, and a mask that is true at rows and false at padding."""
    column = torch.arange(int(sizes.max()) if sizes.numel() else 0, device=sizes.device)
    is_row = column < sizes.unsqueeze(1)
    return torch.where(is_row, starts.unsqueeze(1) + column, 0), is_row


def _combine(x: Tensor, valid: Tensor, reduce: str) -> Tensor:
    """Return x, ``[groups, entries, ...]``, reduced over the valid entries of each group, to
    ``[groups, ...]``; an empty mean is NaN."""
    shape = (*valid.shape, *(1,) * (x.ndim - 2))
    x = torch.where(valid.reshape(shape), x, _NEUTRAL.get(reduce, 0.0))
    if reduce in ("sum", "mean"):
        total = x.sum(1)
        return total if reduce == "sum" else total / valid.sum(1).reshape(-1, *shape[2:])
    if not x.shape[1]:
        return x.new_full((len(x), *x.shape[2:]), _NEUTRAL[reduce])
    return x.prod(1) if reduce == "prod" else x.amax(1) if "max" in reduce else x.amin(1)


def _reduce_with(
    x: Tensor, groups: Tensor, source: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """Return, for each row of x, the reduction of the rows of ``source`` in its group.

    Args:
        groups: for each row of ``source``, the index of a row of x.
        include_self: whether the row of x itself is part of the reduction; it is in any case the
            result of an empty group.
    """
    sizes = torch.zeros(len(x), dtype=torch.long, device=groups.device)
    sizes = sizes.scatter_add(0, groups, torch.ones_like(groups))
    numbers, is_valid = ragged_table(sizes.cumsum(0) - sizes, sizes)
    table = torch.argsort(groups, stable=True)[numbers]
    has_self = torch.ones_like(is_valid[:, :1]) if include_self else ~is_valid.any(1, keepdim=True)
    stacked = torch.cat([x.unsqueeze(1), _rows(source, table)], 1)
    return _combine(stacked, torch.cat([has_self, is_valid], 1), reduce).to(x.dtype)


@formula(torch.index_reduce, Tensor.index_reduce, refuses="forward, mixed")
def index_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Reduce a padded table of each group's rows; memory groups × rows of the longest group."""
    if not input.numel() or not index.numel():
        return input.clone()
    x, rows = (y.reshape(1) if y.ndim == 0 else y.movedim(dim, 0) for y in (input, source))
    out = _reduce_with(x, index.flatten(), rows, reduce, include_self)
    return out.movedim(0, dim if input.ndim else 0).reshape(input.shape)


in_place(Tensor.index_reduce_, Tensor.index_reduce)


def _is_product(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **settings: bool
) -> bool:
    return reduce == "prod" and index.numel() > 0


@formula(
    *(torch.scatter_reduce, Tensor.scatter_reduce),
    refuses="forward (of a product)",
    wrong="jvp(vjp), jvp(jacrev) of a product with zeros",
    only=_is_product,
)
def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Reduce each entry's group as `index_reduce` does."""
    x, index, src = (y.reshape(1) if y.ndim == 0 else y for y in (input, index, src))
    dim %= x.ndim
    # An entry of src at a position of ``index`` goes to the entry of x with that index along
    # ``dim``.
    corner = [slice(size) for size in index.shape]
    lines = (*corner[:dim], slice(None), *corner[dim + 1 :])
    flat_indices = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    groups = flat_indices[lines].gather(dim, index).flatten()
    out = _reduce_with(x.reshape(-1), groups, src[tuple(corner)].flatten(), reduce, include_self)
    return out.reshape(input.shape)


in_place(Tensor.scatter_reduce_, Tensor.scatter_reduce)


@formula(torch.segment_reduce, refuses=_ALL)
def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """Reduce a padded table of each segment's rows; memory segments × rows of the longest one."""
    if lengths is None:
        assert offsets is not None
        lengths, starts = offsets.diff(dim=-1), offsets[..., :-1]
    else:
        starts = lengths.cumsum(-1) - lengths
    x = data.flatten(0, axis)  # the rows of all batches, one behind another
    first_rows = torch.arange(lengths[..., 0].numel(), device=data.device) * data.shape[axis]
    starts = (starts.reshape(len(first_rows), -1) + first_rows.unsqueeze(1)).flatten()
    rows, is_valid = ragged_table(starts, lengths.flatten())
    table = _rows(x, rows)
    if initial is not None:
        initial_column = table.new_full((len(table), 1, *table.shape[2:]), initial)
        counts = is_valid.sum(1).clamp(min=1).reshape(-1, *(1,) * (x.ndim - 1))
        with_first = F.pad(is_valid, (1, 0), value=True)
        out = _combine(
            torch.cat([initial_column, table], 1), with_first, "sum" if reduce == "mean" else reduce
        )
        out = out / counts if reduce == "mean" else out
    else:
        out = _combine(table, is_valid, reduce)
    return out.reshape(*lengths.shape, *data.shape[axis + 1 :]).to(data.dtype)


@formula(torch.embedding_bag, refuses=_ALL)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduce a padded table of each bag's rows; memory bags × rows of the longest bag.  The
    gradient is dense, and is not scaled by frequency."""
    starts, count = offsets.long(), indices.numel()
    ends = (
        starts[1:] if include_last_offset else torch.cat([starts[1:], starts.new_tensor([count])])
    )
    starts = starts[: len(ends)]
    entries, is_valid = ragged_table(starts, ends - starts)
    rows = indices[entries] if count else entries
    if padding_idx is not None:
        is_valid = is_valid & (rows != padding_idx % len(weight))
    x = _rows(wide(weight), rows)
    if per_sample_weights is not None:
        x = x * _rows(wide(per_sample_weights), entries).unsqueeze(-1)
    out = _combine(x, is_valid, ("sum", "mean", "max")[mode])
    out = torch.where(is_valid.any(1, keepdim=True), out, 0).to(weight.dtype)
    no_indices = indices.new_zeros(0)
    return out, no_indices, no_indices, no_indices
