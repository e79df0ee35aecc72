"""The kernel of one pair of captured blocks: parameter by parameter, the cheapest exact form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from ..ops import ntk_gram, ntk_materialised
from .contributions import Contribution, Dense, Factors, Matches, Tied
from .cost import Cost, Size, count_cost
from .sketch import Sketch, contract_sketched

LinearForm = Literal["auto", "A", "B"]
Contributions = Mapping[str, Contribution]


@dataclass(frozen=True)
class Choice:
    """How one parameter, or several linear layers that share their inputs, were contracted.

    Attributes:
        names: the parameters.
        form: "A" Gram, "B" materialised, "C" sketched, "matches" (embeddings), "tied" (embedding
            and head together), "dense" (per-sample gradients at hand).
        cost: counted operations and bytes of A and B; None for the other forms.
        positions: per sample, left, that had a non-zero cotangent; None where there are none.
        squared_error: of form C, an estimate of ‖K̂ − K‖² (Frobenius); 0 where K is exact.
    """

    names: tuple[str, ...]
    form: str
    cost: Cost | None = None
    positions: int | None = None
    squared_error: float = 0.0


@dataclass(frozen=True)
class Settings:
    """Of a contraction.

    Attributes:
        form: of linear layers; "auto" counts operations and bytes.
        workspace: bytes for blocks of materialised gradients.
        dtype: of the arithmetic: float64 or float32.
        sketch: form C where it saves work; None: exact forms only.
    """

    form: LinearForm
    workspace: int
    dtype: torch.dtype
    sketch: Sketch | None = None


def contract(
    left: Contributions, right: Contributions, symmetric: bool, settings: Settings
) -> Iterator[tuple[Choice, Tensor]]:
    """Yield (how, K [C, N, C, M]) piece by piece; their sum is the kernel.

    A parameter that one side lacks has no gradient there, and adds nothing.
    """
    for names in _groups(left, right):
        mine, theirs = _factors(left, names), _factors(right, names)
        if mine and theirs:
            yield _linear(names, mine, theirs, symmetric, settings)
        else:
            (name,) = names
            choice = Choice(names, _FORMS[type(left[name])])
            yield choice, _single(left[name], right[name], symmetric, settings)


def plan(
    sample: Contributions,
    counts: tuple[int, int],
    outputs: int,
    symmetric: bool,
    settings: Settings,
) -> list[Choice]:
    """What `contract` would choose for ``counts`` samples left and right, from a few of them."""
    choices = []
    for names in _groups(sample, sample):
        parts = _factors(sample, names)
        choices.append(
            _choose(names, parts, parts, symmetric, settings, counts, outputs)
            if parts
            else Choice(names, _FORMS[type(sample[names[0]])])
        )
    return choices


_FORMS = {Matches: "matches", Tied: "tied", Dense: "dense", Factors: "tied"}  # of a single one


def _groups(left: Contributions, right: Contributions) -> list[tuple[str, ...]]:
    """Linear layers with the same inputs on both sides together; everything else alone."""
    groups: dict[object, list[str]] = {}
    for name, mine in left.items():
        theirs = right.get(name)
        if theirs is None:
            continue
        key: object = name
        if isinstance(mine, Factors) and isinstance(theirs, Factors):
            key = (mine.source, theirs.source) if mine.source and theirs.source else name
        groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values()]


def _factors(side: Contributions, names: tuple[str, ...]) -> list[Factors]:
    return [part for name in names if isinstance(part := side[name], Factors)]


def _choose(
    names: tuple[str, ...],
    lefts: list[Factors],
    rights: list[Factors],
    symmetric: bool,
    settings: Settings,
    counts: tuple[int, int] | None = None,
    outputs: int | None = None,
) -> Choice:
    first, other = lefts[0], rights[0]
    samples, others = counts or (first.inputs.shape[0], other.inputs.shape[0])
    size = Size(
        samples=samples,
        positions=first.inputs.shape[1],
        other_samples=others,
        other_positions=other.inputs.shape[1],
        outputs=outputs or first.cotangents.shape[0],
        inputs=first.inputs.shape[2],
        cotangents=sum(part.cotangents.shape[-1] for part in lefts),
        symmetric=symmetric,
        bytes_per_number=settings.dtype.itemsize,
    )
    cost = count_cost(size)
    form: str = cost.form if settings.form == "auto" else settings.form
    cheapest = min(cost.gram_flops, cost.materialise_flops)
    if settings.sketch is not None and settings.sketch.serves(names, size, cheapest):
        form = "C"
    return Choice(names, form, cost, size.positions)


def _linear(
    names: tuple[str, ...],
    lefts: list[Factors],
    rights: list[Factors],
    symmetric: bool,
    settings: Settings,
) -> tuple[Choice, Tensor]:
    choice = _choose(names, lefts, rights, symmetric, settings)
    if choice.form == "C":
        assert settings.sketch is not None
        found = [
            contract_sketched(name, a, b, symmetric, settings.sketch, settings.dtype)
            for name, a, b in zip(names, lefts, rights, strict=True)
        ]
        kernel = torch.stack([kernel for kernel, _ in found]).sum(0)
        return replace(choice, squared_error=sum(error for _, error in found)), kernel
    operands = _operands(lefts, None if symmetric else rights, settings.dtype)
    if choice.form == "A":
        return choice, ntk_gram(*operands)
    return choice, ntk_materialised(*operands, workspace=settings.workspace)


def _operands(
    mine: list[Factors], theirs: list[Factors] | None, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Tensor | None, list[Tensor] | None]:
    """What the operators of forms A and B take; operands of several dtypes, or narrower than a
    float64 result's, are converted."""
    sides = [[part[0].inputs, *(p.cotangents for p in part)] for part in (mine, theirs) if part]
    found = {operand.dtype for side in sides for operand in side}
    if len(found) > 1 or (dtype == torch.float64 and found != {dtype}):
        sides = [[operand.to(dtype) for operand in side] for side in sides]
    (inputs, *cotangents), *rest = sides
    if not rest:
        return inputs, cotangents, None, None
    return inputs, cotangents, rest[0][0], rest[0][1:]


