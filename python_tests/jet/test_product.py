"""The fused product of two jets against the composed Leibniz rule, values and gradients."""

import pytest
import torch

from jachess_ext.jet.engine.layout import make_layout
from jachess_ext.jet.engine.tensor import JetTensor
from jachess_ext.jet.rules.linear import matmul_jets, products_fuse
from jachess_ext.jet.rules.streamwise import bilinear

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2)]


def factors(q: int, order: int, batch: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    streams = make_layout(q, order).streams
    generator = torch.Generator().manual_seed(0)
    shapes = ((streams, *batch, 4, 3), (streams, *batch, 3, 5))
    a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return a.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize("batch", [(2,), (2, 3), (0, 2)])
@pytest.mark.parametrize(("q", "order"), LAYOUTS)
def test_agrees_with_the_composed_rule(q: int, order: int, batch: tuple[int, ...]) -> None:
    layout = make_layout(q, order)
    a, b = factors(q, order, batch)
    bias = torch.randn(*batch[-1:], 1, 5, dtype=torch.float64, requires_grad=True)
    fused = matmul_jets(JetTensor(a, layout), JetTensor(b, layout), alpha=0.7, bias=bias).streams
    composed = 0.7 * bilinear(torch.matmul, JetTensor(a, layout), JetTensor(b, layout)).streams
    composed = torch.cat([composed[:1] + bias, composed[1:]])
    torch.testing.assert_close(fused, composed)
    cotangent = torch.randn_like(composed)
    got = torch.autograd.grad(fused, (a, b, bias), cotangent)
    expected = torch.autograd.grad(composed, (a, b, bias), cotangent)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_strides_of_attention_heads() -> None:
    """Heads are a transposed view, as in every attention layer."""
    layout = make_layout(2, 2)
    heads = torch.randn(4, 2, 6, 3, 4, dtype=torch.float64, requires_grad=True)
    a = JetTensor(heads.transpose(2, 3), layout)
    b = JetTensor(heads.transpose(2, 3).transpose(-1, -2), layout)
    fused, composed = matmul_jets(a, b).streams, bilinear(torch.matmul, a, b).streams
    torch.testing.assert_close(fused, composed)
    cotangent = torch.randn_like(composed)
    torch.testing.assert_close(
        *(torch.autograd.grad(out, heads, cotangent)[0] for out in (fused, composed))
    )


@pytest.mark.parametrize(("q", "order"), LAYOUTS)
def test_further_backwards_agree_with_the_composed_rule(q: int, order: int) -> None:
    layout = make_layout(q, order)
    found: list[list[torch.Tensor]] = []
    for product in (matmul_jets, lambda a, b: bilinear(torch.matmul, a, b)):
        a, b = factors(q, order, (2, 3))
        out = product(JetTensor(a, layout), JetTensor(b, layout)).streams
        gradients = torch.autograd.grad(out.sum(), (a, b), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in gradients), (a, b))
        found.append([*gradients, *second])
    for g, e in zip(*found, strict=True):
        torch.testing.assert_close(g, e)


def test_what_is_not_covered_is_left_to_the_composed_rule() -> None:
    layout = make_layout(2, 2)
    a, b = (JetTensor(t, layout) for t in factors(2, 2, (2,)))
    assert products_fuse(a, b)
    assert not products_fuse(a, b[:1])
    assert not products_fuse(a, b.to(torch.float32))
    torch.testing.assert_close(torch.matmul(a, b[:1]).primal, a.primal @ b.primal[:1])
