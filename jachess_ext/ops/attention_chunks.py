"""Attention's jets by large matrix products, over chunks of queries and heads.

Each stream of the scores is one product of concatenated operands, [q_12 q_1 q_2 q_0] times
[k_0 k_2 k_1 k_12]. Each stream of the weights, and of the scores' gradients, is multiplied once, by
the concatenation of all streams that it is paired with. No product of the jet is computed twice:
for 2, 3 and 4 streams there are 3, 5 and 9 times as many as in plain attention. A chunk has a
bounded number of scores, so that memory is linear in T and Tk. Sums are accumulated in float32, or
float64.

`attention_jet_composite` computes weights and gradients with the softmax's operator, on any device
and for any jet; `attention_jet_hybrid` runs the CUDA kernels' forward, and in its backward a kernel
that computes weights and gradients. Their second derivatives are those of the reference, which
builds T × Tk tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .attention_reference import (
    Call,
    ScoreBlock,
    Softmax,
    check_settings,
    dropout_factor,
    mask_scores,
    softcap_gradient,
    softcap_jet,
    weights,
)
from .library import (
    CUDA_DIRECTIONS,
    IN_PASSES,
    MAX_DIRECTIONS,
    OPS,
    Streams,
    available,
    check_shape,
    wide_dtype,
)
from .softmax import softmax_jet_reference, softmax_stack_gradient

COMPOSITE_SCORES = 2**21
"""Largest number of scores of all streams in a chunk of the composite on a CPU, so that they fit
its caches.  On other devices, where a chunk takes tens of launches, it has 16 times as many."""
HYBRID_SCORES = 2**25
"""Largest number of scores of all streams in a chunk of the hybrid, in 16 bits."""

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


# ---- chunks --------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Some rows of queries, of all query heads of some key heads, and the keys from the first to
    the last that these queries see.

    In folded tensors, batch entries and key heads form one dimension n, and the queries of the
    heads that share a key head are stacked as rows: [S, n, group · rows, D] for queries,
    [S, n, keys, D] for keys.

    Attributes:
        group: number of query heads that share a key head.
        keys: number of keys.
    """

    batch: slice
    key_heads: slice
    group: int
    rows: slice
    keys: int

    @property
    def heads(self) -> slice:
        """Return the slice of query heads."""
        return slice(self.key_heads.start * self.group, self.key_heads.stop * self.group)

    def slice_rows(self, x: Tensor) -> Tensor:
        """Return the chunk's view [S, B', H', rows, D] of a tensor [S, B, H, T, D]."""
        return x[:, self.batch, self.heads, self.rows]

    def fold_queries(self, x: Tensor) -> Tensor:
        """Return the chunk's folded queries, [S, n, group · rows, D], of [S, B, H, T, D]."""
        return self.slice_rows(x).unflatten(2, (-1, self.group)).flatten(3, 4).flatten(1, 2)

    def fold_keys(self, x: Tensor) -> Tensor:
        """Return the chunk's folded keys, [S, n, keys, D], of [S, B, Hk, Tk, D]."""
        return x[:, self.batch, self.key_heads, : self.keys].flatten(1, 2)

    def block(self, call: Call) -> ScoreBlock:
        """Return the chunk's block of scores."""
        _, batch, heads, tokens = call.query.shape[:4]
        device, mask = call.query.device, call.mask
        if mask is not None:
            mask = mask.expand(batch, heads, tokens, call.key.shape[3])
            mask = mask[self.batch, self.heads, self.rows, : self.keys]
        number = torch.arange(batch * heads, device=device).view(batch, heads)
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        return ScoreBlock(number[self.batch, self.heads], rows, self.keys, mask)


