"""Attention under every nesting of torch's transforms, against attention written out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func
from torch.autograd import forward_ad

import jachess_ext as jx
from python_tests.covering import pairs

Attention = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


class Draw:
    """Normal numbers in float64, the same for the same name."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def like(self, tensors: Inputs) -> Inputs:
        return tuple(self(*x.shape) for x in tensors)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return `scaled_dot_product_attention` by its formula, with nothing fused."""
    if options.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scores = torch.einsum("...id,...jd->...ij", query, key)
    scores = scores * options.get("scale", query.shape[-1] ** -0.5)
    mask = options.get("attn_mask", mask)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if options.get("is_causal"):
        hidden = ~torch.ones_like(hidden).tril()
    elif mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    elif mask is not None:
        scores = scores + mask
    weights = torch.where(hidden, 0.0, torch.where(hidden, 0.0, scores).exp())
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return torch.einsum("...ij,...jd->...id", weights, value)


HIDES = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) > 0.4
HIDES[0, 0, 2] = False  # a query that sees no key
BIAS = torch.linspace(-2, 1, 2 * 5 * 7, dtype=torch.float64).view(1, 2, 5, 7)

# Shapes of query, key, value, and of a mask that has derivatives; other arguments.
SETTINGS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), {}),
    "causal": (((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)), {"is_causal": True}),
    "causal, fewer keys": (((1, 2, 7, 4), (1, 2, 5, 4), (1, 2, 5, 4)), {"is_causal": True}),
    "boolean mask": (((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), {"attn_mask": HIDES}),
    "bias": (((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), {"attn_mask": BIAS}),
    "grouped": (((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), {"enable_gqa": True}),
    "wider values, scale": (((1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 5)), {"scale": 0.3}),
    "three dimensions": (((2, 5, 4), (2, 7, 4), (2, 7, 4)), {}),
    "five dimensions": (((2, 1, 2, 5, 4), (2, 3, 2, 7, 4), (1, 3, 2, 7, 4)), {}),
    "trained mask": (((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), (1, 2, 5, 7)), {}),
    "trained mask of a key": (((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), (2, 1, 1, 7)), {}),
    "trained mask, grouped": (
        ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), (5, 7)),
        {"enable_gqa": True},
    ),
}


def nestings(f: Attention, x: Inputs) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each nesting, and what computes it for f at x."""
    draw = Draw("nestings")
    d, e, c = draw.like(x), draw.like(x), draw.like(x)
    g = draw(*written_out_like(f, x).shape)
    h = draw.like((g,))[0]
    places = tuple(range(len(x)))

    def vjp(*x: Tensor) -> Inputs:
        return func.vjp(f, *x)[1](g)

    def tangent(*x: Tensor) -> Tensor:
        return func.jvp(f, x, d)[1]

    def value(*x: Tensor) -> Tensor:
        return (f(*x).sin() * g).sum()

    def slopes(*x: Tensor) -> Inputs:
        return func.grad(value, places)(*x)

    def dot(a: Inputs, b: Inputs) -> Tensor:
        return torch.stack([(i * j).sum() for i, j in zip(a, b, strict=True)]).sum()

    yield "value", lambda: f(*x)
    yield "jvp", lambda: func.jvp(f, x, d)
    yield "vjp", lambda: vjp(*x)
    yield "grad", lambda: slopes(*x)
    yield "linearize", lambda: func.linearize(f, *x)[1](*d)
    yield "jvp of one", lambda: func.jvp(lambda q: f(q, *x[1:]), x[:1], d[:1])
    yield "jvp(jvp)", lambda: func.jvp(tangent, x, e)
    yield (
        "jvp(jvp), the direction moves",
        lambda: func.jvp(lambda x, d: func.jvp(f, x, d)[1], (x, d), (e, c)),
    )
    yield "jvp(vjp)", lambda: func.jvp(vjp, x, d)
    yield (
        "jvp(vjp), the cotangent moves",
        lambda: func.jvp(lambda g, *x: func.vjp(f, *x)[1](g), (g, *x), (h, *d)),
    )
    yield "jvp(vjp), the cotangent alone", lambda: func.jvp(func.vjp(f, *x)[1], (g,), (h,))
    yield "vjp(vjp)", lambda: func.vjp(vjp, *x)[1](c)
    yield (
        "vjp(vjp), the cotangent, too",
        lambda: func.vjp(lambda g, *x: func.vjp(f, *x)[1](g), g, *x)[1](c),
    )
    yield "vjp(jvp)", lambda: func.vjp(tangent, *x)[1](h)
    yield (
        "vjp(jvp), the direction, too",
        lambda: func.vjp(lambda x, d: func.jvp(f, x, d)[1], x, d)[1](h),
    )
    yield "grad(grad)", lambda: func.grad(lambda *x: dot(slopes(*x), c), places)(*x)
    yield (
        "jvp(grad) in the last",
        lambda: func.jvp(
            lambda last: func.grad(lambda last: value(*x[:-1], last))(last), x[-1:], d[-1:]
        ),
    )
    yield (
        "jvp in the last of grad in the first",
        lambda: func.jvp(
            lambda last: func.grad(lambda q: value(q, *x[1:-1], last))(x[0]), x[-1:], d[-1:]
        ),
    )
    few = (x[0] * torch.stack([torch.ones_like(x[0]), x[0].cos()]),)
    yield "vmap", lambda: func.vmap(f, (0, *[None] * (len(x) - 1)))(*few, *x[1:])
    all_of = tuple(torch.stack([a, b, a * b], 1) for a, b in zip(x, d, strict=True))
    yield "vmap of all", lambda: func.vmap(f, 1)(*all_of)
    yield "vmap(grad)", lambda: func.vmap(func.grad(value, places), 1)(*all_of)
    yield (
        "vmap(grad) in one",
        lambda: func.vmap(func.grad(value, places), (0, *[None] * (len(x) - 1)))(*few, *x[1:]),
    )
    yield "vmap(jvp) of points", lambda: func.vmap(tangent, 1)(*all_of)
    moves = tuple(torch.stack([a, b, c]) for a, b, c in zip(d, e, c, strict=True))
    yield "vmap(jvp) of directions", lambda: func.vmap(lambda *d: func.jvp(f, x, d)[1])(*moves)
    yield "vmap(jvp(grad))", lambda: func.vmap(lambda *d: func.jvp(slopes, x, d)[1])(*moves)
    yield "vmap(vjp)", lambda: func.vmap(func.vjp(f, *x)[1])(torch.stack([g, h]))
    yield (
        "grad(vmap)",
        lambda: func.grad(
            lambda *y: func.vmap(f, 1)(*(torch.stack([a, a.cos()], 1) for a in y)).sin().sum(),
            places,
        )(*x),
    )
    yield (
        "jvp(vmap)",
        lambda: func.jvp(
            lambda *y: func.vmap(f, 1)(*(torch.stack([a, a.cos()], 1) for a in y)), x, d
        ),
    )
    yield (
        "vmap(vmap(jvp))",
        lambda: func.vmap(lambda *p: func.vmap(lambda *d: func.jvp(f, p, d)[1])(*moves), 1)(
            *all_of
        ),
    )
    a = torch.tensor([0.1, -0.05], dtype=torch.float64)

    def along(a: Tensor) -> Tensor:
        return f(*(t * (1 + a[0] + i * a[1]) for i, t in enumerate(x)))

    yield "jacfwd", lambda: func.jacfwd(along)(a)
    yield "jacrev", lambda: func.jacrev(along)(a)
    yield "hessian", lambda: func.hessian(along)(a)
    yield "jacrev(jacfwd)", lambda: func.jacrev(func.jacfwd(along))(a)
    yield "jacrev(jacrev)", lambda: func.jacrev(func.jacrev(along))(a)
    yield "jacfwd(jacfwd)", lambda: func.jacfwd(func.jacfwd(along))(a)
    for vectorize in (False, True):
        for strategy in ("reverse-mode", "forward-mode")[: 1 + vectorize]:
            yield (
                f"autograd.functional.hessian, {vectorize}, {strategy}",
                lambda v=vectorize, s=strategy: torch.autograd.functional.hessian(
                    lambda a: along(a).sin().sum(), a, vectorize=v, outer_jacobian_strategy=s
                ),
            )
    yield "autograd.functional.jvp", lambda: torch.autograd.functional.jvp(f, x, d)
    yield "autograd.functional.hvp", lambda: torch.autograd.functional.hvp(value, x, d)

    def dual() -> Any:
        with forward_ad.dual_level():
            y = f(*(forward_ad.make_dual(a, b) for a, b in zip(x, d, strict=True)))
            return tuple(forward_ad.unpack_dual(y))

    def dual_backward() -> Any:
        leaves = [a.clone().requires_grad_() for a in x]
        with forward_ad.dual_level():
            y = f(*(forward_ad.make_dual(a, b) for a, b in zip(leaves, d, strict=True)))
            value, slope = forward_ad.unpack_dual(y)
            return torch.autograd.grad((value * slope * g).sum(), leaves)

    def dual_of_a_gradient() -> Any:
        leaves = [a.clone().requires_grad_() for a in x]
        with forward_ad.dual_level():
            y = f(*(forward_ad.make_dual(a, b) for a, b in zip(leaves, d, strict=True)))
            gradients = torch.autograd.grad(y.sin().sum(), leaves)
            return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]

    def no_grad() -> Any:
        with torch.no_grad():
            return func.jvp(f, x, d), func.jvp(tangent, x, e)

    def create_graph() -> Any:
        leaves = [a.clone().requires_grad_() for a in x]
        first = torch.autograd.grad((f(*leaves) * g).sum(), leaves, create_graph=True)
        return first + torch.autograd.grad(dot(first, d), leaves)

    def backward_of_a_tangent() -> Any:
        leaves = tuple(a.clone().requires_grad_() for a in x)
        y, slope = func.jvp(f, leaves, d)
        return torch.autograd.grad((y * slope * g).sum(), leaves)

    def batched() -> Any:
        leaves = [a.clone().requires_grad_() for a in x]
        first = torch.autograd.grad(f(*leaves).sin().sum(), leaves, create_graph=True)
        rows = torch.stack([d[0], e[0]])
        return torch.autograd.grad(first[0], leaves, rows, is_grads_batched=True)

    yield "dual", dual
    yield "backward of a dual tangent", dual_backward
    yield "dual of a gradient", dual_of_a_gradient
    yield "no_grad", no_grad
    yield "create_graph", create_graph
    yield "backward of a tangent", backward_of_a_tangent
    yield "is_grads_batched", batched
    yield "jvp(jvp(jvp))", lambda: func.jvp(lambda *x: func.jvp(tangent, x, e)[1], x, c)
    yield (
        "jvp(jvp(jvp)), the directions move",
        lambda: func.jvp(
            lambda x, d: func.jvp(lambda x, d: func.jvp(f, x, d)[1], (x, d), (e, c))[1],
            (x, d),
            (c, e),
        ),
    )
    yield (
        "jvp(jvp(vjp)), the cotangent moves",
        lambda: func.jvp(
            lambda g, *x: func.jvp(lambda g, *x: func.vjp(f, *x)[1](g), (g, *x), (h, *d))[1],
            (g, *x),
            (g.cos(), *e),
        ),
    )
    yield "jvp(jvp(grad))", lambda: func.jvp(lambda *x: func.jvp(slopes, x, d)[1], x, e)
    yield (
        "jvp(grad(jvp))",
        lambda: func.jvp(func.grad(lambda *x: (tangent(*x) * g).sum(), places), x, e),
    )
    yield (
        "grad(jvp(jvp))",
        lambda: func.grad(lambda *x: (func.jvp(tangent, x, e)[1] * g).sum(), places)(*x),
    )
    yield (
        "grad(jvp(grad))",
        lambda: func.grad(lambda *x: dot(func.jvp(slopes, x, d)[1], e), places)(*x),
    )
    yield (
        "grad(grad(grad))",
        lambda: func.grad(
            lambda *x: dot(func.grad(lambda *x: dot(slopes(*x), d), places)(*x), e), places
        )(*x),
    )


