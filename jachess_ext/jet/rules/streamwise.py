"""Helpers that several families of rules share: dimensions, linear and bilinear maps, writes in
place."""

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
from ..engine.tensor import JetTensor, align_streams, common_layout, compute_deferred, lift
from ..engine.types import Dims, Operand, T

R = TypeVar("R", bound=Callable[..., Tensor | tuple[Tensor, ...]])


def stack_dim(dim: int, ndim: int) -> int:
    """Convert a dimension of the primal to one of the stack ``[S, ...]``.

    Args:
        ndim: the number of dimensions of the primal.

    Raises:
        IndexError: ``dim`` is outside ``[-ndim, ndim)``.
    """
    # In the stack, -ndim - 1 would be the dimension of the streams.
    if not -ndim <= dim < max(ndim, 1):
        raise IndexError(f"dimension {dim} is out of range for a jet of {ndim} dimensions")
    # Counted from the end, a dimension has the same index in the primal and in the stack.
    return dim if dim < 0 else dim + 1


def stack_dims(dims: Sequence[int], ndim: int) -> list[int]:
    """Convert several dimensions by `stack_dim`."""
    return [stack_dim(dim, ndim) for dim in dims]


def accept_scalars(rule: R) -> R:
    """Decorate a rule to accept 0-dimensional tensors, for which torch accepts dimensions 0 and -1.

    The rule is called with vectors of one entry, and its results are reshaped to 0 dimensions.
    """

    @functools.wraps(rule)
    def on_vector(input: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        if input.ndim:
            return rule(input, *args, **kwargs)
        vectors = {name: _as_vector(value) for name, value in kwargs.items()}
        out = rule(_as_vector(input), *map(_as_vector, args), **vectors)
        if isinstance(out, tuple):  # or a type of torch.return_types, which takes a sequence, too
            return type(out)([value.reshape(()) for value in out])
        return out.reshape(())

    return on_vector  # type: ignore[return-value]


def _as_vector(value: object) -> object:
    return value.reshape(1) if isinstance(value, Tensor) and value.ndim == 0 else value


def varargs(*values: T | Sequence[T]) -> list[T]:
    """Return the arguments of ``view(2, 3)`` or ``view((2, 3))`` as a list."""
    is_sequence = isinstance(values[0], list | tuple)  # torch.Size is a tuple
    return list(cast("Sequence[T]", values[0] if is_sequence else values))


def reduced_dims(dim: Dims, ndim: int) -> list[int]:
    """Return the list of dimensions of a reduction; all ``ndim`` dimensions for None or an empty
    sequence, as in torch."""
    return ([] if dim is None else varargs(dim)) or [*range(ndim)]


def map_primal_and_tangents(
    jet: JetTensor, map_primal: Callable[[Tensor], Tensor], map_tangents: Callable[[Tensor], Tensor]
) -> JetTensor:
    """Apply an affine map to a jet.

    Args:
        map_primal: the map, applied to x0.
        map_tangents: its linear part, applied to the tangents ``[S-1, ...]``.
    """
    primal, tangents = map_primal(jet.streams[0]), map_tangents(jet.streams[1:])
    return jet.with_streams(torch.cat([primal.unsqueeze(0), tangents]))


# A Function, since it adds every bias of a model: with `streams[0] + constant` and `cat`, the
# backward would allocate a gradient as large as the whole stack for each of the two slices.
class _AddToPrimal(torch.autograd.Function):
    """Add ``constant`` to stream 0 of ``streams``; the backward copies nothing."""

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
    """Add a constant to the primal of a stack ``[S, ...]``; both are broadcast."""
    if isinstance(constant, Tensor) and constant.device == streams.device:
        # The Function takes only sums with the dtype and shape of the stack.
        keeps_dtype = torch.result_type(streams, constant) == streams.dtype
        keeps_shape = torch.broadcast_shapes(streams.shape[1:], constant.shape) == streams.shape[1:]
        if keeps_dtype and keeps_shape and not transformed():
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
    """Apply Leibniz' rule to a product that is linear in both factors (docs/how_it_works.md,
    bilinear).

    Args:
        product: multiplies stacks ``[N, ...]`` or ``[1, ...]``, stream by stream.
        a, b: the factors; at least one is a `JetTensor`, the other may be a plain tensor.
        ndim: number of dimensions, without that of the streams, to which both factors are extended
            for broadcasting; None: neither is extended.
    """
    layout = common_layout(a, b)
    stacks = [_make_stack(value, ndim) for value in (a, b)]
    if not (isinstance(a, JetTensor) and isinstance(b, JetTensor)):
        # The stack [1, ...] of a constant is broadcast: each stream is multiplied by it.
        return JetTensor(product(*stacks), layout)
    stack_a, stack_b = stacks
    return JetTensor(product_jet(stack_a, stack_b, layout, product), layout)


def _make_stack(value: Tensor, ndim: int | None) -> Tensor:
    """Return the stack ``[S, ...]`` of a jet, or the stack ``[1, ...]`` of a constant.

    Args:
        ndim: number of dimensions after the first; None: as many as ``value`` has.
    """
    if isinstance(value, JetTensor):
        return value.streams if ndim is None else align_streams(value, ndim)
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
    move ``target`` to a new storage if its streams may be saved for backward."""
    refuse_expanded(target)
    compute_deferred()
    copy_before_write(target)
    unmark_constant(target)


def lift_streams(values: Sequence[Operand]) -> tuple[list[Tensor], JetTensor]:
    """Lift several values to jets; return their stacks, and the first jet."""
    layout = common_layout(*values)
    jets = [lift(value, layout) for value in values]
    return [jet.streams for jet in jets], jets[0]