def chunks(call: Call, scores: int) -> Iterator[Chunk]:
    """Yield chunks of at most ``scores`` scores of all streams, but at least one row of a group.

    A chunk grows first to more rows, then to more heads of one batch entry, then to more batch
    entries.
    """
    streams, batch, heads, tokens = call.query.shape[:4]
    key_heads, keys = call.key.shape[2:4]
    group = heads // max(key_heads, 1)
    free = scores // max(streams * group * keys, 1)
    rows = max(min(free, tokens), 1)
    rows -= rows % 64 if 64 < rows < tokens else 0  # whole tiles of a matrix product
    step_of_heads = max(min(free // rows, key_heads), 1)
    step = max(min(free // (rows * step_of_heads), batch), 1) if step_of_heads == key_heads else 1
    right = 0 if call.settings.causal else call.settings.right
    for b in range(0, batch, step):
        for h in range(0, key_heads, step_of_heads):
            for r in range(0, tokens, rows):
                end = min(r + rows, tokens)
                yield Chunk(
                    slice(b, min(b + step, batch)),
                    slice(h, min(h + step_of_heads, key_heads)),
                    group,
                    slice(r, end),
                    keys if right < 0 else min(keys, end + right),
                )


ComputeChunk: TypeAlias = Callable[[Chunk], tuple[Tensor, ...]]
"""A function from a chunk to its weights and the gradients of q kᵀ, both
[S, n, group · rows, keys]."""


# ---- products ------------------------------------------------------------------------------


class Term(NamedTuple):
    """A term of the jet of a product: factor · (stream a)(stream b), added to stream s.

    Attributes:
        streams: (s, a, b).
    """

    streams: tuple[int, int, int]
    factor: int = 1


def _terms(streams: Streams) -> list[Term]:
    """Return all terms of the jet of a product."""
    terms = [Term((0, 0, 0))]
    for s in range(1, streams.streams):
        terms += [Term((s, s, 0)), Term((s, 0, s))]
    for i, j, s in streams.terms():
        terms += [Term((s, i, j), 2)] if i == j else [Term((s, i, j)), Term((s, j, i))]
    return terms


def multiply(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 0.0, alpha: float = 1.0) -> None:
    """Compute out = beta · out + alpha · a b in place, for batches of matrices, accumulating in
    out's dtype."""
    if a.is_cuda and a.dtype == b.dtype != out.dtype:
        torch.baddbmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        wide = (x.to(out.dtype) for x in (a, b))
        torch.baddbmm(out, *wide, beta=beta, alpha=alpha, out=out)


def _side_by_side(x: Tensor, terms: Sequence[tuple[int, int]]) -> Tensor:
    """Return streams of x, [S, ..., D], concatenated along the last dimension, [..., N · D].

    Args:
        terms: N pairs (stream, factor by which it is multiplied).
    """
    return torch.cat([x[s] if factor == 1 else factor * x[s] for s, factor in terms], -1)


def _outer_jet(
    x: Tensor, y: Tensor, streams: Streams, factor_order: tuple[int, int, int], alpha: float
) -> Tensor:
    """Return the jet of alpha · x yᵀ, [S, n, rows, keys], with one product of concatenated operands
    for each stream.

    Args:
        x, y: [S, n, rows, D] and [S, n, keys, D].
        factor_order: positions in `Term.streams` of the result, of x and of y.
    """
    target, left, right = factor_order
    result = x.new_empty(*x.shape[:3], y.shape[2], dtype=wide_dtype(x.dtype))
    for s in range(streams.streams):
        terms = [term for term in _terms(streams) if term.streams[target] == s]
        left_side = _side_by_side(x, [(term.streams[left], term.factor) for term in terms])
        right_side = _side_by_side(y, [(term.streams[right], 1) for term in terms])
        multiply(result[s], left_side, right_side.mT, alpha=alpha)
    return result


class StreamProducts:
    """Products of weights (or of scores' gradients) and the streams of an operand.

    They are added to sums [n, rows, S · D], whose S blocks of D columns are the streams of the
    result.  Adjacent blocks to which one stream of weights adds (a run) take one product.

    Args:
        factor_order: positions in `Term.streams` of the weights, the operand and the result.

    Attributes:
        columns: for each stream of the result, the index of its block in the sums.
        runs: (stream of the weights, first block, (stream, factor) of the operand for each block).
    """

    def __init__(self, streams: Streams, factor_order: tuple[int, int, int]) -> None:
        left, right, target = factor_order
        count = streams.streams
        # The stream that all products add to has the second block, so that runs are long: it is
        # stream 0 of a gradient, and the last stream of a result.
        common = 0 if target else count - 1
        order = [s for s in (*range(1, count), 0) if s != common]
        order.insert(1, common)
        self.columns = [order.index(s) for s in range(count)]
        self.runs: list[tuple[int, int, list[tuple[int, int]]]] = []
        for stream in range(count):
            terms = [term for term in _terms(streams) if term.streams[left] == stream]
            factors = {self.columns[t.streams[target]]: (t.streams[right], t.factor) for t in terms}
            end = -1
            for column, factor in sorted(factors.items()):
                if column != end:
                    self.runs.append((stream, column, []))
                self.runs[-1][2].append(factor)
                end = column + 1

    def add(self, sums: Tensor, left: Tensor, x: Tensor) -> None:
        """Add the products of weights ``left``, [S, n, rows, ·], with x, [S, n, ·, D], to sums."""
        size = x.shape[-1]
        for stream, column, factors in self.runs:
            target = sums[..., column * size : (column + len(factors)) * size]
            multiply(target, left[stream], _side_by_side(x, factors), beta=1.0)

    def streams(self, sums: Tensor) -> Tensor:
        """Return the sums [..., S · D] as a stacked jet [S, ..., D]."""
        blocks = sums.unflatten(-1, (len(self.columns), -1)).unbind(-2)
        return torch.stack([blocks[column] for column in self.columns])


# ---- forward and backward ------------------------------------------------------------------


def empty_by_token(x: Tensor, heads: int, tokens: int, size: int) -> Tensor:
    """Return an empty tensor [S, B, heads, tokens, size], laid out in memory as
    [S, B, tokens, heads, size]."""
    return x.new_empty(*x.shape[:2], tokens, heads, size).transpose(2, 3)


def check_call(call: Call) -> None:
    """Raise ValueError for shapes that slicing or broadcasting would silently accept."""
    query, key, value = call[:3]
    check_settings(call.mask, call.settings)
    heads, key_heads = query.shape[2], key.shape[2]
    if heads % key_heads if key_heads else heads:
        raise ValueError(
            f"query has {heads} heads and key {key_heads}; expected a multiple, so that each key "
            "head serves equally many query heads."
        )
    check_shape("key", key, (*query.shape[:2], *key.shape[2:4], query.shape[4]))
    check_shape("value", value, (*key.shape[:4], value.shape[4]))


def _narrow(weights: Tensor, query: Tensor) -> Tensor:
    """Return weights or gradients, [S, n, rows, keys], in bfloat16 if the jet is bfloat16.

    For float16 jets they stay in float32, as small gradients would be lost in float16.
    """
    return weights.to(query.dtype) if query.dtype == torch.bfloat16 else weights


def _as_scores(x: Tensor, block: ScoreBlock) -> Tensor:
    """Return scores [S, n, group · rows, keys] as [S, B', H', T', Tk']."""
    return x.view(len(x), *block.heads.shape, len(block.rows), block.keys)


def _has_softmax(call: Call) -> bool:
    """Return whether the softmax operator takes all directions of the scores in one call."""
    query, q, has_sum = call.query, call.settings.q, call.settings.summed > 0
    if query.device.type in IN_PASSES:
        is_one_call = q <= CUDA_DIRECTIONS
    else:
        is_one_call = q <= MAX_DIRECTIONS or has_sum or len(query) == 1 + q
    return is_one_call and available("softmax_jet", query.device, sums=has_sum)


def _softmax(call: Call) -> Softmax:
    return OPS.softmax_jet if _has_softmax(call) else softmax_jet_reference


def _scores(chunk: Chunk, call: Call) -> Tensor:
    """Return the jet of the scores scale · q kᵀ, [S, n, group · rows, keys]."""
    rows, keys = chunk.fold_queries(call.query), chunk.fold_keys(call.key)
    return _outer_jet(rows, keys, call.streams, (0, 1, 2), call.settings.scale)


def _most_scores(call: Call) -> int:
    return COMPOSITE_SCORES * (1 if call.query.device.type == "cpu" else 16)


def composite_forward(call: Call) -> Tensor:
    """Return `attention_jet` of the arguments in ``call``, chunk by chunk."""
    check_call(call)
    query, value = call.query, call.value
    products = StreamProducts(call.streams, (1, 2, 0))
    y = empty_by_token(query, query.shape[2], query.shape[3], value.shape[4])
    for chunk in chunks(call, _most_scores(call)):
        s, block = _scores(chunk, call), chunk.block(call)
        p = weights(_as_scores(s, block), block, call, _softmax(call)).view_as(s)
        sums = p.new_zeros(*p.shape[1:3], len(y) * y.shape[4])
        products.add(sums, _narrow(p, query), chunk.fold_keys(value))
        target = chunk.slice_rows(y)
        target.copy_(products.streams(sums).view(target.shape))
    return y


def _weights_and_gradient(
    s: Tensor, gp: Tensor, block: ScoreBlock, call: Call
) -> tuple[Tensor, Tensor]:
    """Return the jet of the weights and the gradient of s; s may be overwritten.

    Args:
        s: jet of scale · q kᵀ, [S, B', H', T', Tk'].
        gp: gradient of the weights' jet, [S, B', H', T', Tk'].
    """
    settings, streams = call.settings, call.streams
    capped = softcap_jet(s, settings.softcap, streams) if settings.softcap else s
    capped[0] = mask_scores(capped[0], block, settings)
    arguments = (capped, settings.q, True, settings.summed)
    p = _softmax(call)(*arguments)
    factor = dropout_factor(block, call, p.dtype)
    if factor is not None:
        p, gp = p * factor, gp * factor
    if _has_softmax(call):
        gs = OPS.softmax_jet_backward(gp, *arguments)
    else:
        gs = softmax_stack_gradient(gp, capped, streams)
    return p, softcap_gradient(gs, s, settings.softcap, streams) if settings.softcap else gs


def composite_backward(gy: Tensor, call: Call) -> Gradients:
    """Return the gradients of query, key and value from the result's gradient gy; the weights are
    recomputed."""
    check_call(call)

    def compute(chunk: Chunk) -> tuple[Tensor, ...]:
        s, block = _scores(chunk, call), chunk.block(call)
        rows, keys = chunk.fold_queries(gy), chunk.fold_keys(call.value)
        gp = _as_scores(_outer_jet(rows, keys, call.streams, (1, 0, 2), 1.0), block)
        p, gs = _weights_and_gradient(_as_scores(s, block), gp, block, call)
        return tuple(_narrow(x, call.query).view_as(s) for x in (p, call.settings.scale * gs))

    return _gradients(compute, gy, call, _most_scores(call))


ComputeScores: TypeAlias = Callable[[int, int, int, int, int], tuple[Tensor, Tensor]]
"""From the first head b · H + h and the number of heads, the first row and the number of rows, and
the number of keys to the weights and the gradients of q kᵀ, [S, heads, rows, keys] each."""


def backward_from_scores(scores: ComputeScores, gy: Tensor, call: Call) -> Gradients:
    """Return the gradients of query, key and value from each chunk's weights and scores' gradients,
    which a kernel computes."""

    def compute(chunk: Chunk) -> tuple[Tensor, ...]:
        batch, heads, rows = chunk.batch, chunk.heads, chunk.rows
        count = (batch.stop - batch.start) * (heads.stop - heads.start)
        first = batch.start * call.query.shape[2] + heads.start
        p_and_gradient = scores(first, count, rows.start, rows.stop - rows.start, chunk.keys)
        return tuple(x.unflatten(1, (-1, chunk.group)).flatten(2, 3) for x in p_and_gradient)

    return _gradients(compute, gy, call, HYBRID_SCORES)


def hybrid_backward(gy: Tensor, call: Call, y: Tensor, statistics: Tensor) -> Gradients:
    """Return the gradients of query, key and value from the result's gradient gy.

    Args:
        y, statistics: the two results of the CUDA forward.
    """
    delta = OPS.attention_jet_delta(gy, y, call.settings.q)
    arguments = (gy, *call[:5], statistics, delta, *call.settings)
    return backward_from_scores(partial(OPS.attention_jet_scores, *arguments), gy, call)


def _gradients(compute: ComputeChunk, gy: Tensor, call: Call, scores: int) -> Gradients:
    """Return the gradients of query, key and value from each chunk's weights and gradients."""
    query, key, value = call[:3]
    orders = ((0, 2, 1), (0, 1, 2), (1, 0, 2))
    query_products, key_products, value_products = (StreamProducts(call.streams, o) for o in orders)
    wide = wide_dtype(query.dtype)
    gquery, gkey, gvalue = (empty_by_token(x, *x.shape[2:5]) for x in (query, key, value))
    sums = [x.new_zeros(*x.shape[1:4], len(x) * x.shape[4], dtype=wide) for x in (key, value)]
    for chunk in chunks(call, scores):
        p, gs = compute(chunk)
        # Products are added to these views; `flatten` could return copies.
        chunk_sums = [
            x[chunk.batch, chunk.key_heads, : chunk.keys].view(p.shape[1], chunk.keys, x.shape[3])
            for x in sums
        ]
        key_products.add(chunk_sums[0], gs.mT, chunk.fold_queries(query))
        value_products.add(chunk_sums[1], p.mT, chunk.fold_queries(gy))
        rows = gs.new_zeros(*gs.shape[1:3], len(query) * query.shape[4], dtype=wide)
        query_products.add(rows, gs, chunk.fold_keys(key))
        target = chunk.slice_rows(gquery)
        target.copy_(query_products.streams(rows).view(target.shape))
    gkey.copy_(key_products.streams(sums[0]))
    gvalue.copy_(value_products.streams(sums[1]))
    return gquery, gkey, gvalue
