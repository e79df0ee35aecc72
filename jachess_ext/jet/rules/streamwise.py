"""Helpers of several families of rules: dimensions, linear and bilinear maps, writes in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...ops.activation import product_jet
from ...ops.library import dispatch_modes, transformed
from ..engine.constants import unmark_constant
from ..engine.strides import copy_before_write, refuse_expanded
from ..engine.tensor import JetTensor, aligned, common_layout, compute_deferred, lift
from ..engine.types import Dims, Operand, T

R = TypeVar("R", bound=Callable[..., Tensor | tuple[Tensor, ...]])


def stack_dim(dim: int, ndim: int) -> int:
    """Convert a dimension of the primal to one of the stack ``[S, ...]``.

    Raises:
        IndexError: ``dim`` is outside ``[-ndim, ndim)``; -ndim-1 would mean the streams.
    """
    if not -ndim <= dim < max(ndim, 1):
        raise IndexError(f"dimension {dim} is out of range for a jet of {ndim} dimensions")
    # Counted from the end, a dimension is the same with and without the streams in front.
    return dim if dim < 0 else dim + 1


def stack_dims(dims: Sequence[int], ndim: int) -> list[int]:
    """Convert several dimensions by `stack_dim`."""
    return [stack_dim(dim, ndim) for dim in dims]


def accept_scalars(rule: R) -> R:
    """Extend a rule to 0-dimensional tensors, for which torch accepts dimensions 0 and -1: they are
    reshaped to vectors of one entry, and the results back."""

    @functools.wraps(rule)
    def on_vector(input: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        if input.ndim:
            return rule(input, *args, **kwargs)
        vectors = {name: _as_vector(value) for name, value in kwargs.items()}
        out = rule(_as_vector(input), *map(_as_vector, args), **vectors)
        if isinstance(out, tuple):  # torch.return_types take a sequence, too
            return type(out)([value.reshape(()) for value in out])
        return out.reshape(())

    return on_vector  # type: ignore[return-value]


def _as_vector(value: object) -> object:
    return value.reshape(1) if isinstance(value, Tensor) and value.ndim == 0 else value


def varargs(*values: T | Sequence[T]) -> list[T]:
    """Return the arguments of ``view(2, 3)`` or ``view((2, 3))`` as a list."""
    sequence = isinstance(values[0], list | tuple)  # torch.Size is a tuple
    return list(cast("Sequence[T]", values[0] if sequence else values))


def reduced_dims(dim: Dims, ndim: int) -> list[int]:
    """Return the dimensions of a reduction; all for None or an empty sequence, as in torch."""
    return ([] if dim is None else varargs(dim)) or [*range(ndim)]


def map_primal_and_tangents(
    jet: JetTensor, primal: Callable[[Tensor], Tensor], tangents: Callable[[Tensor], Tensor]
) -> JetTensor:
    """Apply an affine map ``primal`` to x0, and its linear part to the tangents ``[S-1, ...]``."""
    streams = jet.streams
    return jet.with_streams(torch.cat([primal(streams[0]).unsqueeze(0), tangents(streams[1:])]))


# Composed of `streams[0] + constant` and `cat`, the backward would fill a gradient as large as the
# whole stack for each of the two slices; every bias of a model comes through here.
class _AddToPrimal(torch.autograd.Function):
    """``streams`` with ``constant`` added to stream 0; the backward copies nothing."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, constant: Tensor) -> Tensor:
        ctx.shape = constant.shape
        return add_to_fresh_primal(streams.clone(), constant)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        constant = grad[0].sum_to_size(ctx.shape) if ctx.needs_input_grad[1] else None
        return grad, constant


def add_to_fresh_primal(streams: Tensor, constant: Tensor) -> Tensor:
    """Add a constant to the primal of a new stack without a graph: in place, unless a dispatch mode
    may hold the stack."""
    if dispatch_modes():
        return streams.select_scatter(streams[0] + constant, 0, 0)
    streams[0].add_(constant)
    return streams


def add_to_primal(streams: Tensor, constant: Tensor | complex) -> Tensor:
    """Add a constant to the primal of ``[S, ...]``; each may be broadcast to the other."""
    if isinstance(constant, Tensor) and constant.device == streams.device:
        # The sum must keep the dtype and shape of the stack.
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
    product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, ndim: int | None = None
) -> JetTensor:
    """Apply the Leibniz rule to a product linear in both factors (docs/how_it_works.md, bilinear).

    Args:
        product: multiplies stacks ``[N, ...]`` or ``[1, ...]``, stream by stream.
        a, b: a `JetTensor` each, or a plain tensor (constant).
        ndim: broadcast both to this many dimensions behind the streams.
    """
    layout = common_layout(a, b)
    stacks = [_make_stack(value, ndim) for value in (a, b)]
    if not (isinstance(a, JetTensor) and isinstance(b, JetTensor)):
        # The stack [1, ...] of a constant is broadcast: each stream is multiplied by it.
        return JetTensor(product(*stacks), layout)
    left, right = stacks
    return JetTensor(product_jet(left, right, layout, product), layout)


def _make_stack(value: Tensor, ndim: int | None) -> Tensor:
    """Return the stack ``[S, ...]`` of a jet, or ``[1, ...]`` of a constant, with ``ndim``
    dimensions behind the first."""
    if isinstance(value, JetTensor):
        return value.streams if ndim is None else aligned(value, ndim)
    if ndim is not None and value.ndim < ndim:
        value = value.reshape(*(1,) * (ndim - value.ndim), *value.shape)
    return value.unsqueeze(0)


def write_in_place(target: JetTensor, value: JetTensor) -> JetTensor:
    """Write the streams of ``value`` into the storage of ``target``; views of it change, too."""
    common_layout(target, value)
    prepare_write(target)
    target.streams.copy_(value.streams)
    return target


def prepare_write(target: JetTensor) -> None:
    """Prepare for a write into ``target``: refuse overlapping entries, compute deferred jets, and
    leave the saved streams to the backward."""
    refuse_expanded(target)
    compute_deferred()
    copy_before_write(target)
    unmark_constant(target)


def lift_streams(values: Sequence[Operand]) -> tuple[list[Tensor], JetTensor]:
    """Lift several values to jets; return their stacks, and the first jet."""
    layout = common_layout(*values)
    jets = [lift(value, layout) for value in values]
    return [jet.streams for jet in jets], jets[0]
