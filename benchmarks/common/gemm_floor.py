"""The floor under a step: its matrix products alone, at the machine's own rate.

A jet of S streams multiplies S times the rows of every linear layer forward, and twice that
backward (for the input's and the weight's gradient); attention's two products per head count S
times forward and 2 S times backward as well.  That is a lower bound for attention, whose jet of a
product of two jets needs 9 products where S = 4.  Causal products count half.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .models import Batch, Shape
from .timing import Step


@dataclass(frozen=True)
class _Linear:
    rows: int
    inputs: int
    outputs: int


def linear_products(model: nn.Module, batch: Batch) -> Counter[_Linear]:
    """How often a forward pass multiplies which shapes, token-wise linear layers only."""
    seen: Counter[_Linear] = Counter()

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        if args[0].ndim == 3:  # poolers and heads see one token a row
            rows = args[0].shape[0] * args[0].shape[1]
            seen[_Linear(rows, args[0].shape[-1], output.shape[-1])] += 1

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def floor_step(model: nn.Module, batch: Batch, shape: Shape, streams: int) -> Step:
    """A step that does nothing but the matrix products of ``streams`` streams."""
    parameter = next(model.parameters())
    place = {"device": parameter.device, "dtype": parameter.dtype}
    linear = [
        (_linear_operands(key, streams, place), count)
        for key, count in linear_products(model, batch).items()
    ]
    heads = max(streams * shape.batch * shape.heads // (1 if shape.family == "bert" else 2), 1)
    attention = _attention_operands(heads, shape, place)

    def step() -> None:
        for operands, count in linear:
            for _ in range(count):
                _multiply_linear(*operands)
        for _ in range(shape.layers):
            _multiply_attention(*attention)

    return step


def _linear_operands(key: _Linear, streams: int, place: dict[str, Any]) -> tuple[Tensor, ...]:
    rows = streams * key.rows
    x, weight = (
        torch.randn(rows, key.inputs, **place),
        torch.randn(key.outputs, key.inputs, **place),
    )
    y = torch.randn(rows, key.outputs, **place)
    return x, weight, y, torch.empty_like(y), torch.empty_like(x), torch.empty_like(weight)


def _multiply_linear(
    x: Tensor, weight: Tensor, grad: Tensor, out: Tensor, grad_x: Tensor, grad_weight: Tensor
) -> None:
    torch.mm(x, weight.t(), out=out)
    torch.mm(grad, weight, out=grad_x)
    torch.mm(grad.t(), x, out=grad_weight)


def _attention_operands(heads: int, shape: Shape, place: dict[str, Any]) -> tuple[Tensor, ...]:
    size = shape.width // shape.heads
    token = torch.randn(heads, shape.tokens, size, **place)
    square = torch.randn(heads, shape.tokens, shape.tokens, **place)
    return token, square, torch.empty_like(token), torch.empty_like(square)


def _multiply_attention(
    token: Tensor, square: Tensor, out_token: Tensor, out_square: Tensor
) -> None:
    for _ in range(2):  # q kᵀ forward, ∂weights backward
        torch.bmm(token, token.transpose(1, 2), out=out_square)
    for _ in range(4):  # weights·v forward; ∂v, ∂q, ∂k backward
        torch.bmm(square, token, out=out_token)
