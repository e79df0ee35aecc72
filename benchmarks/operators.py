"""Each operator by itself, forward and backward, against what its memory traffic or products cost.

S = 4 streams (q = 2, second order) at the sizes a step of the shape has.  An operator that is
bound by memory is compared with a copy of as many bytes as it must read and write (each input once,
each output once); attention with as many matrix products of its own sizes, batched in the same way.
Both in the same run; 1 is the floor.  "GB/s" counts those bytes, "GF/s" those products.  Operators
without a compiled kernel for the device are named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.models import Shape
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import Step, interleaved
from jachess_ext import ops

QUESTION = "operators"
Q, STREAMS, EPS = 2, 4, 1e-5
# Products of streams in the jet of one product (Leibniz, S = 4), and in attention: two products
# forward; backward one of them again, and the gradients of both factors of both.
PAIRS = 9
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2 * PAIRS, 5 * PAIRS


@dataclass(frozen=True)
class Case:
    """An operator on its inputs.

    Attributes:
        figure: its name in `jachess_ext.ops`.
        call: from the inputs to the outputs.
        inputs: what it is differentiated by; jets ``[S, ...]``.
        moved: jets read or written, forward and backward; None where products bound it.
    """

    figure: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: list[Tensor]
    moved: tuple[float, float] | None


def cases(shape: Shape, options: Options) -> list[Case]:
    """The operators a layer of the shape uses, and the others at the same sizes."""
    place = {"device": options.device, "dtype": options.dtype}
    rows = (STREAMS, shape.batch, shape.tokens)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, **place).requires_grad_()

    def width() -> Tensor:
        return draw(*rows, shape.width)

    def heads(count: int) -> Tensor:
        wide = torch.randn(*rows, count, shape.width // shape.heads, **place)
        return wide.transpose(2, 3).requires_grad_()

    weight, bias = torch.randn(2, shape.width, **place)
    square = (STREAMS, shape.batch, shape.heads, shape.tokens, shape.tokens)
    causal, keys = shape.family != "bert", shape.key_value_heads or shape.heads
    found = [
        *_pointwise(draw, (*rows, shape.inner)),
        Case(
            "layer_norm_jet",
            lambda x: ops.layer_norm_jet(x, weight, bias, EPS, Q),
            [width()],
            (2, 3),
        ),
        Case("rms_norm_jet", lambda x: ops.rms_norm_jet(x, weight, EPS, Q), [width()], (2, 3)),
        Case(
            "add_layer_norm_jet",
            lambda x, y: ops.add_layer_norm_jet(x, y, weight, bias, EPS, Q),
            [width(), width()],
            (4, 4),
        ),
        Case(
            "add_rms_norm_jet",
            lambda x, y: ops.add_rms_norm_jet(x, y, weight, EPS, Q),
            [width(), width()],
            (4, 4),
        ),
        Case("softmax_jet", lambda x: ops.softmax_jet(x, Q), [draw(*square)], (2, 3)),
        # The primal is not read, and its gradient is zero.
        Case("jet_norms", lambda x: ops.jet_norms(x, Q), [width()], (0.75, 1.75)),
        Case(
            "attention_jet",
            lambda *jets: ops.attention_jet(*jets, q=Q, causal=causal),
            [heads(shape.heads), heads(keys), heads(keys)],
            None,
        ),
    ]
    served = [case for case in found if ops.available(kernel_of(case), options.device)]
    for case in found:
        if case not in served:
            print(f"{case.figure} has no compiled kernel on {options.device}: left out")
    return served


def kernel_of(case: Case) -> str:
    """The norms' kernels add a residual themselves."""
    return case.figure.removeprefix("add_")


def _pointwise(draw: Callable[..., Tensor], size: tuple[int, ...]) -> list[Case]:
    return [
        Case("activation_jet", lambda x: ops.activation_jet(x, "gelu", Q), [draw(*size)], (2, 3)),
        Case(
            "gated_activation_jet",
            lambda g, u: ops.gated_activation_jet(g, u, "silu", Q),
            [draw(*size), draw(*size)],
            (3, 5),
        ),
    ]


def copy_step(like: Tensor, jets: float) -> Step:
    """A copy that reads and writes as many bytes as ``jets`` tensors like ``like`` hold."""
    source = torch.randn(int(jets * like.numel() / 2), device=like.device).to(like.dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def products_step(case: Case, shape: Shape, products: int) -> tuple[Step, float]:
    """``products`` batched products of attention's sizes, and their operations; causal: half."""
    query = case.inputs[0].detach()
    size = query.shape[-1]
    batch = max(query.shape[1] * query.shape[2] // (1 if shape.family == "bert" else 2), 1)
    token = torch.randn(batch, shape.tokens, size, device=query.device).to(query.dtype)
    square = torch.randn(batch, shape.tokens, shape.tokens, device=query.device).to(query.dtype)
    out_token, out_square = torch.empty_like(token), torch.empty_like(square)

    def step() -> None:
        for number in range(products):
            if number % 2:
                torch.bmm(square, token, out=out_token)
            else:
                torch.bmm(token, token.transpose(1, 2), out=out_square)

    return step, 2.0 * products * batch * shape.tokens**2 * size


def backward_step(case: Case) -> Step:
    """The backward alone, of one forward pass."""
    found = case.call(*case.inputs)
    outputs = (found,) if isinstance(found, Tensor) else found
    cotangents = [torch.randn_like(output) for output in outputs]

    def step() -> None:
        torch.autograd.grad(outputs, case.inputs, cotangents, retain_graph=True)

    return step


def forward_step(case: Case) -> Step:
    """The forward alone, without autograd."""
    inputs = [x.detach() for x in case.inputs]
    return lambda: case.call(*inputs)


def measure(shape: Shape, options: Options) -> list[Row]:
    """Two rows per operator: forward and backward."""
    rows = []
    for case in cases(shape, options):
        for way, step in (("forward", forward_step(case)), ("backward", backward_step(case))):
            rows.append(_measure_one(case, way, step, shape, options))
    return rows


def _measure_one(case: Case, way: str, step: Step, shape: Shape, options: Options) -> Row:
    backward = way == "backward"
    if case.moved is None:
        count = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
        floor, work = products_step(case, shape, count)
        unit, baseline = "GF/s", f"{count} products of its sizes"
    else:
        jets, like = case.moved[backward], case.inputs[0].detach()
        floor, work = copy_step(like, jets), float(jets * like.numel() * like.element_size())
        unit, baseline = "GB/s", "copy of as many bytes"
    times = interleaved(
        {"operator": step, "floor": floor}, repeats=options.repeats, device=options.device
    )
    spread, least = times.milliseconds("operator"), times.milliseconds("floor").p50
    ratio = spread.p50 / least
    return Row.of(
        *((QUESTION, shape.name, options.dtype_name), f"{case.figure}, {way}", spread),
        baseline=baseline,
        baseline_p50=least,
        ratio=ratio,
        floor_ratio=ratio,
        note=f"{work / spread.p50 / 1e6:.3g} {unit} against {work / least / 1e6:.3g} {unit}",
    )


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    shapes = ["encoder6-T32", "encoder6-T128", "encoder12-T128", "llama6-T128"]
    options = parse(parser(__doc__, shapes, ["tiny", "llama-tiny"], repeats=21), argv)
    rows = [row for shape in options.shapes for row in measure(shape, options)]
    return finish(rows, "operators", options)


if __name__ == "__main__":
    main(sys.argv[1:])
