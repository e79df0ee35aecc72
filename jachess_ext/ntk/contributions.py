"""What one parameter contributes to every per-sample gradient, without the gradients themselves.

G_{n,c} = ∂f_{n,c}/∂θ of one parameter θ is held as

    Factors   G_{n,c} = Σ_t δ_{n,c,t} a_{n,t}ᵀ            linear layers
    Matches   row v of G_{n,c} is g_{n,c,v}, few v a sample    embeddings, heads read at labels
    Dense     G_{n,c} itself                                 biases, norm weights, the rest
    Tied      Factors + Matches                              output head tied to the embedding

``materialise`` gives G, [C, n, numel]; ``nbytes(C)`` the memory it would take with C outputs.

Here n numbers samples, c outputs, t positions (tokens, in every call of the layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

_WORTH_GATHERING = 0.9  # fewer positions kept than this share are gathered


@dataclass(frozen=True)
class Factors:
    """Inputs and output cotangents of a linear layer.

    Attributes:
        inputs: a, [n, t, d_in].
        cotangents: δ, [C, n, t, d_out].
        transposed: the parameter is [d_in, d_out] (GPT-2's Conv1D), not [d_out, d_in].
        source: identifies the input tensor; layers that share it share its Gram matrix.
    """

    inputs: Tensor
    cotangents: Tensor
    transposed: bool = False
    source: tuple[int, ...] = ()

    def materialise(self, shape: torch.Size) -> Tensor:
        if self.transposed:
            return torch.einsum("ntk,cntr->cnkr", self.inputs, self.cotangents).flatten(2)
        return torch.einsum("cntr,ntk->cnrk", self.cotangents, self.inputs).flatten(2)

    def nbytes(self, outputs: int) -> int:
        return _nbytes(self.inputs) + _nbytes(self.cotangents[0]) * outputs


@dataclass(frozen=True)
class Matches:
    """Gradients of an embedding's rows, one entry for every (sample, id) that occurs.

    Attributes:
        samples, ids: [U], which row of θ in which sample; pairs are unique and sorted.
        gradients: g, [C, U, d].
        count: the number of samples n.
    """

    samples: Tensor
    ids: Tensor
    gradients: Tensor
    count: int

    def materialise(self, shape: torch.Size) -> Tensor:
        outputs = self.gradients.shape[0]
        width = self.gradients.shape[-1]  # 1 for a parameter that is a vector
        full = self.gradients.new_zeros(outputs, self.count, shape[0], width)
        full[:, self.samples, self.ids] = self.gradients
        return full.flatten(2)

    def nbytes(self, outputs: int) -> int:
        return _nbytes(self.samples, self.ids) + _nbytes(self.gradients[0]) * outputs


@dataclass(frozen=True)
class Dense:
    """G itself, flattened: [C, n, numel]."""

    gradients: Tensor

    def materialise(self, shape: torch.Size) -> Tensor:
        return self.gradients

    def nbytes(self, outputs: int) -> int:
        return _nbytes(self.gradients[0]) * outputs


@dataclass(frozen=True)
class Tied:
    """One parameter used as a linear layer's weight and as an embedding."""

    factors: Factors
    matches: Matches

    def materialise(self, shape: torch.Size) -> Tensor:
        return self.factors.materialise(shape) + self.matches.materialise(shape)

    def nbytes(self, outputs: int) -> int:
        return self.factors.nbytes(outputs) + self.matches.nbytes(outputs)


Contribution = Factors | Matches | Dense | Tied


def make_factors(
    inputs: Tensor, cotangents: Tensor, *, transposed: bool = False, source: tuple[int, ...] = ()
) -> Factors:
    """Factors of one call, positions with a zero cotangent left out.

    Padding and everything a classifier does not read (all but the first token of the last block)
    has δ = 0 exactly; each sample keeps its own positions, filled up with zeros to the longest.
    """
    # One feature tells where some sample has no position of zeros alone: nothing can be left out.
    first = cotangents[..., 0].ne(0).any(0)  # [n, t]
    if first.numel() and bool(first.all(1).any()):
        return Factors(inputs, cotangents, transposed, source)
    used = cotangents.ne(0).any(-1).any(0)  # [n, t]
    longest = int(used.sum(1).max()) if used.numel() else 0
    if longest > _WORTH_GATHERING * used.shape[1]:
        return Factors(inputs, cotangents, transposed, source)
    kept = used.int().argsort(dim=1, descending=True, stable=True)[:, :longest]  # used ones first
    place = kept[..., None].expand(-1, -1, inputs.shape[-1])
    inputs = inputs.gather(1, place)
    place = kept[None, ..., None].expand(cotangents.shape[0], -1, -1, cotangents.shape[-1])
    where = tuple(kept.flatten().tolist()) if source else ()
    return Factors(inputs, cotangents.gather(2, place), transposed, (*source, *where))


def make_matches(ids: Tensor, cotangents: Tensor, keep: Tensor, rows: int) -> Matches:
    """Matches of one call: cotangents of equal ids within a sample are summed.

    Args:
        ids: [n, t].
        cotangents: [C, n, t, d].
        keep: [n, t]; false where the embedding passes no gradient (its padding_idx).
        rows: of the embedding's weight.
    """
    keep = keep & cotangents.ne(0).any(-1).any(0)
    sample = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
    return _summed_matches(sample[keep], ids[keep], cotangents[:, keep], ids.shape[0], rows)


def _summed_matches(
    samples: Tensor, ids: Tensor, gradients: Tensor, count: int, rows: int
) -> Matches:
    keys, place = torch.unique(samples * rows + ids, return_inverse=True)
    summed = gradients.new_zeros(gradients.shape[0], len(keys), gradients.shape[-1])
    summed.index_add_(1, place, gradients)
    return Matches(keys // rows, keys % rows, summed, count)


def add_up(parts: Sequence[Contribution], shape: torch.Size) -> Contribution:
    """One contribution for a parameter that is used in several calls (G is their sum).

    Args:
        parts: at least one.
        shape: the parameter's.
    """
    factors = [part for part in parts if isinstance(part, Factors)]
    matches = [part for part in parts if isinstance(part, Matches)]
    one_way = len({part.transposed for part in factors}) <= 1
    if len(parts) == 1:
        return parts[0]
    if len(factors) == len(parts) and one_way:
        return _chain(factors)
    if len(matches) == len(parts):
        return _merge(matches, shape[0])
    plain = one_way and not (factors and factors[0].transposed)
    if plain and len(factors) + len(matches) == len(parts):
        return Tied(_chain(factors), _merge(matches, shape[0]))
    return Dense(reduce(torch.add, (part.materialise(shape) for part in parts)))


def _chain(parts: list[Factors]) -> Factors:
    """Several calls of one layer are one call over all their positions."""
    if len(parts) == 1:
        return parts[0]
    return Factors(
        torch.cat([part.inputs for part in parts], 1),
        torch.cat([part.cotangents for part in parts], 2),
        parts[0].transposed,
    )


def _merge(parts: list[Matches], rows: int) -> Matches:
    if len(parts) == 1:
        return parts[0]
    return _summed_matches(
        torch.cat([part.samples for part in parts]),
        torch.cat([part.ids for part in parts]),
        torch.cat([part.gradients for part in parts], 1),
        parts[0].count,
        rows,
    )


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
