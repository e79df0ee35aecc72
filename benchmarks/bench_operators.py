"""Each operator by itself, forward and backward, against what its memory traffic or products cost.

S = 4 streams (q = 2, second order) at the sizes a step of the shape has.  Programs of a group:

    operator    the compiled operator (left out where the device has none)
    floor       a copy of as many bytes as it must read and write (each input once, each output
                once); for attention, as many batched matrix products of its own sizes
    composed    attention by the jet rules without operators, which write T × T tensors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.models import SHAPES, Shape
from benchmarks.common.timing import Step
from benchmarks.conftest import Timed
from jachess_ext import ops
from jachess_ext.jet.layout import composed_rules, make_layout
from jachess_ext.jet.tensor import JetTensor

SIZES = ["encoder6-T32", "encoder6-T128", "encoder12-T128", "llama6-T128"]
QUICK = ["tiny", "llama-tiny"]
Q, STREAMS, EPS = 2, 4, 1e-5
# Products of streams in the jet of one product (Leibniz, S = 4), and in attention: two products
# forward; backward one of them again, and the gradients of both factors of both.
PAIRS = 9
PRODUCTS = {"forward": 2 * PAIRS, "backward": 5 * PAIRS}


@dataclass(frozen=True)
class Operator:
    """How an operator is called, on jets ``[S, *rows, n]`` drawn for it.

    Attributes:
        call: from the jets, the norm's weight and bias, and the shape, to the outputs.
        sizes: what follows ``[S, batch]`` in each jet, from the shape.
        moved: jets read or written, forward and backward; empty where products bound it.
    """

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    sizes: Callable[[Shape], list[tuple[int, ...]]]
    moved: dict[str, float]


def moved(forward: float, backward: float) -> dict[str, float]:
    return {"forward": forward, "backward": backward}


def wide(count: int) -> Callable[[Shape], list[tuple[int, ...]]]:
    return lambda s: [(s.tokens, s.width)] * count


def inner(count: int) -> Callable[[Shape], list[tuple[int, ...]]]:
    return lambda s: [(s.tokens, s.inner)] * count


def heads(shape: Shape) -> list[tuple[int, ...]]:
    keys = shape.key_value_heads or shape.heads
    return [(n, shape.tokens, shape.width // shape.heads) for n in (shape.heads, keys, keys)]


OPERATORS = {
    "activation_jet": Operator(
        lambda x, w, b, s: ops.activation_jet(x, "gelu", Q), inner(1), moved(2, 3)
    ),
    "gated_activation_jet": Operator(
        lambda g, u, w, b, s: ops.gated_activation_jet(g, u, "silu", Q), inner(2), moved(3, 5)
    ),
    "layer_norm_jet": Operator(
        lambda x, w, b, s: ops.layer_norm_jet(x, w, b, EPS, Q), wide(1), moved(2, 3)
    ),
    "rms_norm_jet": Operator(
        lambda x, w, b, s: ops.rms_norm_jet(x, w, EPS, Q), wide(1), moved(2, 3)
    ),
    "add_layer_norm_jet": Operator(
        lambda x, y, w, b, s: ops.add_layer_norm_jet(x, y, w, b, EPS, Q), wide(2), moved(4, 4)
    ),
    "add_rms_norm_jet": Operator(
        lambda x, y, w, b, s: ops.add_rms_norm_jet(x, y, w, EPS, Q), wide(2), moved(4, 4)
    ),
    "softmax_jet": Operator(
        lambda x, w, b, s: ops.softmax_jet(x, Q),
        lambda s: [(s.heads, s.tokens, s.tokens)],
        moved(2, 3),
    ),
    "attention_jet": Operator(
        lambda q, k, v, w, b, s: ops.attention_jet(q, k, v, q=Q, causal=causal(s)), heads, {}
    ),
}


def causal(shape: Shape) -> bool:
    return shape.family != "bert"


def composed_attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """The jet of attention by the composed rules."""
    with composed_rules():
        layout = make_layout(Q, 2).of_a_new_run()  # which remembers that operators are off
    jet: Any = F.scaled_dot_product_attention(
        *(JetTensor(x, layout) for x in (query, key, value)),
        is_causal=causal(shape),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return jet.streams


def draw_jets(operator: Operator, shape: Shape, place: dict[str, Any]) -> list[Tensor]:
    """The operator's jets; heads lie as a model has them, behind the tokens."""
    made = []
    for size in operator.sizes(shape):
        if operator.moved:
            made.append(torch.randn(STREAMS, shape.batch, *size, **place))
        else:
            count, tokens, width = size
            lying = torch.randn(STREAMS, shape.batch, tokens, count, width, **place)
            made.append(lying.transpose(2, 3))
    return [jet.requires_grad_() for jet in made]


def in_one_way(call: Callable[..., Any], jets: list[Tensor], way: str) -> Step:
    """The forward alone, without autograd; or the backward alone, of a forward that is kept."""
    if way == "forward":
        plain = [jet.detach() for jet in jets]
        return lambda: call(*plain)
    found = call(*jets)
    outputs = (found,) if isinstance(found, Tensor) else found
    cotangents = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, jets, cotangents, retain_graph=True)


def copying(like: Tensor, jets: float) -> Step:
    """A copy that reads and writes as many bytes as ``jets`` tensors like ``like`` hold."""
    source = torch.randn(int(jets * like.numel() / 2), device=like.device).to(like.dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def multiplying(query: Tensor, shape: Shape, products: int) -> tuple[Step, float]:
    """So many batched products of attention's sizes, and their operations; causal: half."""
    batch = max(shape.batch * shape.heads // (2 if causal(shape) else 1), 1)
    token = torch.randn(batch, shape.tokens, query.shape[-1]).to(query)
    square = torch.randn(batch, shape.tokens, shape.tokens).to(query)
    out_token, out_square = torch.empty_like(token), torch.empty_like(square)

    def step() -> None:
        for number in range(products):
            if number % 2:
                torch.bmm(square, token, out=out_token)
            else:
                torch.bmm(token, token.transpose(1, 2), out=out_square)

    return step, 2.0 * products * batch * shape.tokens**2 * query.shape[-1]


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize(
    ("figure", "program"),
    [(figure, program) for figure in OPERATORS for program in ("operator", "floor")]
    + [("attention_jet", "composed")],
)
def test_operator(
    timed: Timed, place: dict[str, Any], size: str, figure: str, program: str, way: str
) -> None:
    # The norms' kernels add a residual themselves.
    if not ops.available(figure.removeprefix("add_"), place["device"]):
        pytest.skip(f"{figure} has no compiled kernel on {place['device']}")
    shape, operator = SHAPES[size], OPERATORS[figure]
    jets = draw_jets(operator, shape, place)
    weight, bias = torch.randn(2, shape.width, **place)
    if operator.moved:
        count = operator.moved[way]
        floor, about = copying(jets[0].detach(), count), {"bytes": count * jets[0].nbytes}
    else:
        floor, operations = multiplying(jets[0].detach(), shape, PRODUCTS[way])
        about = {"operations": operations}
    if program == "floor":
        step = floor
    elif program == "composed":
        step = in_one_way(lambda *x: composed_attention(*x, shape), jets, way)
    else:
        step = in_one_way(lambda *x: operator.call(*x, weight, bias, shape), jets, way)
    timed(step, f"{figure}, {way}, {shape.name}", **about)
