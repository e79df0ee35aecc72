"""Embeddings: only equal ids meet, so the kernel is a sum of small products over shared ids.

    K[c, n, c', m] = Σ_v g_{n,c,v} · g_{m,c',v}

Ids that occur in equally many samples are done together, in one batched product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contributions import Factors, Matches


def contract_matches(left: Matches, right: Matches, workspace: int, dtype: torch.dtype) -> Tensor:
    """[C, N, C, M] of ``dtype`` for one embedding."""
    outputs = left.gradients.shape[0]
    shape = (outputs, left.count, outputs, right.count)
    kernel = left.gradients.new_zeros(shape, dtype=dtype)
    for rows, columns in _groups(left.ids, right.ids):
        per_id = (rows.shape[1] + columns.shape[1]) * outputs * left.gradients.shape[-1]
        step = max(1, workspace // max(1, per_id * dtype.itemsize))
        for x, y in zip(rows.split(step), columns.split(step), strict=True):
            _add_group(kernel, left, right, x, y)
    return kernel


def _groups(left_ids: Tensor, right_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Index pairs ([g, k], [g, k']): entries of g shared ids that have k on the left, k' right."""
    order, ids, counts = _sorted(left_ids)
    other_order, other_ids, other_counts = _sorted(right_ids)
    starts, other_starts = counts.cumsum(0) - counts, other_counts.cumsum(0) - other_counts
    place = torch.searchsorted(other_ids, ids).clamp(max=max(0, len(other_ids) - 1))
    shared = (
        (other_ids[place] == ids) if len(other_ids) else torch.zeros_like(ids, dtype=torch.bool)
    )
    here, there = shared.nonzero()[:, 0], place[shared]
    if not len(here):
        return []
    sizes = torch.stack([counts[here], other_counts[there]], 1)
    kinds, kind_of = torch.unique(sizes, dim=0, return_inverse=True)
    groups = []
    for number, (k, other_k) in enumerate(kinds.tolist()):
        mine = kind_of == number
        rows = starts[here[mine]][:, None] + torch.arange(k, device=ids.device)
        columns = other_starts[there[mine]][:, None] + torch.arange(other_k, device=ids.device)
        groups.append((order[rows], other_order[columns]))
    return groups


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = ids.argsort(stable=True)
    unique, counts = torch.unique_consecutive(ids[order], return_counts=True)
    return order, unique, counts


def _add_group(
    kernel: Tensor, left: Matches, right: Matches, rows: Tensor, columns: Tensor
) -> None:
    """Add Σ over g ids; rows [g, k] and columns [g, k'] index the entries of both sides."""
    x, y = _stacked(left, rows, kernel.dtype), _stacked(right, columns, kernel.dtype)
    products = torch.bmm(x, y.transpose(1, 2))  # [g, C k, C k']
    outputs, count, _, other_count = kernel.shape
    output = torch.arange(outputs, device=rows.device)[:, None]
    i = (output * count + left.samples[rows][:, None]).flatten(1)  # [g, C k]
    j = (output * other_count + right.samples[columns][:, None]).flatten(1)
    place = i[:, :, None] * (outputs * other_count) + j[:, None, :]
    kernel.view(-1).index_add_(0, place.flatten(), products.flatten())


def _stacked(side: Matches, entries: Tensor, dtype: torch.dtype) -> Tensor:
    """[g, C k, d]."""
    return side.gradients[:, entries].to(dtype).transpose(0, 1).flatten(1, 2)


def contract_tied(matches: Matches, factors: Factors, workspace: int, dtype: torch.dtype) -> Tensor:
    """[C, N, C, M]: an embedding on the left, a linear layer with the same weight on the right.

    K[c, n, c', m] = Σ_{v, t} (g_{n,c,v} · a_{m,t}) δ_{m,c',t,v}
    """
    outputs, entries, _ = matches.gradients.shape
    other_count, positions = factors.inputs.shape[:2]
    kernel = matches.gradients.new_zeros(outputs, matches.count, outputs, other_count, dtype=dtype)
    per_entry = 2 * outputs * other_count * positions * dtype.itemsize
    step = max(1, workspace // max(1, per_entry))
    for start in range(0, entries, step):
        part = slice(start, start + step)
        g = matches.gradients[:, part].to(dtype)
        picked = factors.cotangents[..., matches.ids[part]].to(dtype)
        inner = torch.einsum("cud,mtd->umct", g, factors.inputs.to(dtype))
        found = torch.einsum("umct,emtu->cuem", inner, picked)
        kernel.index_add_(1, matches.samples[part], found)
    return kernel
