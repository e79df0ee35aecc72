"""Linear maps: one product for all streams, the bias on the primal only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import general_rule, jet_rule
from ..tensor import JetTensor
from .product import matmul_jets, products_fuse
from .quantised import is_quantised, quantised_linear
from .stacked_linear import stacked_linear
from .streamwise import (
    add_to_primal,
    behind_streams,
    behind_streams_all,
    bilinear,
    varargs,
    write_in_place,
)


@jet_rule("linear")
def linear(input: JetTensor, weight: Tensor, bias: Tensor | None = None) -> JetTensor:
    if not isinstance(input, JetTensor) or isinstance(weight, JetTensor):
        out: Any = torch.matmul(input, weight.mT if weight.ndim > 1 else weight)
        return out if bias is None else out + bias
    if is_quantised(weight):
        return quantised_linear(input, weight, bias)
    if weight.ndim == 1:
        row = None if bias is None else bias.reshape(1)
        return linear(input, weight.unsqueeze(0), row).squeeze(-1)  # type: ignore[return-value]
    if isinstance(bias, JetTensor):
        return linear(input, weight) + bias  # type: ignore[return-value]
    return input.with_streams(stacked_linear(input.streams, weight, bias))


@jet_rule("addmm")
def addmm(input: Tensor, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> JetTensor:
    """``beta·input + alpha·mat1 @ mat2``; GPT-2's Conv1D."""
    plain = not isinstance(input, JetTensor) and not isinstance(mat2, JetTensor)
    if plain and alpha == beta == 1 and input.ndim == 1:
        return linear(mat1, mat2.mT, input)
    return beta * input + alpha * torch.matmul(mat1, mat2)  # type: ignore[return-value]


@jet_rule("baddbmm")
def baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1
) -> JetTensor:
    product: Any = torch.bmm(batch1, batch2)
    return alpha * product if beta == 0 else beta * input + alpha * product


@jet_rule("matmul", "bmm", "mm", "mv", "dot", "__matmul__")
def matmul(input: Any, other: Any) -> JetTensor:
    if input.ndim < 2 or other.ndim < 2:
        return _matmul_with_vector(input, other)
    if isinstance(input, JetTensor) and not isinstance(other, JetTensor) and other.ndim == 2:
        return linear(input, other.mT)
    if products_fuse(input, other):
        return matmul_jets(input, other)
    return bilinear(torch.matmul, input, other, ndim=max(input.ndim, other.ndim))


def _matmul_with_vector(a: Any, b: Any) -> JetTensor:
    """Row or column vectors become matrices, and the extra dimension is dropped again."""
    row = a.unsqueeze(0) if a.ndim == 1 else a
    column = b.unsqueeze(-1) if b.ndim == 1 else b
    out: Any = matmul(row, column)
    if b.ndim == 1:
        out = out.squeeze(-1)
    return out.squeeze(-1 if b.ndim == 1 else -2) if a.ndim == 1 else out


jet_rule(torch.Tensor.__rmatmul__)(lambda self, other: matmul(other, self))


@jet_rule("einsum")
def einsum(equation: str, *operands: Any) -> JetTensor:
    """One or two operands; the streams are one more batch index of each."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) > 2:
        rule = general_rule(torch.einsum, "more than two operands; contract them two at a time")
        return rule(equation, *operands)
    if len(operands) == 1:
        jet = operands[0]
        return jet.with_streams(torch.stack([torch.einsum(equation, s) for s in jet.streams]))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return _by_rows(lambda x, y: torch.einsum(equation, x, y), a, b)

    return bilinear(product, *operands)


def _by_rows(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """The product of every row of two stacks, ``[N, ...]`` or ``[1, ...]`` each."""
    count = max(len(a), len(b))
    return torch.stack([product(a[i % len(a)], b[i % len(b)]) for i in range(count)])


def _convolution(name: str) -> None:
    function: Callable = getattr(F, name)

    @jet_rule(name)
    def rule(
        input: JetTensor, weight: Tensor, bias: Any = None, *args: Any, **named: Any
    ) -> JetTensor:
        if bias is not None and any(isinstance(t, JetTensor) for t in (weight, bias)):
            active = isinstance(input, JetTensor) or isinstance(weight, JetTensor)
            out: Any = (rule if active else function)(input, weight, None, *args, **named)
            return out + bias.reshape(-1, *(1,) * (weight.ndim - 2))
        if isinstance(weight, JetTensor):
            return bilinear(
                lambda x, w: _by_rows(lambda a, b: function(a, b, None, *args, **named), x, w),
                input,
                weight,
            )
        batched = input.ndim == weight.ndim
        streams = input.streams.flatten(0, 1) if batched else input.streams
        out = function(streams, weight, None, *args, **named)
        out = out.unflatten(0, (len(input.streams), -1)) if batched else out
        if bias is not None:
            out = add_to_primal(out, bias.reshape(-1, *(1,) * (weight.ndim - 2)))
        return input.with_streams(out)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
for _name in (*_CONVOLUTIONS, *_TRANSPOSED):
    _convolution(_name)


def _pooling(name: str, spatial: int) -> None:
    """Averages over windows of the last ``spatial`` dimensions."""
    function: Callable = getattr(F, name)

    @jet_rule(name)
    def rule(input: JetTensor, *args: Any, **named: Any) -> JetTensor:
        streams = input.streams.reshape(-1, 1, *input.shape[-spatial:])
        out = function(streams, *args, **named)
        shape = (len(input.streams), *input.shape[:-spatial], *out.shape[2:])
        return input.with_streams(out.reshape(shape))


for _name in (f"{_kind}avg_pool{_n}d" for _kind in ("", "adaptive_") for _n in (1, 2, 3)):
    _pooling(_name, int(_name[-2]))


def _reduce_dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or dim == () or dim == [] or ndim == 0:
        return list(range(1, ndim + 1))
    return behind_streams_all(varargs(dim), ndim)


def _reduction(name: str) -> None:
    function: Callable = getattr(torch, name)

    @jet_rule(name)
    def rule(
        input: JetTensor,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
        axis: Any = None,
        keepdims: bool = False,
    ) -> JetTensor:
        """``axis`` and ``keepdims`` are NumPy's names, which torch takes too."""
        dims = _reduce_dims(dim if axis is None else axis, input.ndim)
        keepdim = keepdim or keepdims
        if input.ndim == 0:
            return input.with_streams(input.streams.to(dtype) if dtype else input.streams.clone())
        return input.with_streams(function(input.streams, dims, keepdim=keepdim, dtype=dtype))


for _name in ("sum", "mean"):
    _reduction(_name)


@jet_rule("cumsum")
def cumsum(input: JetTensor, dim: int, *, dtype: Any = None) -> JetTensor:
    if input.ndim == 0:
        return input.with_streams(input.streams.to(dtype or input.dtype, copy=True))
    place = behind_streams(dim, input.ndim)
    return input.with_streams(input.streams.cumsum(place, dtype=dtype))


@jet_rule("dropout")
def dropout(
    input: JetTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> JetTensor:
    """One mask for all streams of a step, drawn as torch draws it for the primal.

    ``train`` is torch.dropout's name for ``training``.
    """
    if not (training and train) or p == 0:
        return input
    mask = F.dropout(torch.ones_like(input.primal), p, True)
    out = input.with_streams(input.streams * mask)
    return write_in_place(input, out) if inplace else out
