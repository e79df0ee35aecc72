"""Attention whose bias carries derivatives, alone or beside others, with every kind of mask.

The oracle is attention written out, differentiated by nested `torch.func.jvp` and torch's backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import jachess_ext as jx
from jachess_ext.jet import composed_rules
from python_tests.jet.drawn import randn

ACTIVE = [flags for flags in product([False, True], repeat=4) if any(flags)]
HEADS = (2, 4, 5, 6)
KEYS = (2, 4, 3, 6)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    groups = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    if groups > 1:
        k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        hidden = bias.dtype == torch.bool
        scores = scores.masked_fill(~bias, -math.inf) if hidden else scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -math.inf)
    return scores.softmax(-1) @ v


class Case:
    """Attention as a function of those of query, key, value and bias that carry derivatives."""

    def __init__(
        self,
        active: tuple[bool, ...] = (True, True, True, True),
        bias: tuple[int, ...] = (1, 4, 5, 3),
        *,
        heads: tuple[int, ...] = HEADS,
        keys: tuple[int, ...] = KEYS,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        shapes = (heads, keys, keys, bias)
        self.given = [randn(*shape, seed=n) for n, shape in enumerate(shapes)]
        self.places = [n for n, flag in enumerate(active) if flag]
        self.points = tuple(self.given[n].clone().requires_grad_() for n in self.places)
        self.steps = tuple(randn(2, *self.given[n].shape, seed=9 + n) for n in self.places)
        self.options: dict[str, Any] = {"is_causal": causal, "scale": scale}
        self.grouped = len(heads) > 2 and heads[-3] != keys[-3]

    def _all(self, tensors: tuple[Any, ...]) -> list[Any]:
        full: list[Any] = list(self.given)
        for place, tensor in zip(self.places, tensors, strict=True):
            full[place] = tensor
        return full

    def fused(self, *tensors: Any) -> Any:
        q, k, v, bias = self._all(tensors)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, enable_gqa=self.grouped, **self.options
        )

    def plain(self, *tensors: Any) -> Tensor:
        return written_out(*self._all(tensors), *self.options.values())

    def derivatives(self) -> tuple[Tensor, Tensor, Tensor]:
        """Value, first along u, second along u and w, by torch."""
        u, w = (tuple(step[n] for step in self.steps) for n in range(2))

        def first(*x: Tensor) -> Tensor:
            return torch.func.jvp(self.plain, x, u)[1]

        second = torch.func.jvp(first, self.points, w)[1]
        return self.plain(*self.points), first(*self.points), second

    def check(self, *, composed: bool = False) -> None:
        value, first, second = self.derivatives()
        expected = self._gradients(value, first, second)
        with composed_rules() if composed else nullcontext():
            jet = jx.jet(self.fused, self.points, self.steps)
            same(jet.primal, value)
            same(jet.first[0], first)
            same(jet.second[0], second)
            same(self._gradients(jet.primal, jet.first[0], jet.second[0]), expected)
            u = tuple(step[0] for step in self.steps)
            output, tangent = jx.jvp(self.fused, self.points, u)
            same((output, tangent), (value, first))
            same(self._gradients(output, tangent), self._gradients(value, first))
            output, tangent = jx.jvp(self.fused, self.points, u, differentiable=False)
            same((output, tangent), (value, first))
            assert not tangent.requires_grad
            same(self._gradients(output), self._gradients(value))

    def _gradients(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        loss = sum(((n + 1) * out).sin().sum() for n, out in enumerate(outputs))
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, self.points, retain_graph=True)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def _letters(active: tuple[bool, ...]) -> str:
    return "".join(letter for letter, flag in zip("qkvb", active, strict=True) if flag)


@pytest.mark.parametrize("active", ACTIVE, ids=_letters)
def test_every_choice_of_what_moves(active: tuple[bool, ...]) -> None:
    Case(active).check()
    if active in (ACTIVE[0], ACTIVE[-1]):
        Case(active).check(composed=True)


@pytest.mark.parametrize("shape", [(4, 5, 3), (1, 3), (2, 1, 1, 3), (5, 1)])
def test_shapes_of_a_bias(shape: tuple[int, ...]) -> None:
    Case(bias=shape, scale=0.3).check()
    Case((False, False, False, True), shape).check()


@pytest.mark.parametrize(
    "heads, keys, bias",
    [((2, 4, 5, 6), (2, 2, 3, 6), (4, 5, 3)), ((4, 5, 6), (4, 3, 6), (5, 3)),
     ((5, 6), (3, 6), (5, 3)), ((1, 2, 4, 5, 6), (1, 2, 4, 3, 6), (4, 5, 3))],
    ids=["grouped", "3-d", "2-d", "5-d"],
)  # fmt: skip
def test_shapes_of_heads(heads: Any, keys: Any, bias: Any) -> None:
    Case(bias=bias, heads=heads, keys=keys).check()


@contextmanager
def torch_may_refuse_both() -> Iterator[None]:
    """A mask and is_causal."""
    try:
        yield
    except RuntimeError as error:
        if "Explicit attn_mask should not be set when is_causal=True" not in str(error):
            raise


@pytest.mark.parametrize("moving", ["q", "qkv"])
@pytest.mark.parametrize(
    "composed, kind", [(False, "boolean"), (False, "additive"), (True, "boolean")]
)
def test_a_mask_beside_is_causal(composed: bool, kind: str, moving: str) -> None:
    """torch heeds both; from 2.15 on it refuses them."""
    case = Case((True, moving == "qkv", moving == "qkv", False), (5, 3), causal=True)
    if kind == "boolean":
        case.given[3] = torch.tensor([True, True, False]).expand(5, 3)
    with torch_may_refuse_both():
        case.check(composed=composed)


def test_a_bias_that_moves_beside_is_causal() -> None:
    """torch takes both or refuses, depending on which of its kernels serves the call."""
    with torch_may_refuse_both():
        Case(bias=(5, 3), causal=True).check()


def test_hidden_entries_of_a_bias() -> None:
    """−inf in a bias that moves: what was there before counts for nothing."""
    case = Case()
    hidden = torch.tensor([False, True, False])
    for name in ("fused", "plain"):
        whole = getattr(case, name)

        def hiding(*x: Any, whole: Any = whole) -> Any:
            return whole(*x[:3], x[3].masked_fill(hidden, -math.inf))

        setattr(case, name, hiding)
    case.check()


def test_dropout_is_one_mask() -> None:
    """Linear in the bias' step, with one mask for value and tangents."""
    case = Case((False, False, True, True))
    case.options["dropout_p"] = 0.5
    eye = torch.eye(3, dtype=torch.float64).expand(2, 4, 3, 3).clone()
    case.given[2], case.points = eye, (eye, case.points[1])  # so that the output is the weights
    steps = (torch.zeros(2, *eye.shape, dtype=torch.float64), case.steps[1])
    torch.manual_seed(0)
    jet = jx.jet(case.fused, case.points, steps)
    kept = jet.primal != 0
    assert kept.any() and not kept.all()
    case.options = {"is_causal": False, "scale": None}
    case.steps = steps
    for found, whole in zip(
        (jet.primal, jet.first[0], jet.second[0]), case.derivatives(), strict=True
    ):
        same(found, torch.where(kept, 2 * whole, 0.0))


