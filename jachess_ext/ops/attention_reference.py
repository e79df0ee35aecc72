"""Scaled dot-product attention on jets in pure torch, with each step as a function.

    s = scale · q kᵀ (Leibniz);  softcap · tanh(s / softcap);  + mask;  p = softmax(s);  y = p v

(docs/how_it_works.md). Dropout multiplies every stream of p by the same keep / (1 − dropout_p),
after the softmax.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .activation import DERIVATIVES, pointwise_jet, product_jet
from .directions import number_on, philox4x32_10
from .library import Streams, streams_of, widened
from .softmax import softmax_jet_reference

DROPOUT_COUNTER = 0x4A414354
"""Last word of the counters of attention's dropout ("JACT"); no other draw uses it."""


Softmax: TypeAlias = Callable[[Tensor, int, bool, int], Tensor]
"""A function with the arguments and the result of `softmax_jet`."""


class Settings(NamedTuple):
    """The arguments of `attention_jet` that are not tensors, in the order of the operator's schema;
    (left, right) is its ``window``."""

    q: int
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float
    dropout_p: float
    summed: int


class Call(NamedTuple):
    """The arguments of a call of `attention_jet`.

    Attributes:
        seed: dropout's seed, an int64 scalar; None without dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    seed: Tensor | None
    settings: Settings

    @property
    def streams(self) -> Streams:
        """Return the layout of the streams of query, key and value."""
        return streams_of(self.query, self.settings.q, self.settings.summed)


class ScoreBlock(NamedTuple):
    """A rectangle of the score matrix: some heads, some queries and the first `keys` keys.

    Attributes:
        heads: number b · H + h of each head, [B', H'] int64.
        rows: positions of the queries, [T'] int64.
        keys: number of keys, Tk'.
        mask: mask as in `attention_jet`, broadcastable to [B', H', T', Tk'].
    """

    heads: Tensor
    rows: Tensor
    keys: int
    mask: Tensor | None


def softcap_jet(s: Tensor, softcap: float, streams: Streams) -> Tensor:
    """Return the jet of the soft-capped scores f(s) = c tanh(s/c), c = ``softcap``.

    f' = tanh'(s/c), f'' = tanh''(s/c) / c.
    """
    t, t1, t2 = DERIVATIVES["tanh"](s[0] / softcap)
    return pointwise_jet((softcap * t, t1, t2 / softcap), s, streams)


def softcap_gradient(g: Tensor, s: Tensor, softcap: float, streams: Streams) -> Tensor:
    """Return the gradient of the scores' jet s from the gradient g of its `softcap_jet`, without
    autograd."""
    t, t1, t2 = DERIVATIVES["tanh"](s[0] / softcap)
    curvature, third = t2 / softcap, -2 * (t1 * t1 + t * t2) / softcap**2
    q = streams.directions
    gradient = t1 * g
    gradient[0] += curvature * (g[1:] * s[1:]).sum(0)
    if streams.num_second:
        first, g_second = s[1 : 1 + q], g[1 + q :]
        gradient[0] += third * (g_second * streams.quadratic(first, first)).sum(0)
        gradient[1 : 1 + q] += curvature * streams.quadratic_gradient(g_second, first)
    return gradient


def visible_keys(rows: Tensor, keys: int, left: int, right: int) -> Tensor | None:
    """Return the window's mask, [T', Tk'] bool, True where i − left ≤ j ≤ i + right for query i and
    key j; None if there is no limit.

    Args:
        rows: positions i of the queries, [T'].
        keys: number of keys, Tk'.
        left, right: numbers of keys on both sides of i; −1: no limit.
    """
    if left < 0 and right < 0:
        return None
    ahead = torch.arange(keys, device=rows.device) - rows[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def _keep_mask(heads: Tensor, rows: Tensor, keys: int, p: float, seed: int | Tensor) -> Tensor:
    row = rows.view(-1, 1)
    quad = torch.arange((keys + 3) // 4, device=rows.device)
    counter = torch.full_like(quad, DROPOUT_COUNTER)
    words = philox4x32_10((heads[..., None, None], row, quad, counter), seed)
    number = torch.stack(words, -1).flatten(-2)[..., :keys]
    return (number >> 8).double() * 2.0**-24 >= p


def dropout_mask(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    p: float,
    seed: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Return dropout's mask, [B, H, T, Tk] bool, True where a weight is kept.

    It has the same bits as the kernels' masks.  The weight of query i and key j is kept if
    (word >> 8) · 2⁻²⁴ ≥ p, where word is number j % 4 of the four that Philox gives for
    key = seed and counter (b·H + h, i, j // 4, "JACT").
    """
    head = torch.arange(batch * heads, device=device).view(batch, heads)
    return _keep_mask(head, torch.arange(queries, device=device), keys, p, seed)


def dropout_factor(block: ScoreBlock, call: Call, dtype: torch.dtype) -> Tensor | None:
    """Return dropout's factors of a block's weights, [B', H', T', Tk'], 0 or 1 / (1 − p); None
    without dropout."""
    p = call.settings.dropout_p
    if p == 0:
        return None
    assert call.seed is not None
    return _keep_mask(block.heads, block.rows, block.keys, p, call.seed).to(dtype) / (1 - p)


def mask_scores(primal: Tensor, block: ScoreBlock, settings: Settings) -> Tensor:
    """Return the primal scores [B', H', T', Tk'] with mask, causality and window applied.

    The mask is added, so that a NaN score stays NaN even if it is hidden, as in torch's attention
    and the kernels.
    """
    mask = block.mask
    if mask is not None and mask.dtype == torch.bool:
        additive_mask = torch.zeros_like(mask, dtype=primal.dtype).masked_fill(~mask, -math.inf)
        primal = primal + additive_mask
    elif mask is not None:
        primal = primal + mask.to(primal.dtype)
    right = 0 if settings.causal else settings.right
    visible = visible_keys(block.rows, block.keys, settings.left, right)
    return primal if visible is None else primal.masked_fill(visible.logical_not(), -math.inf)


def weights(
    s: Tensor, block: ScoreBlock, call: Call, softmax: Softmax = softmax_jet_reference
) -> Tensor:
    """Return the jet of attention's weights, [S, B', H', T', Tk'], from the jet s of scale · q
    kᵀ."""
    # The mask, which does not depend on the input, changes stream 0 only: where it is −inf, p is 0,
    # and so is every stream of p.
    settings = call.settings
    if settings.softcap > 0:
        s = softcap_jet(s, settings.softcap, call.streams)
    s = torch.cat([mask_scores(s[0], block, settings).unsqueeze(0), s[1:]])
    p = softmax(s, settings.q, True, settings.summed)
    factor = dropout_factor(block, call, p.dtype)
    return p if factor is None else p * factor


def check_settings(mask: Tensor | None, settings: Settings) -> None:
    """Raise an error for settings that torch would silently accept.

    Raises:
        TypeError: ``mask`` is neither bool nor floating point.
        ValueError: the window, ``softcap`` or ``dropout_p`` is out of range.
    """
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"mask has dtype {mask.dtype}; expected bool (True takes part) or a float dtype "
            "(added to the scores): convert it with .to()."
        )
    if min(settings.left, settings.right) < -1:
        raise ValueError(
            f"window is {(settings.left, settings.right)}; expected how many keys to the left and "
            "to the right take part, −1 for no limit."
        )
    if not 0 <= settings.softcap < math.inf:
        raise ValueError(
            f"softcap is {settings.softcap}; expected a positive bound, or 0 for none."
        )
    if not 0 <= settings.dropout_p < 1:
        raise ValueError(
            f"dropout_p is {settings.dropout_p}; expected a probability below 1, or 0 for none."
        )


def reference(call: Call) -> Tensor:
    """Return `attention_jet_reference` of the arguments in ``call``."""
    query, key, value, mask, _, settings = call
    check_settings(mask, settings)
    (batch, heads, queries, _), (key_heads, keys) = query.shape[1:], key.shape[2:4]
    groups = heads // key_heads if key_heads else 1

    def times(a: Tensor, b: Tensor) -> Tensor:
        """Return the product a b of every stream and head; the heads of a group share b."""
        # [S, B, Hk, groups, T, ·] @ [S, B, Hk, 1, ·, ·]: keys and values are not repeated.
        product = a.unflatten(2, (key_heads, groups)) @ b.unsqueeze(3)
        return product.reshape(len(product), batch, heads, *product.shape[-2:])

    # Every intermediate is a jet [S, B, H, T, Tk]: s_i = q_i kᵀ + q kᵢᵀ and so on.
    s = product_jet(settings.scale * widened(query), widened(key).mT, call.streams, times)
    numbers = torch.arange(batch * heads, device=query.device).view(batch, heads)
    rows = torch.arange(queries, device=query.device)
    p = weights(s, ScoreBlock(numbers, rows, keys, mask), call)
    return product_jet(p, widened(value), call.streams, times).to(query.dtype)


def default_scale(query: Tensor) -> float:
    """Return attention's default scale of the scores, D^(−1/2)."""
    return 1 / math.sqrt(max(query.shape[-1:].numel(), 1))


def attention_jet_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    q: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor = 0,
    summed: int = 0,
) -> Tensor:
    """Compute `attention_jet` in pure torch, on any device.

    It builds T × Tk tensors.  Unlike in `attention_jet`, an additive mask may require a gradient.
    """
    scale = default_scale(query) if scale is None else scale
    settings = Settings(q, scale, causal, *window, softcap or 0.0, dropout_p, summed)
    seed = number_on(query.device, dropout_seed)
    return reference(Call(query, key, value, mask, seed, settings))
