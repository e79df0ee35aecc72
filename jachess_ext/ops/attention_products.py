"""Attention and its first two derivatives by matrix products, for masks that have derivatives.

    s = scale · q kᵀ + mask;  p = softmax(s);  y = p v        (with dropout p is p · factor in y)

Let ds be the scores' tangent, scale (dq kᵀ + q dkᵀ) + dmask, minus its weighted mean Σ p ds; then
the weights' tangent is p ds.  The mask's gradient is that of the scores, summed to the mask's
shape. `in_pieces` computes a formula for some queries at a time, so that only tensors of the mask's
shape may have T × Tk entries.

Tensors are ``[..., H, T, D]``; Hk divides H, and leading dimensions of the mask broadcast.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from .library import wide_dtype

_PIECE = 1 << 19
"""Number of weights of one piece: three or four tensors of this size fit into a CPU's cache."""


class Arguments(NamedTuple):
    """Arguments of attention.

    Attributes:
        mask: an additive or boolean mask; None: no mask.
        causal: whether query i sees only keys j ≤ i.
        factor: dropout's factors of the weights, 0 or 1 / (1 − p); None: no dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    causal: bool = False
    factor: Tensor | None = None


Direction: TypeAlias = Sequence[Tensor | None]
"""Tangents of query, key, value and mask; None: zero."""
Formula: TypeAlias = Callable[..., tuple[Tensor, ...]]


def _group_queries(x: Tensor, key: Tensor) -> Tensor:
    """Return ``[..., H, T, n]`` as ``[..., Hk, H / Hk · T, n]``: the rows of all query heads that
    share a key head are stacked."""
    heads = key.shape[-3]
    return x if x.shape[-3] == heads else x.unflatten(-3, (heads, -1)).flatten(-3, -2)


def _ungroup_queries(x: Tensor, query: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-3], *query.shape[-3:-1], x.shape[-1])


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Return q kᵀ, ``[..., H, T, Tk]``."""
    return _ungroup_queries(_group_queries(query, key) @ key.mT, query)


def _sum_over_keys(p: Tensor, value: Tensor) -> Tensor:
    """Return p v, ``[..., H, T, n]``."""
    return _ungroup_queries(_group_queries(p, value) @ value, p)


def _sum_over_queries(p: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """Return pᵀ x, ``[..., Hk, Tk, n]``, summed over the query heads that share a key head."""
    return _group_queries(p, key).mT @ _group_queries(x, key)


def _weights(a: Arguments) -> Tensor:
    s = _scores(a.query * a.scale, a.key)
    if a.mask is not None and a.mask.dtype == torch.bool:
        s = s.masked_fill(~a.mask, -torch.inf)
    elif a.mask is not None:
        s = s + a.mask
    if a.causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~visible, -torch.inf)
    hidden = (s == -torch.inf).all(-1, keepdim=True)  # queries that see no key: their weights are 0
    return s.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)


def _centre(p: Tensor, x: Tensor) -> Tensor:
    return x - (p * x).sum(-1, keepdim=True)


def _apply_dropout(a: Arguments, x: Tensor) -> Tensor:
    return x if a.factor is None else x * a.factor


def _score_tangent(a: Arguments, p: Tensor, direction: Direction) -> Tensor:
    """Return ds, the scores' tangent along a direction, minus its weighted mean Σ p ds."""
    dq, dk, _, dmask = direction
    ds = torch.zeros_like(p)
    if dq is not None:
        ds = ds + _scores(dq * a.scale, a.key)
    if dk is not None:
        ds = ds + _scores(a.query * a.scale, dk)
    if dmask is not None and a.mask is not None:
        # The tangent of a mask log(0) (of a cutoff) is NaN: hidden scores have the tangent 0.
        ds = ds + dmask.masked_fill(a.mask == -torch.inf, 0)
    return _centre(p, ds)


