"""Helpers for operations that treat every stream alike: linear maps and changes of shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...ops.library import transformed
from ..deferred import make_pending
from ..strides import refuse_expanded, renew_memory
from ..tensor import JetTensor, aligned, common_layout, lift

R = TypeVar("R", bound=Callable[..., Any])


def behind_streams(dim: int, ndim: int) -> int:
    """A dimension of the primal as a dimension of the stack ``[S, ...]``.

    Raises:
        IndexError: as torch does, if ``dim`` is outside ``[-ndim, ndim)``; unchecked, -ndim-1
            would silently mean the stream dimension.
    """
    if not -ndim <= dim < max(ndim, 1):
        raise IndexError(f"dimension {dim} is out of range for a jet of {ndim} dimensions")
    return dim if dim < 0 else dim + 1


def behind_streams_all(dims: Sequence[int], ndim: int) -> list[int]:
    """`behind_streams` for several dimensions."""
    return [behind_streams(dim, ndim) for dim in dims]


def without_dimensions(rule: R) -> R:
    """``rule`` for tensors of no dimension, too, of which torch takes dimensions 0 and -1: there
    it is asked for the tensor as a vector of one entry."""

    @functools.wraps(rule)
    def asked(input: Any, *args: Any, **named: Any) -> Any:
        if input.ndim:
            return rule(input, *args, **named)
        others = [_as_vector(value) for value in args]
        found = rule(_as_vector(input), *others, **{k: _as_vector(v) for k, v in named.items()})
        if isinstance(found, tuple):
            return type(found)([value.reshape(()) for value in found])
        return found.reshape(())

    return asked  # type: ignore[return-value]


def _as_vector(value: Any) -> Any:
    return value.reshape(1) if isinstance(value, Tensor) and value.ndim == 0 else value


def varargs(first: Any, rest: Sequence[Any] = ()) -> list[int]:
    """``view(2, 3)`` and ``view((2, 3))`` alike."""
    if isinstance(first, list | tuple | torch.Size):
        return list(first)
    return [first, *rest]


def on_primal_and_tangents(
    jet: JetTensor, primal: Callable[[Tensor], Tensor], tangents: Callable[[Tensor], Tensor]
) -> JetTensor:
    """An affine map: ``primal`` on x0, its linear part ``tangents`` on the ``[S-1, ...]`` rest."""
    streams = jet.streams
    return jet.with_streams(torch.cat([primal(streams[0]).unsqueeze(0), tangents(streams[1:])]))


class _AddToPrimal(torch.autograd.Function):
    """``streams`` with ``constant`` added to stream 0; the backward copies nothing."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, constant: Tensor) -> Tensor:
        ctx.shape = constant.shape
        out = streams.clone()
        out[0].add_(constant)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        constant = grad[0].sum_to_size(ctx.shape) if ctx.needs_input_grad[1] else None
        return grad, constant


def add_to_primal(streams: Tensor, constant: Tensor | float) -> Tensor:
    """``[S, ...]`` with a constant (broadcast to the primal's shape) added to the primal."""
    if isinstance(constant, Tensor) and constant.device == streams.device:
        same = torch.result_type(streams, constant) == streams.dtype
        fits = torch.broadcast_shapes(streams.shape[1:], constant.shape) == streams.shape[1:]
        if same and fits and not transformed():
            return _AddToPrimal.apply(streams, constant)
    primal = streams[0] + constant
    tangents = streams[1:].to(primal.dtype)
    missing = primal.ndim - (streams.ndim - 1)
    if missing:
        tangents = tangents.reshape(len(tangents), *(1,) * missing, *streams.shape[1:])
    return torch.cat([primal.unsqueeze(0), tangents.expand(len(tangents), *primal.shape)])


def bilinear(
    product: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any, ndim: int | None = None
) -> JetTensor:
    """The Leibniz rule for any product linear in both factors (docs/how_it_works.md, bilinear).

    Args:
        product: takes stacks ``[N, ...]`` or ``[1, ...]`` of both factors, stream by stream.
        a, b: a `JetTensor` each, or a plain tensor (constant).
        ndim: broadcast both to this many dimensions behind the streams.
    """
    layout = common_layout(a, b)
    stacks = [_stack_of(value, ndim) for value in (a, b)]
    if not (isinstance(a, JetTensor) and isinstance(b, JetTensor)):
        return JetTensor(product(*stacks), layout)
    left, right = stacks
    zero = slice(0, 1)
    onto_right = product(left, right[zero])
    onto_left = product(left[zero], right[1:])
    tangents = onto_right[1:] + onto_left
    if not layout.pairs:
        return JetTensor(torch.cat([onto_right[zero], tangents]), layout)
    q = layout.directions
    mixed = [
        product(left[i : i + 1], right[j : j + 1]) + product(left[j : j + 1], right[i : i + 1])
        for i, j, _ in layout.pair_streams()
    ]
    second = tangents[q:] + torch.cat(mixed)
    return JetTensor(torch.cat([onto_right[zero], tangents[:q], second]), layout)


def _stack_of(value: Any, ndim: int | None) -> Tensor:
    if isinstance(value, JetTensor):
        return value.streams if ndim is None else aligned(value, ndim)
    if not isinstance(value, Tensor):
        return value
    if ndim is not None and value.ndim < ndim:
        value = value.reshape(*(1,) * (ndim - value.ndim), *value.shape)
    return value.unsqueeze(0)


def write_in_place(target: JetTensor, value: JetTensor) -> JetTensor:
    """Write ``value`` into the storage of ``target``, which its views share."""
    common_layout(target, value)
    prepare_write(target)
    target.streams.copy_(value.streams)
    return target


def prepare_write(target: JetTensor) -> None:
    """Make what is deferred, and see that backward can go on with what was read before."""
    refuse_expanded(target)
    make_pending()
    renew_memory(target)


def lifted_streams(values: Sequence[Any]) -> tuple[list[Tensor], JetTensor]:
    """The stacks of several values, constants lifted to jets; and one of the jets."""
    layout = common_layout(*values)
    jets = [lift(value, layout) for value in values]
    return [jet.streams for jet in jets], jets[0]