def written_out_like(f: Attention, x: Inputs) -> Tensor:
    with torch.no_grad():
        return f(*x)


def of(attention: Attention, options: dict[str, Any]) -> Attention:
    return lambda query, key, value, mask=None: (
        attention(query, key, value, **options)
        if mask is None
        else attention(query, key, value, mask, **options)
    )


NAMES = [
    name for name, _ in nestings(written_out, Draw("names").like((torch.ones(1, 1, 1, 1),) * 3))
]


# The others differ in what a call looks like, which random programs try, too.
FAST = ("trained mask, grouped", "boolean mask", "five dimensions")
OTHERS = [
    pytest.param(n, s, marks=pytest.mark.slow) for n in NAMES for s in SETTINGS if s not in FAST
]


@pytest.mark.parametrize(
    "nesting, setting", [*pairs(NAMES, FAST, each=2, slow=["jacrev(jacrev)"]), *OTHERS]
)
def test_every_nesting(nesting: str, setting: str) -> None:
    shapes, options = SETTINGS[setting]
    draw = Draw(setting)
    x = tuple(draw(*shape) for shape in shapes)
    expected = dict(nestings(of(written_out, options), x))[nesting]()
    with jx.differentiable():
        result = dict(nestings(of(F.scaled_dot_product_attention, options), x))[nesting]()
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)