def backward(a: Arguments, g: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and scores from the result's gradient g."""
    p = _weights(a)
    w = p * _centre(p, _apply_dropout(a, _scores(g, a.value)))
    of_value = _sum_over_queries(_apply_dropout(a, p), g, a.value)
    return (*_from_score_gradient(a, w), of_value, w)


def _from_score_gradient(a: Arguments, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of query and key from the scores' gradient w."""
    return _sum_over_keys(w, a.key) * a.scale, _sum_over_queries(w, a.query, a.key) * a.scale


def tangent(a: Arguments, *direction: Tensor | None) -> tuple[Tensor]:
    """Return attention's derivative along a direction (tangents of query, key, value and mask)."""
    p = _weights(a)
    along = _sum_over_keys(_apply_dropout(a, p * _score_tangent(a, p, direction)), a.value)
    dv = direction[2]
    return (along if dv is None else along + _sum_over_keys(_apply_dropout(a, p), dv),)


def second(
    a: Arguments, gy: Tensor | None, g: Tensor, *direction: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of <gy, y> + <g, J d>, and J d, the tangent along a direction d.

    The results are: the gradients with respect to query, key, value and scores; J d; and the
    gradients with respect to the four tangents in d, which are attention's gradients for g.
    """
    p = _weights(a)
    ds = _score_tangent(a, p, direction)
    inner = _centre(p, _apply_dropout(a, _scores(g, a.value)))
    w, pv, dpv = p * inner, _apply_dropout(a, p), _apply_dropout(a, p * ds)  # pv, dpv: factors of v
    dq, dk, dv, _ = direction
    weight_gradient = inner * ds
    value_gradient = _sum_over_queries(dpv, g, a.value)
    along = _sum_over_keys(dpv, a.value)
    if dv is not None:
        weight_gradient = weight_gradient + _apply_dropout(a, _scores(g, dv))
        along = along + _sum_over_keys(pv, dv)
    if gy is not None:
        weight_gradient = weight_gradient + _apply_dropout(a, _scores(gy, a.value))
        value_gradient = value_gradient + _sum_over_queries(pv, gy, a.value)
    of_scores = p * _centre(p, weight_gradient)
    of_query, of_key = _from_score_gradient(a, of_scores)
    if dk is not None:
        of_query = of_query + _sum_over_keys(w, dk) * a.scale
    if dq is not None:
        of_key = of_key + _sum_over_queries(w, dq, a.key) * a.scale
    first = *_from_score_gradient(a, w), _sum_over_queries(pv, g, a.value), w
    return of_query, of_key, value_gradient, of_scores, along, *first


def mixed(a: Arguments, *directions: Tensor | None) -> tuple[Tensor]:
    """Return attention's second derivative along two directions.

    Args:
        directions: four tangents of the first direction, then four of the second.
    """
    p = _weights(a)
    d, e = directions[:4], directions[4:]
    tangents = [_score_tangent(a, p, direction) for direction in (d, e)]
    second_order = tangents[0] * tangents[1]
    for (dq, *_), (_, dk, *_) in ((d, e), (e, d)):
        if dq is not None and dk is not None:
            second_order = second_order + _scores(dq * a.scale, dk)
    result = _sum_over_keys(_apply_dropout(a, p * _centre(p, second_order)), a.value)
    for ds, (_, _, dv, _) in zip(tangents, (e, d), strict=True):
        if dv is not None:
            result = result + _sum_over_keys(_apply_dropout(a, p * ds), dv)
    return (result,)


# ---- pieces ----------------------------------------------------------------------------------

# Shapes of a formula's further arguments, and of its results, one letter each: q, k, v and m are
# the shapes of query, key, value and mask (the formula returns m in the scores' shape, to be summed
# to the mask's), y is the shape of attention's result.
_ARGUMENTS: dict[Formula, str] = {
    **{backward: "y", tangent: "qkvm", second: "yyqkvm", mixed: "qkvmqkvm"}
}
RESULTS: dict[Formula, str] = {**{backward: "qkvm", tangent: "y", second: "qkvmyqkvm", mixed: "y"}}


def at_once(formula: Formula, a: Arguments, *rest: Tensor | None) -> list[Tensor | None]:
    """Compute a formula for all queries; return its results in the shapes that `RESULTS` gives.

    The results are differentiable in any nesting; 16-bit inputs are computed in float32.  The
    gradient of a boolean mask is None.
    """
    tensors = [x if x is None or not x.is_floating_point() else _wide(x) for x in (*a[:4], *rest)]
    results = formula(Arguments(*tensors[:4], *a[4:]), *tensors[4:])  # type: ignore[arg-type, call-arg]
    mask = a.mask if is_additive(a.mask) else None

    def shaped(x: Tensor, kind: str) -> Tensor | None:
        if kind != "m":
            return x.to(a.query.dtype)
        return None if mask is None else x.sum_to_size(mask.shape).to(mask.dtype)

    return [shaped(x, kind) for x, kind in zip(results, RESULTS[formula], strict=True)]


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def is_additive(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether there is an additive mask, which can have derivatives."""
    return mask is not None and mask.is_floating_point()


def in_pieces(formula: Formula, a: Arguments, *rest: Tensor | None) -> list[Tensor | None]:
    """Compute a formula as `at_once` does, for some queries at a time; not differentiable.

    Dropout and causal attention are not supported.
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
    for piece in _pieces(a):
        tensors = [
            None if x is None else _piece(x, kind, *piece)
            for x, kind in zip((*a[:4], *rest), "qkvm" + _ARGUMENTS[formula], strict=True)
        ]
        wide_tensors = [x if x is None or not x.is_floating_point() else _wide(x) for x in tensors]
        outputs = at_once(formula, Arguments(*wide_tensors[:4], a.scale), *wide_tensors[4:])  # type: ignore[arg-type, call-arg]
        for result, x, kind in zip(results, outputs, kinds, strict=True):
            if result is not None and x is not None:
                _piece(result, kind, *piece).add_(x)
    return [
        None if x is None else x.to(like[kind].dtype)  # type: ignore[union-attr]
        for x, kind in zip(results, kinds, strict=True)
    ]


def _pieces(a: Arguments) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """Yield for each piece the slices of the leading dimensions, and the slice of queries."""
    *lead, heads, rows, keys = *a.query.shape[:-1], a.key.shape[-2]
    batch = max(1, min(lead[-1], _PIECE // max(1, heads * rows * keys)))
    step = rows if batch > 1 else max(16, _PIECE // max(1, heads * keys))
    singles = ([slice(n, n + 1) for n in range(size)] for size in lead[:-1])
    groups = [slice(n, n + batch) for n in range(0, lead[-1], batch)]
    for *before, last in product(*singles, groups):
        for row in range(0, rows, step):
            yield (*before, last), slice(row, row + step)


def _piece(x: Tensor, kind: str, lead: tuple[slice, ...], rows: slice) -> Tensor:
    """Return a piece's view of a tensor; dimensions of size 1, which broadcast, are not sliced.

    Args:
        kind: the letter of the tensor's shape, see `RESULTS`.
        lead, rows: slices of the leading dimensions and of the queries.
    """
    full = slice(None)
    slices = [full if size == 1 else piece for size, piece in zip(x.shape, lead, strict=False)]
    has_rows = kind in "qym" and x.shape[-2] > 1
    index = (*slices, full, rows if has_rows else full)
    return x[index]
