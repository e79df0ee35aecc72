"""Jets through attention as whole T × Tk tensors: the reference of `jachess::attention_jet`.

    s = scale · q kᵀ (Leibniz);  softcap · tanh(s / softcap);  + mask;  p = softmax(s);  y = p v

(docs/how_it_works.md). Dropout multiplies every stream of p by the same keep / (1 − dropout_p),
after the softmax.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import widened
from .jet_formulas import pointwise_jet, product_jet
from .philox import philox4x32_10
from .softmax import softmax_jet_reference

DROPOUT_COUNTER = 0x4A414354
"""Last word of the counters of attention's dropout ("JACT"), which nothing else draws from."""


class AttentionSettings(NamedTuple):
    """What shapes the attention apart from its tensors, as in the operator's schema; the window's
    ends are `left` and `right`. See `attention_jet`."""

    q: int
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float
    dropout_p: float
    dropout_seed: int


def _matmul_jet(a: Tensor, b: Tensor, q: int) -> Tensor:
    """The jet of a b for stacks [S, ..., m, k], [S, ..., k, n] that broadcast behind S."""
    return torch.stack(product_jet(list(a.unbind(0)), list(b.unbind(0)), q, torch.matmul))


def _softcap_jet(s: Tensor, softcap: float, q: int) -> Tensor:
    """The jet of c tanh(s/c): f' = 1 − t², f'' = −2 t f' / c, with t = tanh(s/c)."""
    t = torch.tanh(s[0] / softcap)
    f1 = 4 * torch.sigmoid(2 * s[0] / softcap) * torch.sigmoid(-2 * s[0] / softcap)
    f2 = -2 / softcap * t * f1
    return torch.stack(pointwise_jet(softcap * t, f1, f2, list(s.unbind(0)), q))


def visible_keys(
    queries: int, keys: int, causal: bool, window: tuple[int, int], device: torch.device
) -> Tensor | None:
    """[T, Tk] bool, True where query i may look at key j; None where it may look everywhere.

    Causal: j ≤ i, both counted from the first; window: i − left ≤ j ≤ i + right, −1 unlimited.
    """
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return None
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def dropout_mask(
    batch: int, heads: int, queries: int, keys: int, p: float, seed: int, device: torch.device
) -> Tensor:
    """[B, H, T, Tk] bool, True where a weight is kept: the mask of every kernel, bit for bit.

    Philox counter (b·H + h, i, j // 4, "JACT"), key = seed; of its four words number j % 4 decides:
    kept where (word >> 8) · 2⁻²⁴ ≥ p.
    """
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    row = torch.arange(queries, device=device).view(-1, 1)
    quad = torch.arange((keys + 3) // 4, device=device)
    words = philox4x32_10((head, row, quad, torch.full_like(quad, DROPOUT_COUNTER)), seed)
    number = torch.stack(words, -1).flatten(-2)[..., :keys]
    return (number >> 8).double() * 2.0**-24 >= p


def _with_mask(s: Tensor, mask: Tensor | None, settings: AttentionSettings) -> Tensor:
    """Masks of every kind on the primal scores of the stack s [S, B, H, T, Tk]."""
    primal = s[0]
    if mask is not None and mask.dtype == torch.bool:
        primal = primal.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        primal = primal + mask.to(primal.dtype)
    window = (settings.left, settings.right)
    visible = visible_keys(s.shape[-2], s.shape[-1], settings.causal, window, s.device)
    if visible is not None:
        primal = primal.masked_fill(visible.logical_not(), -math.inf)
    return torch.cat([primal[None], s[1:]])


def attention_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: AttentionSettings
) -> Tensor:
    """The jet of attention [S, B, H, T, Dv]; arguments as `attention_jet`, already checked."""
    q, wide = settings.q, [widened(t) for t in (query, key, value)]
    (streams, batch, heads, queries, _), keys = query.shape, key.shape[3]
    groups = heads // key.shape[2] if key.shape[2] else 1
    grouped = wide[0].unflatten(2, (key.shape[2], groups))
    s = _matmul_jet(settings.scale * grouped, wide[1].unsqueeze(3).transpose(-2, -1), q)
    s = s.reshape(streams, batch, heads, queries, keys)
    if settings.softcap > 0:
        s = _softcap_jet(s, settings.softcap, q)
    p = softmax_jet_reference(_with_mask(s, mask, settings), q, masked=True)
    if settings.dropout_p > 0:
        shape = (batch, heads, queries, keys)
        kept = dropout_mask(*shape, settings.dropout_p, settings.dropout_seed, s.device)
        p = p * (kept.to(p.dtype) / (1 - settings.dropout_p))
    y = _matmul_jet(p.unflatten(2, (key.shape[2], groups)), wide[2].unsqueeze(3), q)
    return y.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)