def _single(left: Contribution, right: Contribution, symmetric: bool, settings: Settings) -> Tensor:
    if isinstance(left, Dense) and isinstance(right, Dense):
        x, y = (part.gradients.to(settings.dtype) for part in (left, right))
        return torch.tensordot(x, y, dims=([2], [2]))
    pieces = (
        _pair(mine, theirs, symmetric and mine is theirs, settings)
        for mine in _parts(left)
        for theirs in _parts(right)
    )
    return reduce(torch.add, pieces)


def _parts(contribution: Contribution) -> list[Factors | Matches]:
    if isinstance(contribution, Tied):
        return [contribution.factors, contribution.matches]
    if isinstance(contribution, Dense):
        raise RuntimeError(
            "a parameter is used in different ways on the two sides; method='per_sample' takes "
            "exact gradients sample by sample"
        )
    return [contribution]


def _pair(
    left: Factors | Matches, right: Factors | Matches, symmetric: bool, settings: Settings
) -> Tensor:
    workspace, dtype = settings.workspace, settings.dtype
    if isinstance(left, Matches):
        if isinstance(right, Matches):
            return contract_matches(left, right, workspace, dtype)
        return contract_tied(left, right, workspace, dtype)
    if isinstance(right, Matches):
        return contract_tied(right, left, workspace, dtype).permute(2, 3, 0, 1)
    return _linear(("",), [left], [right], symmetric, settings)[1]


# ---- embeddings ------------------------------------------------------------------------------
#
# Only equal ids meet, so that the kernel is a sum of small products over shared ids,
#
#     K[c, n, c', m] = Σ_v g_{n,c,v} · g_{m,c',v}
#
# Ids that occur in equally many samples are done together, in one batched product.


def contract_matches(left: Matches, right: Matches, workspace: int, dtype: torch.dtype) -> Tensor:
    """[C, N, C, M] of ``dtype`` for one embedding."""
    outputs = left.gradients.shape[0]
    shape = (outputs, left.count, outputs, right.count)
    kernel = left.gradients.new_zeros(shape, dtype=dtype)
    for rows, columns in _shared_ids(left.ids, right.ids):
        per_id = (rows.shape[1] + columns.shape[1]) * outputs * left.gradients.shape[-1]
        step = max(1, workspace // max(1, per_id * dtype.itemsize))
        for x, y in zip(rows.split(step), columns.split(step), strict=True):
            _add_group(kernel, left, right, x, y)
    return kernel


def _shared_ids(left_ids: Tensor, right_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Index pairs ([g, k], [g, k']): entries of g shared ids that have k on the left, k' right."""
    order, ids, counts = _sorted(left_ids)
    other_order, other_ids, other_counts = _sorted(right_ids)
    starts, other_starts = counts.cumsum(0) - counts, other_counts.cumsum(0) - other_counts
    if not len(other_ids):
        return []
    place = torch.searchsorted(other_ids, ids).clamp(max=len(other_ids) - 1)
    shared = other_ids[place] == ids
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
    x, y = (  # [g, C k, d]
        side.gradients[:, entries].to(kernel.dtype).transpose(0, 1).flatten(1, 2)
        for side, entries in ((left, rows), (right, columns))
    )
    products = torch.bmm(x, y.transpose(1, 2))  # [g, C k, C k']
    outputs, count, _, other_count = kernel.shape
    output = torch.arange(outputs, device=rows.device)[:, None]
    i = (output * count + left.samples[rows][:, None]).flatten(1)  # [g, C k]
    j = (output * other_count + right.samples[columns][:, None]).flatten(1)
    place = i[:, :, None] * (outputs * other_count) + j[:, None, :]
    kernel.view(-1).index_add_(0, place.flatten(), products.flatten())


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
