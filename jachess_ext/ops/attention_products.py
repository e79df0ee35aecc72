"""Attention whose mask has derivatives, by products of matrices, and every formula of its own.

    s = scale · q kᵀ + mask;  p = softmax(s);  y = p v        (with dropout p is p · factor in y)

With the tangent ds = scale (dq kᵀ + q dkᵀ) + dmask of the scores, less its mean Σ p ds, a tangent
of the weights is p ds.  The scores are linear in the mask, which needs no formula of its own: its
gradient is that of the scores, summed to its shape.  `in_pieces` computes a formula for some
queries at a time, so that no tensor of T × Tk is alive but those of the mask's size.

Tensors are ``[..., H, T, D]``; Hk divides H, and leading dimensions of the mask broadcast.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from .library import wide_dtype

_PIECE = 1 << 19
"""Weights of one piece: they and the three or four tensors of their size stay in a CPU's cache."""


class Products(NamedTuple):
    """Arguments of attention: a mask that is added, or a boolean one, None for none; what dropout
    multiplies the weights by; and whether query i sees keys j ≤ i alone."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    causal: bool = False
    factor: Tensor | None = None


Direction: TypeAlias = Sequence[Tensor | None]
"""Tangents of query, key, value and mask; None is 0."""
Formula: TypeAlias = Callable[..., tuple[Tensor, ...]]


def _by_key_head(x: Tensor, key: Tensor) -> Tensor:
    """Put the queries ``[..., H, T, n]`` of a group of heads under their key head."""
    heads = key.shape[-3]
    return x if x.shape[-3] == heads else x.unflatten(-3, (heads, -1)).flatten(-3, -2)


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-3], *query.shape[-3:-1], x.shape[-1])


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Return q kᵀ, ``[..., H, T, Tk]``."""
    return _by_head(_by_key_head(query, key) @ key.mT, query)


def _over_keys(p: Tensor, value: Tensor) -> Tensor:
    """Return p v, ``[..., H, T, n]``."""
    return _by_head(_by_key_head(p, value) @ value, p)


def _over_queries(p: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """Return pᵀ x, ``[..., Hk, Tk, n]``, summed over the heads of a group."""
    return _by_key_head(p, key).mT @ _by_key_head(x, key)


def _weights(a: Products) -> Tensor:
    s = _scores(a.query * a.scale, a.key)
    if a.mask is not None and a.mask.dtype == torch.bool:
        s = s.masked_fill(~a.mask, -torch.inf)
    elif a.mask is not None:
        s = s + a.mask
    if a.causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~seen, -torch.inf)
    blind = (s == -torch.inf).all(-1, keepdim=True)  # a query that sees no key gives 0
    return s.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def _centred(p: Tensor, x: Tensor) -> Tensor:
    return x - (p * x).sum(-1, keepdim=True)


def _dropped(a: Products, x: Tensor) -> Tensor:
    return x if a.factor is None else x * a.factor


def _slope(a: Products, p: Tensor, direction: Direction) -> Tensor:
    """Return the scores' tangent, less its mean."""
    dq, dk, _, dmask = direction
    ds = torch.zeros_like(p)
    if dq is not None:
        ds = ds + _scores(dq * a.scale, a.key)
    if dk is not None:
        ds = ds + _scores(a.query * a.scale, dk)
    if dmask is not None and a.mask is not None:
        # The tangent of log(0), a cutoff's, is not a number: what is hidden does not move.
        ds = ds + dmask.masked_fill(a.mask == -torch.inf, 0)
    return _centred(p, ds)


