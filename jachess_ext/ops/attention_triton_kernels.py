"""Triton's kernels for attention on jets: a value and its tangent (streams 0 and 1), forward and
backward; in the forward also a second direction (2), and a stream of second order (the last).

    s = scale · q kᵀ;  softcap · tanh(s / softcap);  + mask;  p = softmax(s);  y = p v

`forward` computes y and the jet of log Σ exp(s), from which the backward computes the weights anew:

    gs₁ = p₀ G₁,  gs₀ = p₀ G₀ + p₁ G₁,  G₀ = g₀ v₀ᵀ + g₁ v₁ᵀ − δ₀,  G₁ = g₁ v₀ᵀ − δ₁
    δ₀ = Σ_d g₀ y₀ + g₁ y₁,  δ₁ = Σ_d g₁ y₀

A program of `forward` and `query_gradient` has a tile of queries of one head and goes over the keys
that they see; one of `key_gradient` has a tile of keys and goes over the queries of all heads that
share it.  Tiles in which every query sees every key skip the mask.

What the kernels take:
    q, k, v, y, gy: [S, B, H, T, D] and alike, pointers; what is read, with `plan.descriptors`
        tensor descriptors.
    mask: [B, H, T, Tk], bytes (not 0: visible) or numbers to be added.
    statistics, delta: [S, B, H, T] float32, contiguous.
    seed: a pointer to dropout's int64.
    strides: of each tensor (stream, batch, head, token), of the mask (batch, head, query, key).
    sizes: (B · H, H, query heads that share a key head, T, Tk).
    numbers: (scale, softcap, the least word of 24 bits that dropout keeps, the weight it gets).
    P: a `Plan`.

What the functions below them share: operand, (tensor, its strides); call, (mask and its strides,
dropout's seed, sizes, numbers); origin, (b, h, the first row of the program's tile).  Streams are a
list, which Triton compiles as a tuple.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
DROPOUT_COUNTER = tl.constexpr(0x4A414354)  # as in attention_reference.py
NO_MASK, BYTES, NUMBERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for.

    Attributes:
        rows, keys: queries and keys of a tile.
        size, value_size: D and Dv.
        mask: 0 for none, 1 for bytes, 2 for numbers.
        left, right: the window, −1 for no limit; right is 0 for causal attention.
        softcap, dropout: whether there is one.
        descriptors: whether tiles are loaded by tensor descriptors.
        scale_first: whether scores are scaled before their maximum is taken (a scale ≤ 0).
        streams: S; 4 for two directions and their pair.
        square: whether the last stream is of the first direction's square.
        stages: tiles that are in flight at once.
    """

    rows: int
    keys: int
    size: int
    value_size: int
    mask: int = 0
    left: int = -1
    right: int = -1
    softcap: bool = False
    dropout: bool = False
    descriptors: bool = False
    scale_first: bool = False
    streams: int = 2
    square: bool = False
    stages: int = 2

    @property
    def value(self) -> Plan:
        """Return the plan: `P.value` is it in compiled kernels and in Triton's interpreter."""
        return self

    @property
    def first_order(self) -> int:
        """Return the number of streams but that of second order."""
        return self.streams - (self.streams == 4 or self.square)


# ---- tiles -----------------------------------------------------------------------------------


@triton.jit
def addresses(operand, b, h, first, count, N: tl.constexpr, D: tl.constexpr):
    """Return where stream 0 of rows [N, width] of a head is, and which are of `count` rows of D
    numbers."""
    x, strides = operand
    W: tl.constexpr = max(16, triton.next_power_of_2(D))
    rows, columns = (first + tl.arange(0, N))[:, None], tl.arange(0, W)[None, :]
    x += b.to(tl.int64) * strides[1] + h.to(tl.int64) * strides[2]
    inside = rows < count
    if W != D:
        inside = inside & (columns < D)
    return x + rows.to(tl.int64) * strides[3] + columns, inside