def test_within_transforms() -> None:
    case = Case()
    u = tuple(step[0] for step in case.steps)

    def both(*x: Tensor) -> Tensor:
        return torch.stack(jx.jvp(case.fused, x, u))

    points = tuple(point.detach() for point in case.points)
    many = tuple(torch.stack([point, 2 * point]) for point in points)
    same(vmap(both)(*many), torch.stack([both(*(x[n] for x in many)) for n in range(2)]))
    expected = torch.autograd.grad(both(*case.points).sin().sum(), case.points)
    same(grad(lambda *x: both(*x).sin().sum(), argnums=(0, 1, 2, 3))(*points), expected)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive_and_a_causal_mask(scale: float) -> None:
    """Torch's own kernel of the CPU is NaN there (torch 2.10 to 2.15): 0 or −1 times −∞."""
    case = Case(causal=True, bias=(1, 4, 5, 3))
    case.options["scale"] = scale
    q, k, v, _ = case.points
    jet = jx.jet(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, scale=scale),
        (q[..., :3, :], k, v),
        tuple(torch.ones_like(x)[None] for x in (q[..., :3, :], k, v)),
    )
    expected = written_out(q[..., :3, :], k, v, None, True, scale)
    same(jet.primal, expected)


@pytest.mark.parametrize("dimensions", [3, 4])
def test_dropout_of_everything(dimensions: int) -> None:
    q = randn(1, 2, 5, 4, seed=0)[:, 0] if dimensions == 3 else randn(1, 2, 5, 4, seed=0)
    q.requires_grad_()

    def attend(q: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=1.0) + q.sin()

    value, tangent = jx.jvp(attend, (q,), (torch.ones_like(q),))
    same((value, tangent), (q.sin(), q.cos()))
    same(jx.jvp(attend, (q,), (torch.ones_like(q),), differentiable=False)[1], q.cos())
    with jx.differentiable():
        (slope,) = torch.autograd.grad(attend(q).sum(), q, create_graph=True)
    same(torch.autograd.grad(slope.sum(), q)[0], -q.sin())