def backward(a: Products, g: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and scores."""
    p = _weights(a)
    w = p * _centred(p, _dropped(a, _scores(g, a.value)))
    of_value = _over_queries(_dropped(a, p), g, a.value)
    return (*_of_scores(a, w), of_value, w)


def _of_scores(a: Products, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of query and key from that of the scores."""
    return _over_keys(w, a.key) * a.scale, _over_queries(w, a.query, a.key) * a.scale


def tangent(a: Products, *direction: Tensor | None) -> tuple[Tensor]:
    """Return attention's derivative along a direction."""
    p = _weights(a)
    along = _over_keys(_dropped(a, p * _slope(a, p, direction)), a.value)
    dv = direction[2]
    return (along if dv is None else along + _over_keys(_dropped(a, p), dv),)


def second(
    a: Products, gy: Tensor | None, g: Tensor, *direction: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of <gy, y> + <g, J d> in query, key, value and scores, J d, and the
    gradients in the directions of the four, which are attention's own at g."""
    p = _weights(a)
    ds = _slope(a, p, direction)
    inner = _centred(p, _dropped(a, _scores(g, a.value)))
    w, kept, moved = p * inner, _dropped(a, p), _dropped(a, p * ds)
    dq, dk, dv, _ = direction
    of_weights = inner * ds
    of_value = _over_queries(moved, g, a.value)
    along = _over_keys(moved, a.value)
    if dv is not None:
        of_weights = of_weights + _dropped(a, _scores(g, dv))
        along = along + _over_keys(kept, dv)
    if gy is not None:
        of_weights = of_weights + _dropped(a, _scores(gy, a.value))
        of_value = of_value + _over_queries(kept, gy, a.value)
    of_scores = p * _centred(p, of_weights)
    of_query, of_key = _of_scores(a, of_scores)
    if dk is not None:
        of_query = of_query + _over_keys(w, dk) * a.scale
    if dq is not None:
        of_key = of_key + _over_queries(w, dq, a.key) * a.scale
    first = *_of_scores(a, w), _over_queries(kept, g, a.value), w
    return of_query, of_key, of_value, of_scores, along, *first


def mixed(a: Products, *directions: Tensor | None) -> tuple[Tensor]:
    """Return attention's second derivative along two directions, of four tensors each."""
    p = _weights(a)
    one, other = directions[:4], directions[4:]
    slopes = [_slope(a, p, direction) for direction in (one, other)]
    both = slopes[0] * slopes[1]
    for (dq, *_), (_, dk, *_) in ((one, other), (other, one)):
        if dq is not None and dk is not None:
            both = both + _scores(dq * a.scale, dk)
    result = _over_keys(_dropped(a, p * _centred(p, both)), a.value)
    for slope, (_, _, dv, _) in zip(slopes, (other, one), strict=True):
        if dv is not None:
            result = result + _over_keys(_dropped(a, p * slope), dv)
    return (result,)


# ---- pieces ----------------------------------------------------------------------------------

# The shape of each further argument, and of each result: that of the query, the key, the value, the
# mask (scores, before they are summed to it) or of what attention returns (y).
_ARGUMENTS: dict[Formula, str] = {
    **{backward: "y", tangent: "qkvm", second: "yyqkvm", mixed: "qkvmqkvm"}
}
RESULTS: dict[Formula, str] = {**{backward: "qkvm", tangent: "y", second: "qkvmyqkvm", mixed: "y"}}


def at_once(formula: Formula, a: Products, *rest: Tensor | None) -> list[Tensor | None]:
    """Return what a formula gives, with the mask's gradient (None of a boolean one).

    Differentiable, in any nesting; computed in a wider dtype of halves.
    """
    tensors = [x if x is None or not x.is_floating_point() else _wide(x) for x in (*a[:4], *rest)]
    results = formula(Products(*tensors[:4], *a[4:]), *tensors[4:])  # type: ignore[arg-type, call-arg]
    mask = a.mask if is_additive(a.mask) else None

    def shaped(x: Tensor, kind: str) -> Tensor | None:
        if kind != "m":
            return x.to(a.query.dtype)
        return None if mask is None else x.sum_to_size(mask.shape).to(mask.dtype)

    return [shaped(x, kind) for x, kind in zip(results, RESULTS[formula], strict=True)]


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def is_additive(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a mask can have derivatives: there is one, and it is added."""
    return mask is not None and mask.is_floating_point()


def in_pieces(formula: Formula, a: Products, *rest: Tensor | None) -> list[Tensor | None]:
    """Return what `at_once` does, computed for some queries at a time; not differentiable.

    Dropout and causal attention are not for pieces.
    """
    query, key, value, mask = a[:4]
    like = {"q": query, "k": key, "v": value, "m": mask if is_additive(mask) else None}
    like["y"] = query.new_empty(()).expand(*query.shape[:-1], value.shape[-1])
    kinds = RESULTS[formula]
    results = [
        None
        if (x := like[kind]) is None
        else torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)
        for kind in kinds
    ]
    for place in _places(a):
        parts = [
            None if x is None else _part(x, kind, *place)
            for x, kind in zip((*a[:4], *rest), "qkvm" + _ARGUMENTS[formula], strict=True)
        ]
        wide = [x if x is None or not x.is_floating_point() else _wide(x) for x in parts]
        found = at_once(formula, Products(*wide[:4], a.scale), *wide[4:])  # type: ignore[arg-type, call-arg]
        for result, x, kind in zip(results, found, kinds, strict=True):
            if result is not None and x is not None:
                _part(result, kind, *place).add_(x)
    return [
        None if x is None else x.to(like[kind].dtype)  # type: ignore[union-attr]
        for x, kind in zip(results, kinds, strict=True)
    ]


def _places(a: Products) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """Yield the leading places and the rows of queries of each piece."""
    *lead, heads, rows, keys = *a.query.shape[:-1], a.key.shape[-2]
    batch = max(1, min(lead[-1], _PIECE // max(1, heads * rows * keys)))
    step = rows if batch > 1 else max(16, _PIECE // max(1, heads * keys))
    singles = ([slice(n, n + 1) for n in range(size)] for size in lead[:-1])
    groups = [slice(n, n + batch) for n in range(0, lead[-1], batch)]
    for *before, last in product(*singles, groups):
        for row in range(0, rows, step):
            yield (*before, last), slice(row, row + step)


def _part(x: Tensor, kind: str, lead: tuple[slice, ...], rows: slice) -> Tensor:
    """Return the view that a piece has of a tensor, whose broadcast dimensions stay whole."""
    every = slice(None)
    places = [every if size == 1 else place for size, place in zip(x.shape, lead, strict=False)]
    along_rows = kind in "qym" and x.shape[-2] > 1
    index = (*places, every, rows if along_rows else every)
    return x[index]