@triton.jit
def load(operand, b, h, first, count, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Return the streams of rows [N, width] of a head, zeros beyond `count` rows of D numbers."""
    x, strides = operand
    S: tl.constexpr = P.value.streams
    W: tl.constexpr = max(16, triton.next_power_of_2(D))
    streams = []
    if P.value.descriptors:
        for i in tl.static_range(S):
            streams += [tl.reshape(x.load([i, b, h, first, 0]), [N, W])]
    else:
        base, inside = addresses(operand, b, h, first, count, N, D)
        for i in tl.static_range(S):
            streams += [tl.load(base + i * tl.cast(strides[0], tl.int64), mask=inside, other=0.0)]
    return streams


@triton.jit
def store(operand, origin, count, streams, D: tl.constexpr):
    """Store the streams of rows [N, width] of a head."""
    x, strides = operand
    b, h, first = origin
    base, inside = addresses(operand, b, h, first, count, streams[0].shape[0], D)
    for i in tl.static_range(len(streams)):
        pointers = base + i * tl.cast(strides[0], tl.int64)
        tl.store(pointers, streams[i].to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(x, origin, sizes, N: tl.constexpr):
    """Return both streams [N] of rows of [2, B, H, T]."""
    b, h, first = origin
    rows = first + tl.arange(0, N)
    pointers = x + (b * sizes[1] + h).to(tl.int64) * sizes[3] + rows
    second = pointers + tl.cast(sizes[0], tl.int64) * sizes[3]
    inside = rows < sizes[3]
    return tl.load(pointers, mask=inside, other=0.0), tl.load(second, mask=inside, other=0.0)


@triton.jit
def store_numbers(x, origin, sizes, streams):
    """Store the streams [N] of rows of [S, B, H, T]."""
    b, h, first = origin
    rows = first + tl.arange(0, streams[0].shape[0])
    base = x + (b * sizes[1] + h).to(tl.int64) * sizes[3] + rows
    for i in tl.static_range(len(streams)):
        pointers = base + i * tl.cast(sizes[0], tl.int64) * sizes[3]
        tl.store(pointers, streams[i], mask=rows < sizes[3])


@triton.jit
def limits(first, N, T, TK, BEFORE: tl.constexpr, AFTER: tl.constexpr, STEP: tl.constexpr):
    """Return (lo, full_lo, full_hi, hi): rows [first, first + N) meet columns [lo, hi), and in
    the tiles of STEP columns in [full_lo, full_hi) every row meets every column.

    Row i of T meets columns i − BEFORE ≤ j ≤ i + AFTER of TK; −1 for no limit.
    """
    last = tl.minimum(first + N, T) - 1
    lo, hi = 0, TK
    full_lo, full_hi = 0, TK // STEP * STEP
    if BEFORE >= 0:
        lo = tl.maximum(first - BEFORE, 0) // STEP * STEP
        full_lo = tl.maximum(tl.cdiv(tl.maximum(last - BEFORE, 0), STEP) * STEP, lo)
    if AFTER >= 0:
        hi = tl.maximum(tl.minimum(TK, last + AFTER + 1), lo)
        full_hi = tl.minimum(full_hi, (first + AFTER + 1) // STEP * STEP)
    full_lo = tl.minimum(full_lo, tl.cdiv(hi, STEP) * STEP)
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


@triton.jit
def visible(call, b, h, rows, keys, P: tl.constexpr):
    """Return which scores take part, and what the mask adds to them.

    rows and keys: positions, [N, 1] and [1, M], or [1, N] and [M, 1].
    """
    masked, _, sizes, _ = call
    mask, strides = masked
    shown = (rows < sizes[3]) & (keys < sizes[4])
    if P.value.left >= 0:
        shown = shown & (keys >= rows - P.value.left)
    if P.value.right >= 0:
        shown = shown & (keys <= rows + P.value.right)
    offset = 0.0
    if P.value.mask > 0:
        mask += b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        pointers = mask + rows.to(tl.int64) * strides[2] + keys.to(tl.int64) * strides[3]
        if P.value.mask == 1:
            shown = (tl.load(pointers, mask=shown, other=0) != 0) & shown
        else:
            offset = tl.load(pointers, mask=shown, other=float("-inf")).to(tl.float32)
            shown = shown & (offset != float("-inf"))
    return shown, offset


@triton.jit
def dropout_factor(call, b, h, rows, first_key, M: tl.constexpr, P: tl.constexpr):
    """Return dropout's factors [N, M] of rows [N], from the words of attention_reference.py; 1
    without dropout."""
    if P.value.dropout:
        _, seed, sizes, numbers = call
        N: tl.constexpr = rows.shape[0]
        zero = tl.zeros([N, M // 4], tl.uint32)
        head, row = zero + (b * sizes[1] + h), zero + rows[:, None].to(tl.uint32)
        quad = zero + (first_key // 4 + tl.arange(0, M // 4))[None, :].to(tl.uint32)
        x, y, z, w = tl.philox(seed, head, row, quad, zero + DROPOUT_COUNTER)
        words = tl.reshape(tl.join(tl.join(x, z), tl.join(y, w)), [N, M])
        return tl.where((words >> 8) >= numbers[2], numbers[3], 0.0)
    else:
        return 1.0


@triton.jit
def soft_cap(s, softcap):
    """Return tanh(s / softcap) and its derivative in s / softcap."""
    t = 2.0 / (1.0 + tl.exp2(s * (-2.0 * LOG2E) / softcap)) - 1.0
    return t, 1.0 - t * t


@triton.jit
def cross_factors(x, P: tl.constexpr):
    """Return what streams 1 and 2 of y are multiplied by in the last stream of x y: x₂ and x₁ for a
    pair, 2 x₁ for a square, nothing in order one."""
    if P.value.square:
        return [(2.0 * x[1].to(tl.float32)).to(x[1].dtype)]
    elif P.value.streams == 4:
        return [x[2], x[1]]
    else:
        return []


@triton.jit
def quadratic(x, P: tl.constexpr):
    """Return x₁ x₂ for a pair, x₁² for a square."""
    return x[1] * x[1 if P.value.square else 2]


@triton.jit
def products(x, y, sums, P: tl.constexpr):
    """Return the streams of sums + x y."""
    S: tl.constexpr = P.value.streams
    factors = cross_factors(x, P)
    out = [tl.dot(x[0], y[0], sums[0])]
    for i in tl.static_range(1, S):
        z = tl.dot(x[i], y[0], tl.dot(x[0], y[i], sums[i]))
        if i >= P.value.first_order:
            for j in tl.static_range(len(factors)):
                z = tl.dot(factors[j], y[j + 1], z)
        out += [z]
    return out


@triton.jit
def scores(x, y, P: tl.constexpr):
    """Return the streams of x yᵀ."""
    zero = tl.zeros([x[0].shape[0], y[0].shape[0]], tl.float32)
    return products(x, [tl.trans(z) for z in y], [zero for z in y], P)


@triton.jit
def query_tile_origin(sizes, N: tl.constexpr):
    """Return (b, h, first row) of this program's tile of queries.

    A head's last rows, which see most keys where attention is causal, begin first."""
    tiles = tl.cdiv(sizes[3], N)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return head // sizes[1], head % sizes[1], (tiles - 1 - tile) * N


# ---- forward ---------------------------------------------------------------------------------


@triton.jit
def forward_tiles(sums, q, k, v, origin, lo, hi, call, P: tl.constexpr, MASKED: tl.constexpr):
    """Add the keys [lo, hi) to the sums of a tile of queries.

    sums: n, streams of Σ exp(s) v, centred; total, Σ exp(s); m, the largest score so far; c, the
    streams of log Σ exp(s) from 1 on: the means by which the others are centred, anew in each tile.
    Were they not, what the tangents share would cost bfloat16 its digits.
    """
    n, total, m, c = sums
    _, _, sizes, numbers = call
    b, h, first = origin
    key_head = h // sizes[2]
    scale, softcap = numbers[0], numbers[1]
    N: tl.constexpr = P.value.rows
    M: tl.constexpr = P.value.keys
    S: tl.constexpr = P.value.streams
    rows = first + tl.arange(0, N)
    for start in tl.range(lo, hi, M, num_stages=P.value.stages):
        s = scores(q, load(k, b, key_head, start, sizes[4], M, P.value.size, P), P)
        # stream 0 and the other streams are still to be multiplied by these
        value_scale, stream_scale = scale, scale
        if P.value.softcap:
            t, slope = soft_cap(s[0] * scale, softcap)
            if P.value.first_order < S:
                s = s[: S - 1] + [s[S - 1] - t * (2.0 * scale / softcap) * quadratic(s, P)]
            s = [softcap * t] + [x * (slope * scale) for x in s[1:]]
            value_scale, stream_scale = 1.0, 1.0
        elif P.value.mask == 2 or P.value.scale_first:
            s, value_scale = [s[0] * scale] + s[1:], 1.0
        if P.value.mask > 0 or MASKED:
            keys = start + tl.arange(0, M)
            shown, offset = visible(call, b, h, rows[:, None], keys[None, :], P)
            masked = tl.where(shown, s[0] + offset, float("-inf"))
            s = [masked] + [tl.where(shown, x, 0.0) for x in s[1:]]
        new_largest = tl.maximum(m, tl.max(s[0], 1) * (value_scale * LOG2E))
        base = new_largest
        if P.value.mask > 0 or MASKED:
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(m - base)
        e0 = tl.exp2(s[0] * (value_scale * LOG2E) - base[:, None])
        tile_total = tl.sum(e0, 1)
        old_total = total * shrink
        total = old_total + tile_total
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        n0 = n[0] * shrink[:, None]
        z, recentred, shifts, centres = [e0], [n0], [old_total], []
        for i in tl.static_range(1, S):
            if i < P.value.first_order:
                centre = (old_total * c[i - 1] + tl.sum(e0 * s[i], 1) * stream_scale) * inverse
                shift = centre - c[i - 1]
                z += [s[i] * stream_scale - centre[:, None]]
                recentred += [n[i] * shrink[:, None] - n0 * shift[:, None]]
                shifts += [shift]
            else:
                x = s[i] * stream_scale + quadratic(z, P)
                bend = quadratic(shifts, P)
                centre = (old_total * (c[i - 1] + bend) + tl.sum(e0 * x, 1)) * inverse
                z += [x - centre[:, None]]
                y = n[i] * shrink[:, None] - n0 * (centre - c[i - 1] + bend)[:, None]
                factors = cross_factors(shifts, P)
                for j in tl.static_range(len(factors)):
                    y -= factors[j][:, None] * recentred[j + 1]
                recentred += [y]
            centres += [centre]
        c, m = centres, new_largest
        factor = dropout_factor(call, b, h, rows, start, M, P)
        e = [e0 * factor] + [e0 * x * factor for x in z[1:]]
        values = load(v, b, key_head, start, sizes[4], M, P.value.value_size, P)
        p = [x.to(values[0].dtype) for x in e]
        n = products(p, values, recentred, P)
    return n, total, m, c


@triton.jit
def forward(q, k, v, mask, y, statistics, seed, strides, sizes, numbers, P: tl.constexpr):
    """Compute y, [S, B, H, T, Dv], and the jet of log Σ exp(s), [S, B, H, T].

    strides: of q, k, v, mask and y.  A query that sees no key gets zeros, and the jet (−inf, 0, …).
    """
    N: tl.constexpr = P.value.rows
    S: tl.constexpr = P.value.streams
    W: tl.constexpr = max(16, triton.next_power_of_2(P.value.value_size))
    _, _, _, T, TK = sizes
    origin = query_tile_origin(sizes, N)
    b, h, first = origin
    call = ((mask, strides[3]), tl.load(seed) if P.value.dropout else 0, sizes, numbers)
    keys, values = (k, strides[1]), (v, strides[2])
    queries = load((q, strides[0]), b, h, first, T, N, P.value.size, P)
    zeros, zero = tl.zeros([N, W], tl.float32), tl.zeros([N], tl.float32)
    sums = ([zeros] * S, zero, zero + float("-inf"), [zero] * (S - 1))
    lo, full_lo, full_hi, hi = limits(first, N, T, TK, P.value.left, P.value.right, P.value.keys)
    if P.value.left >= 0:
        sums = forward_tiles(sums, queries, keys, values, origin, lo, full_lo, call, P, True)
    sums = forward_tiles(sums, queries, keys, values, origin, full_lo, full_hi, call, P, False)
    n, total, m, c = forward_tiles(sums, queries, keys, values, origin, full_hi, hi, call, P, True)
    empty = total == 0.0
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    out = [x * inverse[:, None] for x in n]
    log_sum = tl.where(empty, float("-inf"), m / LOG2E + tl.log(tl.where(empty, 1.0, total)))
    store((y, strides[4]), origin, T, out, P.value.value_size)
    store_numbers(statistics, origin, sizes, [log_sum] + c)


# ---- backward --------------------------------------------------------------------------------


@triton.jit
def weights(s, logs, shown, offset, numbers, P: tl.constexpr, MASKED: tl.constexpr):
    """Return the weights' streams, from those of q kᵀ and of log Σ exp(s), and what the soft cap's
    gradient needs: the scaled tangent, tanh and its slope."""
    s0, s1 = s[0] * numbers[0], s[1] * numbers[0]
    z0, z1, t, slope = s0, s1, s0, s0
    if P.value.softcap:
        t, slope = soft_cap(s0, numbers[1])
        z0, z1 = numbers[1] * t, s1 * slope
    if P.value.mask == 2:
        z0 += offset
    p0, z1 = tl.exp2((z0 - logs[0]) * LOG2E), z1 - logs[1]
    if P.value.mask > 0 or MASKED:
        p0, z1 = tl.where(shown, p0, 0.0), tl.where(shown, z1, 0.0)
    return p0, p0 * z1, (s1, t, slope)


@triton.jit
def score_gradients(p0, p1, w, d, factor, cap, numbers, P: tl.constexpr):
    """Return the gradients of q kᵀ from w, those of the weights that dropout leaves."""
    G0, G1 = w[0] * factor - d[0], w[1] * factor - d[1]
    g0, g1 = p0 * G0 + p1 * G1, p0 * G1
    if P.value.softcap:
        s1, t, slope = cap
        g0 = g0 * slope - g1 * s1 * (2.0 * t * slope / numbers[1])
        g1 = g1 * slope
    return g0 * numbers[0], g1 * numbers[0]


@triton.jit
def weight_gradients(g, v):
    """Return both streams' gradients of the weights: g₀ v₀ᵀ + g₁ v₁ᵀ and g₁ v₀ᵀ."""
    v0 = tl.trans(v[0])
    return tl.dot(g[1], tl.trans(v[1]), tl.dot(g[0], v0)), tl.dot(g[1], v0)


@triton.jit
def load_queries(q, gy, statistics, delta, origin, sizes, P: tl.constexpr):
    """Return both streams of a tile of queries, of their cotangents, statistics and δ."""
    N: tl.constexpr = P.value.rows
    b, h, first = origin
    queries = load(q, b, h, first, sizes[3], N, P.value.size, P)
    cotangents = load(gy, b, h, first, sizes[3], N, P.value.value_size, P)
    logs = load_numbers(statistics, origin, sizes, N)
    return queries, cotangents, logs, load_numbers(delta, origin, sizes, N)


@triton.jit
def tile_gradients(q, g, logs, d, k, v, origin, start, call, P: tl.constexpr, MASKED: tl.constexpr):
    """Return both streams of a tile's weights, as dropout leaves them, of the gradients of its
    scores q kᵀ, and of its keys."""
    b, h, first = origin
    sizes = call[2]
    N: tl.constexpr = P.value.rows
    M: tl.constexpr = P.value.keys
    rows, keys = first + tl.arange(0, N), start + tl.arange(0, M)
    shown, offset = visible(call, b, h, rows[:, None], keys[None, :], P)
    x = load(k, b, h // sizes[2], start, sizes[4], M, P.value.size, P)
    values = load(v, b, h // sizes[2], start, sizes[4], M, P.value.value_size, P)
    columns = (logs[0][:, None], logs[1][:, None])
    p0, p1, cap = weights(scores(q, x, P), columns, shown, offset, call[3], P, MASKED)
    factor = dropout_factor(call, b, h, rows, start, M, P)
    deltas = (d[0][:, None], d[1][:, None])
    gs = score_gradients(p0, p1, weight_gradients(g, values), deltas, factor, cap, call[3], P)
    return (p0 * factor, p1 * factor), gs, x


@triton.jit
def query_tiles(
    a0, a1, q, g, logs, d, k, v, origin, lo, hi, call, P: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add the keys [lo, hi) to the gradient of a tile of queries."""
    for start in tl.range(lo, hi, P.value.keys, num_stages=P.value.stages):
        _, gs, keys = tile_gradients(q, g, logs, d, k, v, origin, start, call, P, MASKED)
        gs0, gs1 = gs[0].to(q[0].dtype), gs[1].to(q[0].dtype)
        a0 = tl.dot(gs1, keys[1], tl.dot(gs0, keys[0], a0))
        a1 = tl.dot(gs1, keys[0], a1)
    return a0, a1


@triton.jit
def query_gradient(
    q, k, v, mask, gy, gq, statistics, delta, seed, strides, sizes, numbers, P: tl.constexpr
):  # fmt: skip
    """Compute gq, [2, B, H, T, D]; strides of q, k, v, mask, gy and gq."""
    N: tl.constexpr = P.value.rows
    W: tl.constexpr = max(16, triton.next_power_of_2(P.value.size))
    _, _, _, T, TK = sizes
    origin = query_tile_origin(sizes, N)
    first = origin[2]
    call = ((mask, strides[3]), tl.load(seed) if P.value.dropout else 0, sizes, numbers)
    Q, K, V, G = (q, strides[0]), (k, strides[1]), (v, strides[2]), (gy, strides[4])
    x, g, logs, d = load_queries(Q, G, statistics, delta, origin, sizes, P)
    a0 = tl.zeros([N, W], tl.float32)
    a1 = a0
    lo, full_lo, full_hi, hi = limits(first, N, T, TK, P.value.left, P.value.right, P.value.keys)
    if P.value.left >= 0:
        a0, a1 = query_tiles(a0, a1, x, g, logs, d, K, V, origin, lo, full_lo, call, P, True)
    a0, a1 = query_tiles(a0, a1, x, g, logs, d, K, V, origin, full_lo, full_hi, call, P, False)
    a0, a1 = query_tiles(a0, a1, x, g, logs, d, K, V, origin, full_hi, hi, call, P, True)
    store((gq, strides[5]), origin, T, [a0, a1], P.value.size)


@triton.jit
def store_scores(x, rectangle, start, x0, x1, P: tl.constexpr):
    """Store both streams of a tile of a rectangle's scores.

    to_tile: (head, row, heads, rows, columns, distance between rows).
    """
    N: tl.constexpr = P.value.rows
    M: tl.constexpr = P.value.keys
    head, row, heads, count, width, step = rectangle
    if P.value.descriptors:
        x.store([0, head, row, start], tl.reshape(x0.to(x.dtype), [1, 1, N, M]))
        x.store([1, head, row, start], tl.reshape(x1.to(x.dtype), [1, 1, N, M]))
    else:
        rows, columns = (row + tl.arange(0, N))[:, None], (start + tl.arange(0, M))[None, :]
        x += head.to(tl.int64) * count * step
        base = x + rows.to(tl.int64) * step + columns
        inside = (rows < count) & (columns < width)
        tl.store(base, x0.to(x.dtype.element_ty), mask=inside)
        tl.store(base + heads.to(tl.int64) * count * step, x1.to(x.dtype.element_ty), mask=inside)


@triton.jit
def score_tiles(
    p, gs, to_tile, q, g, logs, d, k, v, origin, lo, hi, call, P: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Store the weights and the scores' gradients of a tile of queries for the keys [lo, hi)."""
    for start in tl.range(lo, hi, P.value.keys, num_stages=P.value.stages):
        w, z, _ = tile_gradients(q, g, logs, d, k, v, origin, start, call, P, MASKED)
        store_scores(p, to_tile, start, w[0], w[1], P)
        store_scores(gs, to_tile, start, z[0], z[1], P)


@triton.jit
def zero_tiles(p, gs, to_tile, lo, hi, P: tl.constexpr):
    """Store zeros for the keys [lo, hi)."""
    N: tl.constexpr = P.value.rows
    M: tl.constexpr = P.value.keys
    zero = tl.zeros([N, M], tl.float32)
    for start in tl.range(lo, hi, M):
        store_scores(p, to_tile, start, zero, zero, P)
        store_scores(gs, to_tile, start, zero, zero, P)


@triton.jit
def score_jets(
    q, k, v, mask, gy, p, gs, statistics, delta, seed, strides, sizes, numbers, rectangle,
    P: tl.constexpr,
):  # fmt: skip
    """Store the weights and the scores' gradients of a rectangle, [2, heads, rows, keys] each;
    strides of q, k, v, mask and gy.

    rectangle: (first head b · H + h, first row, rows, keys, distance between rows in memory).
    """
    N: tl.constexpr = P.value.rows
    M: tl.constexpr = P.value.keys
    first_head, first_row, count, width, step = rectangle
    tiles = tl.cdiv(count, N)
    head, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    origin = ((first_head + head) // sizes[1], (first_head + head) % sizes[1], first_row + row)
    call = ((mask, strides[3]), tl.load(seed) if P.value.dropout else 0, sizes, numbers)
    Q, K, V, G = (q, strides[0]), (k, strides[1]), (v, strides[2]), (gy, strides[4])
    x, g, logs, d = load_queries(Q, G, statistics, delta, origin, sizes, P)
    to_tile = (head, row, tl.num_programs(0) // tiles, count, width, step)
    lo, full_lo, full_hi, hi = limits(
        first_row + row, N, sizes[3], sizes[4], P.value.left, P.value.right, M
    )
    zero_tiles(p, gs, to_tile, 0, lo, P)
    if P.value.left >= 0:
        score_tiles(p, gs, to_tile, x, g, logs, d, K, V, origin, lo, full_lo, call, P, True)
    score_tiles(p, gs, to_tile, x, g, logs, d, K, V, origin, full_lo, full_hi, call, P, False)
    score_tiles(p, gs, to_tile, x, g, logs, d, K, V, origin, full_hi, hi, call, P, True)
    zero_tiles(p, gs, to_tile, tl.cdiv(hi, M) * M, width, P)


@triton.jit
def key_tiles(
    a0, a1, k, v, queries, origin, b, h, lo, hi, call, P: tl.constexpr, MASKED: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Add the queries [lo, hi) of head h to the gradient of a tile of keys (of values with
    VALUES)."""
    q, gy, statistics, delta = queries
    N: tl.constexpr = P.value.rows
    M: tl.constexpr = P.value.keys
    _, _, sizes, numbers = call
    keys = origin[2] + tl.arange(0, M)
    for start in tl.range(lo, hi, N, num_stages=P.value.stages):
        rows = start + tl.arange(0, N)
        x, g, logs, d = load_queries(q, gy, statistics, delta, (b, h, start), sizes, P)
        shown, offset = visible(call, b, h, rows[None, :], keys[:, None], P)
        logs_across = (logs[0][None, :], logs[1][None, :])
        p0, p1, cap = weights(scores(k, x, P), logs_across, shown, offset, numbers, P, MASKED)
        factor = dropout_factor(call, b, h, rows, origin[2], M, P)
        if P.value.dropout:
            factor = tl.trans(factor)
        if VALUES:
            z0, z1 = g
            c0, c1 = (p0 * factor).to(z0.dtype), (p1 * factor).to(z0.dtype)
            a0 = tl.dot(c1, z1, tl.dot(c0, z0, a0))
            a1 = tl.dot(c0, z1, a1)
        else:
            z0, z1 = x
            w = (
                tl.dot(v[1], tl.trans(g[1]), tl.dot(v[0], tl.trans(g[0]))),
                tl.dot(v[0], tl.trans(g[1])),
            )
            deltas = (d[0][None, :], d[1][None, :])
            gs0, gs1 = score_gradients(p0, p1, w, deltas, factor, cap, numbers, P)
            c0, c1 = gs0.to(z0.dtype), gs1.to(z0.dtype)
            a0 = tl.dot(c1, z1, tl.dot(c0, z0, a0))
            a1 = tl.dot(c1, z0, a1)
    return a0, a1


@triton.jit
def key_gradient(
    q, k, v, mask, gy, out, statistics, delta, seed, strides, sizes, numbers, P: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Compute gk, [2, B, Hk, Tk, D], or gv with VALUES; strides of q, k, v, mask, gy and it."""
    N: tl.constexpr = P.value.keys
    D: tl.constexpr = P.value.value_size if VALUES else P.value.size
    W: tl.constexpr = max(16, triton.next_power_of_2(D))
    _, H, group, T, TK = sizes
    tiles, key_heads = tl.cdiv(TK, N), H // group
    head, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    b, key_head = head // key_heads, head % key_heads
    origin = (b, key_head, first)
    call = ((mask, strides[3]), tl.load(seed) if P.value.dropout else 0, sizes, numbers)
    queries = ((q, strides[0]), (gy, strides[4]), statistics, delta)
    K = load((k, strides[1]), b, key_head, first, TK, N, P.value.size, P)
    V = load((v, strides[2]), b, key_head, first, TK, N, P.value.value_size, P)
    a0 = tl.zeros([N, W], tl.float32)
    a1 = a0
    # Query i sees keys i − left ≤ j ≤ i + right: key j is seen by queries j − right ≤ i ≤ j + left.
    lo, full_lo, full_hi, hi = limits(first, N, TK, T, P.value.right, P.value.left, P.value.rows)
    for n in range(group):
        h = key_head * group + n
        if P.value.right >= 0:
            a0, a1 = key_tiles(
                a0, a1, K, V, queries, origin, b, h, lo, full_lo, call, P, True, VALUES
            )
        a0, a1 = key_tiles(
            a0, a1, K, V, queries, origin, b, h, full_lo, full_hi, call, P, False, VALUES
        )
        a0, a1 = key_tiles(a0, a1, K, V, queries, origin, b, h, full_hi, hi, call, P, True, VALUES)
    store((out, strides[5]), origin, TK, [a0, a1], D)
