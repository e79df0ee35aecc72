"""Per-sample gradients of each parameter in factored form, and the kernel summed from them.

The gradient G_{n,c} = ∂f_{n,c}/∂θ of a parameter θ is stored in one of these forms:

    Factors   G_{n,c} = Σ_t δ_{n,c,t} a_{n,t}ᵀ            linear layers
    Matches   row v of G_{n,c} is g_{n,c,v}, few v a sample    embeddings, heads read at labels
    Dense     G_{n,c} itself                                 biases, norm weights, the rest;
                                                             complex ones as pairs of real numbers
    Tied      Factors + Matches                              output head tied to the embedding

``materialise`` gives G, [C, n, numel]; ``nbytes(C)`` the memory it would take with C outputs.
Here n numbers samples, c outputs, t positions (tokens, in every call of the layer).
`contract` sums the kernel parameter by parameter, each in its cheapest exact form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from ..ops import ntk_gram, ntk_materialised

Form = Literal["A", "B"]
LinearForm = Literal["auto", "A", "B"]
Contributions = Mapping[str, "Contribution"]

_WORTH_GATHERING = 0.9  # fraction of positions kept, below which they are gathered
_TILE = (256, 128)  # positions of form A's tiles (csrc/cpu/ntk_gram_plan.h)
# Operations that take as long as moving a byte, fitted on a CPU: on 144 layers (N 8 and 48, T 1 to
# 64; two idle cores, fp32) the chosen forms take 0.3 % longer than always the faster one (geometric
# mean). Blocks of gradients go through the cache, so their bytes weigh more.
_GRAM_BYTE, _MATERIALISED_BYTE = 8.0, 96.0


@dataclass(frozen=True)
class Factors:
    """Gradients of a linear layer's weight, as the layer's inputs and output cotangents.

    Attributes:
        inputs: a, [n, t, d_in].
        cotangents: δ, [C, n, t, d_out].
        is_transposed: the parameter is [d_in, d_out] (GPT-2's Conv1D), not [d_out, d_in].
        source: key of the input tensor; layers with equal keys share a Gram matrix. (): no key.
    """

    inputs: Tensor
    cotangents: Tensor
    is_transposed: bool = False
    source: tuple[int, ...] = ()

    def materialise(self, shape: torch.Size) -> Tensor:
        if self.is_transposed:
            return torch.einsum("ntk,cntr->cnkr", self.inputs, self.cotangents).flatten(2)
        return torch.einsum("cntr,ntk->cnrk", self.cotangents, self.inputs).flatten(2)

    def nbytes(self, num_outputs: int) -> int:
        return _nbytes(self.inputs) + _nbytes(self.cotangents[0]) * num_outputs


@dataclass(frozen=True)
class Matches:
    """Gradients of an embedding's rows, one entry for every (sample, id) that occurs.

    Attributes:
        samples, ids: the sample's index and the row of θ of each entry, [U] each; the pairs are
            unique and sorted.
        gradients: g, [C, U, d].
        count: the number of samples n.
    """

    samples: Tensor
    ids: Tensor
    gradients: Tensor
    count: int

    def materialise(self, shape: torch.Size) -> Tensor:
        num_outputs = self.gradients.shape[0]
        width = self.gradients.shape[-1]  # 1 for a parameter that is a vector
        full = self.gradients.new_zeros(num_outputs, self.count, shape[0], width)
        full[:, self.samples, self.ids] = self.gradients
        return full.flatten(2)

    def nbytes(self, num_outputs: int) -> int:
        return _nbytes(self.samples, self.ids) + _nbytes(self.gradients[0]) * num_outputs


@dataclass(frozen=True)
class Dense:
    """Per-sample gradients G themselves, flattened: [C, n, numel]."""

    gradients: Tensor

    def materialise(self, shape: torch.Size) -> Tensor:
        return self.gradients

    def nbytes(self, num_outputs: int) -> int:
        return _nbytes(self.gradients[0]) * num_outputs


@dataclass(frozen=True)
class Tied:
    """Gradients of a parameter used as a linear layer's weight and as an embedding."""

    factors: Factors
    matches: Matches

    def materialise(self, shape: torch.Size) -> Tensor:
        return self.factors.materialise(shape) + self.matches.materialise(shape)

    def nbytes(self, num_outputs: int) -> int:
        return self.factors.nbytes(num_outputs) + self.matches.nbytes(num_outputs)


Contribution = Factors | Matches | Dense | Tied


def make_factors(
    inputs: Tensor, cotangents: Tensor, is_transposed: bool = False, source: tuple[int, ...] = ()
) -> Factors:
    """Return the factors of a call without the positions whose cotangents are zero.

    Padding, and tokens that a classifier does not use (all but the first of the last block), have
    δ = 0 exactly.  Each sample keeps its other positions, padded with zeros to the length of the
    longest sample.
    """
    # The first feature may already show that some sample uses every position: keep all.
    is_first_used = cotangents[..., 0].ne(0).any(0)  # [n, t]
    if is_first_used.numel() and bool(is_first_used.all(1).any()):
        return Factors(inputs, cotangents, is_transposed, source)
    is_used = cotangents.ne(0).any(-1).any(0)  # [n, t]
    longest = int(is_used.sum(1).max()) if is_used.numel() else 0
    if longest > _WORTH_GATHERING * is_used.shape[1]:
        return Factors(inputs, cotangents, is_transposed, source)
    # Used positions first.
    order = is_used.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    inputs = inputs.take_along_dim(order[..., None], 1)
    cotangents = cotangents.take_along_dim(order[None, ..., None], 2)
    indices = tuple(order.flatten().tolist()) if source else ()
    return Factors(inputs, cotangents, is_transposed, (*source, *indices))


def make_matches(ids: Tensor, cotangents: Tensor, keep: Tensor, num_rows: int) -> Matches:
    """Return the matches of a call, in which cotangents of equal ids within a sample are summed.

    Args:
        ids: [n, t].
        cotangents: [C, n, t, d].
        keep: [n, t]; false where the embedding passes no gradient (its padding_idx).
        num_rows: number of rows of the embedding's weight.
    """
    keep = keep & cotangents.ne(0).any(-1).any(0)
    sample = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
    return _sum_matches(sample[keep], ids[keep], cotangents[:, keep], ids.shape[0], num_rows)


def _sum_matches(
    samples: Tensor, ids: Tensor, gradients: Tensor, count: int, num_rows: int
) -> Matches:
    keys, index = torch.unique(samples * num_rows + ids, return_inverse=True)
    summed = gradients.new_zeros(gradients.shape[0], len(keys), gradients.shape[-1])
    summed.index_add_(1, index, gradients)
    return Matches(keys // num_rows, keys % num_rows, summed, count)


def add_up(terms: Sequence[Contribution], shape: torch.Size) -> Contribution:
    """Return the sum of the contributions of several calls to one parameter's G.

    Args:
        terms: the contributions, at least one.
        shape: shape of the parameter.
    """
    factors = [term for term in terms if isinstance(term, Factors)]
    matches = [term for term in terms if isinstance(term, Matches)]
    have_one_layout = len({term.is_transposed for term in factors}) <= 1
    if len(terms) == 1:
        return terms[0]
    if len(factors) == len(terms) and have_one_layout:
        return _join_factors(factors)
    if len(matches) == len(terms):
        return _join_matches(matches, shape[0])
    is_untransposed = not any(term.is_transposed for term in factors)
    if is_untransposed and len(factors) + len(matches) == len(terms):
        return Tied(_join_factors(factors), _join_matches(matches, shape[0]))
    return Dense(reduce(torch.add, (term.materialise(shape) for term in terms)))


def _join_factors(uses: list[Factors]) -> Factors:
    """Concatenate the positions of several calls of a layer."""
    if len(uses) == 1:
        return uses[0]
    return Factors(
        torch.cat([use.inputs for use in uses], 1),
        torch.cat([use.cotangents for use in uses], 2),
        uses[0].is_transposed,
    )


def _join_matches(uses: list[Matches], num_rows: int) -> Matches:
    if len(uses) == 1:
        return uses[0]
    return _sum_matches(
        torch.cat([use.samples for use in uses]),
        torch.cat([use.ids for use in uses]),
        torch.cat([use.gradients for use in uses], 1),
        uses[0].count,
        num_rows,
    )


def as_real(values: Tensor) -> Tensor:
    """Return values as a dense real tensor; complex ones as pairs of real numbers, [..., 2]."""
    values = values.to_dense() if values.is_sparse else values
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- the forms of a linear layer's kernel -----------------------------------------------------
#
# With NT positions on the left and MT' on the right, inputs of size d, cotangents of total size e
# (layers that share their inputs), C outputs:
#
#   A   2 NT·MT' (d + C² e) operations; operands are packed anew for every tile of 256 × 128
#       positions, (1/256 + 1/128) NT·MT' (d + C² e) numbers
#   B   2 (NT + MT') C d e to materialise, 2 NC·MC d e to multiply; [NC + MC, d e] written and read
#
# A symmetric block needs half the pairs in A and in B's product, and one side's materialising.


@dataclass(frozen=True)
class Size:
    """Sizes of a contraction of linear layers with shared inputs.

    Attributes:
        samples, other_samples: N and M.
        positions, other_positions: positions per sample with a non-zero cotangent, T and T'.
        outputs: C.
        inputs, cotangents: d, and e summed over the layers.
    """

    samples: int
    positions: int
    other_samples: int
    other_positions: int
    outputs: int
    inputs: int
    cotangents: int
    is_symmetric: bool
    bytes_per_number: int = 4


@dataclass(frozen=True)
class Cost:
    """Numbers of floating-point operations and of bytes moved, of form A ("gram") and of form B
    ("materialise")."""

    gram_flops: float
    gram_bytes: float
    materialise_flops: float
    materialise_bytes: float

    @property
    def form(self) -> Form:
        """Return the form that should take less time."""
        gram = self.gram_flops + _GRAM_BYTE * self.gram_bytes
        dense = self.materialise_flops + _MATERIALISED_BYTE * self.materialise_bytes
        return "A" if gram <= dense else "B"


def count_cost(size: Size) -> Cost:
    """Count operations and bytes of forms A and B."""
    # All of these are counts, except `half` and `packed`.
    rows, columns = size.samples * size.positions, size.other_samples * size.other_positions
    pairs = size.samples * size.other_samples * size.outputs**2
    features = size.inputs + size.outputs**2 * size.cotangents
    weights = size.inputs * size.cotangents
    pair_factor = 0.5 if size.is_symmetric else 1.0
    sides = rows if size.is_symmetric else rows + columns
    vectors = size.samples if size.is_symmetric else size.samples + size.other_samples
    packed = sum(1 / side for side in _TILE)
    return Cost(
        gram_flops=pair_factor * 2 * rows * columns * features,
        gram_bytes=pair_factor * rows * columns * packed * features * size.bytes_per_number,
        materialise_flops=2 * sides * size.outputs * weights + 2 * pairs * weights * pair_factor,
        materialise_bytes=2 * vectors * size.outputs * weights * size.bytes_per_number,
    )


# ---- contraction ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Form in which a parameter, or several linear layers with shared inputs, is contracted.

    Attributes:
        names: the parameters.
        form: "A" (Gram matrices), "B" (materialised gradients), "matches" (embeddings), "tied"
            (embedding and head in one), "dense" (per-sample gradients).
        cost: counted operations and bytes of A and B; None for the other forms.
        positions: number of positions with a non-zero cotangent in each left sample; None for the
            other forms.
    """

    names: tuple[str, ...]
    form: str
    cost: Cost | None = None
    positions: int | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of a contraction.

    Attributes:
        form: form of linear layers; "auto" chooses the cheaper by counted operations and bytes.
        workspace: number of bytes for blocks of materialised gradients.
        dtype: dtype of the arithmetic, float64 or float32.
    """

    form: LinearForm
    workspace: int
    dtype: torch.dtype


def contract(
    left: Contributions, right: Contributions, is_symmetric: bool, settings: Settings
) -> Iterator[tuple[Choice, Tensor]]:
    """Yield (choice, K [C, N, C, M]) for each group of parameters; the sum of K is the kernel.

    Parameters with a contribution on one side only are skipped: their gradient on the other side
    is zero.
    """
    for names in _groups(left, right):
        lhs, rhs = _factors(left, names), _factors(right, names)
        if lhs and rhs:
            choice = _choose(names, lhs, rhs, is_symmetric, settings)
            yield choice, _contract_linear(choice.form, lhs, rhs, is_symmetric, settings)
        else:
            (name,) = names
            choice = Choice(names, _FORMS[type(left[name])])
            yield choice, _contract_single(left[name], right[name], is_symmetric, settings)


def plan(
    sample: Contributions,
    counts: tuple[int, int],
    num_outputs: int,
    is_symmetric: bool,
    settings: Settings,
) -> list[Choice]:
    """Return the choices of `contract` for blocks of ``counts`` (left, right) samples.

    Args:
        sample: contributions of a few samples, for their layout.
    """
    choices = []
    for names in _groups(sample, sample):
        factors = _factors(sample, names)
        choices.append(
            _choose(names, factors, factors, is_symmetric, settings, counts, num_outputs)
            if factors
            else Choice(names, _FORMS[type(sample[names[0]])])
        )
    return choices


# Type of the left contribution -> form, for a parameter contracted by itself. Factors occur here
# only if the right contribution is Tied.
_FORMS = {Matches: "matches", Tied: "tied", Dense: "dense", Factors: "tied"}


def _groups(left: Contributions, right: Contributions) -> list[tuple[str, ...]]:
    """Return the names of the parameters in groups: linear layers that share their inputs form one
    group, and every other parameter is a group of its own."""
    groups: dict[object, list[str]] = {}
    for name in filter(right.__contains__, left):
        sources = [getattr(side[name], "source", ()) for side in (left, right)]
        groups.setdefault(tuple(sources) if all(sources) else name, []).append(name)
    return [tuple(names) for names in groups.values()]


def _factors(side: Contributions, names: tuple[str, ...]) -> list[Factors]:
    return [term for name in names if isinstance(term := side[name], Factors)]


def _choose(
    names: tuple[str, ...],
    lhs: list[Factors],
    rhs: list[Factors],
    is_symmetric: bool,
    settings: Settings,
    counts: tuple[int, int] | None = None,
    num_outputs: int | None = None,
) -> Choice:
    left, right = lhs[0], rhs[0]
    left_count, right_count = counts or (left.inputs.shape[0], right.inputs.shape[0])
    size = Size(
        samples=left_count,
        positions=left.inputs.shape[1],
        other_samples=right_count,
        other_positions=right.inputs.shape[1],
        outputs=num_outputs or left.cotangents.shape[0],
        inputs=left.inputs.shape[2],
        cotangents=sum(factors.cotangents.shape[-1] for factors in lhs),
        is_symmetric=is_symmetric,
        bytes_per_number=settings.dtype.itemsize,
    )
    cost = count_cost(size)
    form = cost.form if settings.form == "auto" else settings.form
    return Choice(names, form, cost, size.positions)


def _contract_linear(
    form: str, lhs: list[Factors], rhs: list[Factors], is_symmetric: bool, settings: Settings
) -> Tensor:
    """Return K, [C, N, C, M], of layers that share their inputs.

    Operands are converted to the kernel's dtype if their dtypes differ, or if the kernel is float64
    and they are not.
    """
    sides = [
        [layers[0].inputs, *(layer.cotangents for layer in layers)]
        for layers in ([lhs] if is_symmetric else [lhs, rhs])
    ]
    dtypes = {operand.dtype for side in sides for operand in side}
    if len(dtypes) > 1 or (settings.dtype == torch.float64 and dtypes != {torch.float64}):
        sides = [[operand.to(settings.dtype) for operand in side] for side in sides]
    inputs, *cotangents = sides[0]
    other_inputs, other_cotangents = (None, None) if is_symmetric else (sides[1][0], sides[1][1:])
    if form == "A":
        return ntk_gram(inputs, cotangents, other_inputs, other_cotangents)
    return ntk_materialised(
        inputs, cotangents, other_inputs, other_cotangents, workspace=settings.workspace
    )


def _contract_single(
    left: Contribution, right: Contribution, is_symmetric: bool, settings: Settings
) -> Tensor:
    """Return K, [C, N, C, M], of a parameter with contributions other than `Factors`."""
    if isinstance(left, Dense) and isinstance(right, Dense):
        x, y = (part.gradients.to(settings.dtype) for part in (left, right))
        return torch.tensordot(x, y, dims=([2], [2]))
    terms = (
        _contract_pair(x, y, is_symmetric and x is y, settings)
        for x in _uses(left)
        for y in _uses(right)
    )
    return reduce(torch.add, terms)


def _uses(contribution: Contribution) -> list[Factors | Matches]:
    """Return one contribution for each use of a parameter; a tied parameter has two (embedding and
    head)."""
    if isinstance(contribution, Tied):
        return [contribution.factors, contribution.matches]
    if isinstance(contribution, Dense):
        raise RuntimeError(
            "a parameter is used in different ways on the two sides; method='per_sample' takes "
            "exact gradients sample by sample"
        )
    return [contribution]


def _contract_pair(
    left: Factors | Matches, right: Factors | Matches, is_symmetric: bool, settings: Settings
) -> Tensor:
    if isinstance(left, Matches):
        if isinstance(right, Matches):
            return _contract_embeddings(left, right, settings)
        return _contract_tied(left, right, settings)
    if isinstance(right, Matches):
        return _contract_tied(right, left, settings).permute(2, 3, 0, 1)
    form = _choose((), [left], [right], is_symmetric, settings).form
    return _contract_linear(form, [left], [right], is_symmetric, settings)


# ---- embeddings ------------------------------------------------------------------------------
#
# Only entries with equal ids contribute, so that the kernel is a sum of small products over shared
# ids,
#
#     K[c, n, c', m] = Σ_v g_{n,c,v} · g_{m,c',v}
#
# Ids that occur in equally many samples are contracted together, in one batched product.


def _contract_embeddings(left: Matches, right: Matches, settings: Settings) -> Tensor:
    """Return K, [C, N, C, M], of an embedding."""
    dtype, num_outputs = settings.dtype, left.gradients.shape[0]
    shape = (num_outputs, left.count, num_outputs, right.count)
    kernel = left.gradients.new_zeros(shape, dtype=dtype)
    for rows, columns in _shared_ids(left.ids, right.ids):
        numbers_per_id = (rows.shape[1] + columns.shape[1]) * num_outputs * left.gradients.shape[-1]
        step = max(1, settings.workspace // max(1, numbers_per_id * dtype.itemsize))
        for row_chunk, column_chunk in zip(rows.split(step), columns.split(step), strict=True):
            _add_group(kernel, left, right, row_chunk, column_chunk)
    return kernel


def _shared_ids(left_ids: Tensor, right_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of index tensors ([g, k], [g, k']), each for g ids with k entries on the left
    and k' entries on the right."""
    order, ids, counts = _sort_ids(left_ids)
    other_order, other_ids, other_counts = _sort_ids(right_ids)
    starts, other_starts = counts.cumsum(0) - counts, other_counts.cumsum(0) - other_counts
    if not len(other_ids):
        return []
    index = torch.searchsorted(other_ids, ids).clamp(max=len(other_ids) - 1)
    is_shared = other_ids[index] == ids
    # The index of each shared id on each side.
    left, right = is_shared.nonzero()[:, 0], index[is_shared]
    if not len(left):
        return []
    count_pairs, count_pair_of = torch.unique(
        torch.stack([counts[left], other_counts[right]], 1), dim=0, return_inverse=True
    )
    groups = []
    for i, (k, other_k) in enumerate(count_pairs.tolist()):
        mask = count_pair_of == i
        rows = starts[left[mask]][:, None] + torch.arange(k, device=ids.device)
        columns = other_starts[right[mask]][:, None] + torch.arange(other_k, device=ids.device)
        groups.append((order[rows], other_order[columns]))
    return groups


def _sort_ids(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = ids.argsort(stable=True)
    unique, counts = torch.unique_consecutive(ids[order], return_counts=True)
    return order, unique, counts


def _add_group(
    kernel: Tensor, left: Matches, right: Matches, rows: Tensor, columns: Tensor
) -> None:
    """Add the products of g shared ids to the kernel [C, N, C, M].

    Args:
        rows, columns: indices of the ids' entries in ``left``, [g, k], and in ``right``, [g, k'].
    """
    x, y = (  # [g, C k, d]
        side.gradients[:, entries].to(kernel.dtype).transpose(0, 1).flatten(1, 2)
        for side, entries in ((left, rows), (right, columns))
    )
    products = torch.bmm(x, y.transpose(1, 2))  # [g, C k, C k']
    num_outputs, count, _, other_count = kernel.shape
    output = torch.arange(num_outputs, device=rows.device)[:, None]
    i = (output * count + left.samples[rows][:, None]).flatten(1)  # [g, C k]
    j = (output * other_count + right.samples[columns][:, None]).flatten(1)
    entries = i[:, :, None] * (num_outputs * other_count) + j[:, None, :]
    kernel.view(-1).index_add_(0, entries.flatten(), products.flatten())


def _contract_tied(matches: Matches, factors: Factors, settings: Settings) -> Tensor:
    """Return K of an embedding on the left and a linear layer with the same weight on the right.

    K[c, n, c', m] = Σ_{v, t} (g_{n,c,v} · a_{m,t}) δ_{m,c',t,v}
    """
    dtype = settings.dtype
    out_dim, num_entries, _ = matches.gradients.shape
    other_count, num_positions = factors.inputs.shape[:2]
    kernel = matches.gradients.new_zeros(out_dim, matches.count, out_dim, other_count, dtype=dtype)
    per_entry = 2 * out_dim * other_count * num_positions * dtype.itemsize
    step = max(1, settings.workspace // max(1, per_entry))
    for start in range(0, num_entries, step):
        rows = slice(start, start + step)
        g = matches.gradients[:, rows].to(dtype)
        cotangents = factors.cotangents[..., matches.ids[rows]].to(dtype)
        inner = torch.einsum("cud,mtd->umct", g, factors.inputs.to(dtype))
        products = torch.einsum("umct,emtu->cuem", inner, cotangents)
        kernel.index_add_(1, matches.samples[rows], products)
    return kernel
