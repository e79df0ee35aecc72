"""Changes of shape, copies, casts and selections: linear functions, applied to every stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from ...ops.library import transformed
from ...torch_private import functional as F
from ..engine.errors import missing_rule
from ..engine.registry import attribute, built_in_functions, general_rule, jet_rule
from ..engine.tensor import JetTensor, align_streams, common_layout, primal_of
from ..engine.types import Dims, Operand
from .streamwise import (
    accept_scalars,
    lift_streams,
    map_primal_and_tangents,
    stack_dim,
    stack_dims,
    varargs,
)

Sizes: TypeAlias = "int | Sequence[int]"
Tensors: TypeAlias = "Tensor | Sequence[Tensor]"
Jets: TypeAlias = tuple[JetTensor, ...]


@jet_rule("view", "reshape")
def reshape(self: JetTensor, *shape: Sizes, **kwargs: Sizes) -> JetTensor:
    sizes = varargs(*shape, *kwargs.values())
    if sizes and isinstance(sizes[0], torch.dtype):
        raise missing_rule(torch.Tensor.view, "reinterpreting bits has no derivative")
    return self.with_streams(self.streams.reshape(len(self.streams), *sizes))


def register_shape_like(name: str) -> None:
    """Register ``view_as``, ``reshape_as`` or ``expand_as``, which use only the shape of the other
    tensor."""

    @jet_rule(f"{name}_as")
    def rule(self: Tensor, other: Tensor) -> Tensor:
        return getattr(self, name)(other.shape)


for _name in ("view", "reshape", "expand"):
    register_shape_like(_name)


@jet_rule("flatten", "ravel")
def flatten(input: JetTensor, start_dim: int = 0, end_dim: int = -1) -> JetTensor:
    if input.ndim == 0:
        return reshape(input, (1,))
    dims = stack_dims((start_dim, end_dim), input.ndim)
    return input.with_streams(input.streams.flatten(*dims))


@jet_rule("unflatten")
def unflatten(self: JetTensor, dim: int, sizes: Sequence[int]) -> JetTensor:
    return self.with_streams(self.streams.unflatten(stack_dim(dim, self.ndim), sizes))


@jet_rule("transpose", "swapaxes", "swapdims")
@accept_scalars
def transpose(input: JetTensor, dim0: int, dim1: int) -> JetTensor:
    dims = stack_dims((dim0, dim1), input.ndim)
    return input.with_streams(input.streams.transpose(*dims))


@jet_rule("t", attribute("T"))
def t(input: JetTensor) -> JetTensor:
    return input.with_streams(input.streams.permute(0, *range(input.ndim, 0, -1)))


@jet_rule(attribute("mT"))
def m_t(self: JetTensor) -> JetTensor:
    return self.with_streams(self.streams.mT)


@jet_rule("permute")
def permute(input: JetTensor, *dims: Sizes, **kwargs: Sizes) -> JetTensor:
    order = stack_dims(varargs(*dims, *kwargs.values()), input.ndim)
    return input.with_streams(input.streams.permute(0, *order))


@jet_rule("movedim", "moveaxis")
@accept_scalars
def movedim(input: JetTensor, source: Sizes, destination: Sizes) -> JetTensor:
    moves = [stack_dims(varargs(dims), input.ndim) for dims in (source, destination)]
    return input.with_streams(input.streams.movedim(*moves))


@jet_rule("unsqueeze")
def unsqueeze(input: JetTensor, dim: int) -> JetTensor:
    return input.with_streams(input.streams.unsqueeze(stack_dim(dim, input.ndim + 1)))


@jet_rule("squeeze")
@accept_scalars
def squeeze(input: JetTensor, dim: Dims = None) -> JetTensor:
    if dim is None:
        return reshape(input, [size for size in input.shape if size != 1])
    stack_axes = tuple(stack_dims(varargs(dim), input.ndim))
    return input.with_streams(input.streams.squeeze(stack_axes))


@jet_rule("expand")
def expand(self: JetTensor, *sizes: Sizes, implicit: bool = False, **kwargs: Sizes) -> JetTensor:
    target = varargs(*sizes, *kwargs.values())
    return self.with_streams(align_streams(self, len(target)).expand(len(self.streams), *target))


@jet_rule("broadcast_to")
def broadcast_to(input: JetTensor, size: Sequence[int]) -> JetTensor:
    return expand(input, size)


@jet_rule("repeat")
def repeat(self: JetTensor, *sizes: Sizes, **kwargs: Sizes) -> JetTensor:
    counts = varargs(*sizes, *kwargs.values())
    return self.with_streams(align_streams(self, len(counts)).repeat(1, *counts))


@jet_rule("tile")
def tile(input: JetTensor, *dims: Sizes) -> JetTensor:
    counts = varargs(*dims)
    return repeat(input, [1] * (input.ndim - len(counts)) + counts)


@jet_rule("broadcast_tensors")
def broadcast_tensors(*tensors: Tensors) -> tuple[Tensor, ...]:
    operands = varargs(*tensors)
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in operands])
    return tuple(tensor.expand(shape) for tensor in operands)


@jet_rule(Tensor.unfold)
def unfold(self: JetTensor, dimension: int, size: int, step: int) -> Tensor:
    if self.ndim == 0:
        return unfold(flatten(self), 0, size, step)[0]
    streams = self.streams.unfold(stack_dim(dimension, self.ndim), size, step)
    return self.with_streams(streams)


@jet_rule(torch.linalg.diagonal)
def linalg_diagonal(A: JetTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    return torch.diagonal(A, offset, dim1, dim2)


def register_atleast(name: str) -> None:
    """Register ``atleast_1d``, ``atleast_2d`` or ``atleast_3d``, which take one or several
    tensors."""
    function: Callable = getattr(torch, name)

    @jet_rule(function, built_in_functions(name))
    def rule(*tensors: Tensors) -> Tensor | tuple[object, ...]:
        tensor = tensors[0]
        if len(tensors) > 1 or not isinstance(tensor, Tensor):
            return tuple(map(rule, varargs(*tensors)))
        if not isinstance(tensor, JetTensor):
            return function(tensor)
        return reshape(tensor, function(tensor.primal).shape)


for _name in ("atleast_1d", "atleast_2d", "atleast_3d"):
    register_atleast(_name)


@jet_rule(torch.meshgrid, built_in_functions("meshgrid"))
def meshgrid(*tensors: Tensors, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the same grids as torch, without torch's warning about the default of ``indexing``."""
    axes = varargs(*tensors)
    if indexing == "xy":  # compute the grids of (y, x, ...); the first two are swapped back below
        axes[:2] = axes[1::-1]
    shape = [axis.numel() for axis in axes]
    grids = [
        axis.reshape([-1 if n == number else 1 for n in range(len(shape))]).expand(shape)
        for number, axis in enumerate(axes)
    ]
    if indexing == "xy":
        grids[:2] = grids[1::-1]
    return tuple(grids)


@jet_rule("diagonal")
def diagonal(input: JetTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> JetTensor:
    dims = stack_dims((dim1, dim2), input.ndim)
    return input.with_streams(input.streams.diagonal(offset, *dims))


@jet_rule("repeat_interleave")
def repeat_interleave(
    input: JetTensor, repeats: Tensor | int, dim: int | None = None, **kwargs: int | None
) -> JetTensor:
    if dim is None or input.ndim == 0:
        input, dim = flatten(input), 0
    stack_axis = stack_dim(dim, input.ndim)
    return input.with_streams(input.streams.repeat_interleave(repeats, stack_axis, **kwargs))


@jet_rule("__getitem__")
def getitem(self: JetTensor, index: object) -> JetTensor:
    if isinstance(index, list) and any(isinstance(entry, _SLICES) for entry in index):
        index = tuple(index)  # as torch does
    entries: tuple[object, ...] = index if isinstance(index, tuple) else (index,)
    entries = tuple(int(entry) if _is_scalar_index(entry) else entry for entry in entries)
    if not all(map(_is_plain_index, entries)) or _indices_are_separated(entries):
        return self.with_streams(torch.stack([stream[index] for stream in self.streams]))  # type: ignore[index]
    # One view of the stack, since torch's result is a view: a write into it changes the jet.
    stack_index = (slice(None), *entries)
    return self.with_streams(self.streams[stack_index])  # type: ignore[index]


def _is_scalar_index(item: object) -> TypeGuard[Tensor]:
    """Return whether an item of an index is a 0-dimensional integer tensor whose value can be
    read."""
    # It cannot be read inside a transform of torch.func, and would break a compiled graph.
    if not isinstance(item, Tensor) or item.ndim or transformed() or torch.compiler.is_compiling():
        return False
    return item.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


_SLICES = (slice, type(None), type(Ellipsis))


def _is_plain_index(index: object) -> bool:
    """Return whether an index may be applied to the whole stack ``[S, ...]``, shifted one dimension
    to the right, with the same result.

    Other indices (lists, arrays, True) are applied to each stream separately.
    """
    return isinstance(index, (Tensor, Integral, *_SLICES)) and not isinstance(index, bool)


def _indices_are_separated(indices: Sequence[object]) -> bool:
    """Return whether a slice, None or ellipsis stands between integer and tensor indices.

    torch then moves the indexed dimensions to the front, before the streams.
    """
    if not any(isinstance(index, Tensor) for index in indices):
        return False
    numbers = [n for n, index in enumerate(indices) if isinstance(index, Tensor | Integral)]
    return numbers[-1] - numbers[0] + 1 != len(numbers)


def register_selection(name: str) -> None:
    """Register ``select``, ``narrow`` or ``index_select``, whose arguments are ``(input, dim,
    ...)``."""
    function: Callable = getattr(torch, name)

    @jet_rule(name)
    @accept_scalars
    def rule(input: JetTensor, dim: int, *args: object, **kwargs: object) -> JetTensor:
        stack_axis = stack_dim(dim, input.ndim)
        return input.with_streams(function(input.streams, stack_axis, *args, **kwargs))


for _name in ("select", "narrow", "index_select"):
    register_selection(_name)


@jet_rule("gather")
def gather(input: JetTensor, dim: int, index: Tensor, **kwargs: bool) -> JetTensor:
    if input.ndim == 0:
        return reshape(gather(flatten(input), dim, index.reshape(-1)), index.shape)
    # The index needs as many dimensions as the stack: it is expanded along the streams.
    indices = index.expand(len(input.streams), *index.shape)
    stack_axis = stack_dim(dim, input.ndim)
    return input.with_streams(input.streams.gather(stack_axis, indices, **kwargs))


@jet_rule("take_along_dim")
def take_along_dim(input: JetTensor, indices: Tensor, dim: int | None = None) -> JetTensor:
    if dim is None:
        return take_along_dim(flatten(input), indices.flatten(), 0)
    stack_axis = stack_dim(dim, input.ndim)
    return input.with_streams(input.streams.take_along_dim(indices.unsqueeze(0), stack_axis))


def _make_jets(jet: JetTensor, stacks: Sequence[Tensor]) -> Jets:
    """Return a jet for each stack, with the layout of ``jet``."""
    return tuple(jet.with_streams(stack) for stack in stacks)


def register_axis_split(name: str, dim: int) -> None:
    """Register ``hsplit``, ``vsplit`` or ``dsplit``, which is `tensor_split` along ``dim``; hsplit
    splits a vector along dimension 0."""

    @jet_rule(name)
    def rule(input: JetTensor, indices_or_sections: Sizes) -> Jets:
        split_dim = 0 if input.ndim == 1 and name == "hsplit" else dim
        getattr(torch, name)(input.primal, indices_or_sections)  # for torch's checks
        return tensor_split(input, indices_or_sections, split_dim)


for _name, _dim in (("hsplit", 1), ("vsplit", 0), ("dsplit", 2)):
    register_axis_split(_name, _dim)


@jet_rule("split")
def split(
    tensor: JetTensor, split_size_or_sections: Dims = None, dim: int = 0, *, split_size: Dims = None
) -> Jets:
    """Split a jet; ``split_size`` is the name that ``Tensor.split`` has for
    ``split_size_or_sections``."""
    size = split_size_or_sections if split_size is None else split_size
    return _make_jets(tensor, tensor.streams.split(size, stack_dim(dim, tensor.ndim)))


@jet_rule("split_with_sizes")
def split_with_sizes(input: JetTensor, split_sizes: Sequence[int], dim: int = 0) -> Jets:
    return split(input, list(split_sizes), dim)


@jet_rule("chunk")
def chunk(input: JetTensor, chunks: int, dim: int = 0) -> Jets:
    return _make_jets(input, input.streams.chunk(chunks, stack_dim(dim, input.ndim)))


def register_unsafe_split(name: str, rule: Callable[..., Jets]) -> None:
    """Register an ``unsafe`` version of a split, whose results may be written into.

    Args:
        rule: the rule of the split.
    """

    @jet_rule(name)
    def views(input: JetTensor, *args: object, **kwargs: object) -> Jets:
        # Each view is made by a separate call, since autograd allows no write into several views
        # from one call.
        stacks = [jet.streams for jet in rule(input, *args, **kwargs)]
        return _make_jets(
            input,
            [input.streams.as_strided(s.shape, s.stride(), s.storage_offset()) for s in stacks],
        )


for _name, _rule in (
    ("unsafe_split", split),
    ("unsafe_split_with_sizes", split_with_sizes),
    ("unsafe_chunk", chunk),
):
    register_unsafe_split(_name, _rule)


@jet_rule("tensor_split")
def tensor_split(input: JetTensor, indices_or_sections: Sizes, dim: int = 0) -> Jets:
    stack_axis = stack_dim(dim, input.ndim)
    return _make_jets(input, input.streams.tensor_split(indices_or_sections, stack_axis))


@jet_rule("unbind")
def unbind(input: JetTensor, dim: int = 0) -> Jets:
    return _make_jets(input, input.streams.unbind(stack_dim(dim, input.ndim)))


jet_rule("__iter__")(lambda self: iter(unbind(self)))


@jet_rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> JetTensor:
    # torch skips tensors of shape [0], such as empty key-value caches, but not their dtypes.
    nonempty = [tensor for tensor in tensors if tensor.shape != (0,)]
    stacks, jet = lift_streams(nonempty or tensors)
    out = torch.cat(stacks, stack_dim(dim, jet.ndim))
    return jet.with_streams(out.to(reduce(torch.promote_types, (t.dtype for t in tensors))))


@jet_rule("stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> JetTensor:
    stacks, jet = lift_streams(tensors)
    return jet.with_streams(torch.stack(stacks, stack_dim(dim, jet.ndim + 1)))


@jet_rule("roll")
def roll(input: JetTensor, shifts: Sizes, dims: Dims = None) -> JetTensor:
    if dims in (None, (), []):
        return reshape(roll(flatten(input), shifts, 0), input.shape)
    stack_axes = stack_dims(varargs(dims), input.ndim)
    return input.with_streams(input.streams.roll(varargs(shifts), stack_axes))


@jet_rule("flip")
@accept_scalars
def flip(input: JetTensor, *dims: Sizes, **kwargs: Sizes) -> JetTensor:
    stack_axes = stack_dims(varargs(*dims, *kwargs.values()), input.ndim)
    return input.with_streams(input.streams.flip(stack_axes))


def register_triangle(name: str) -> None:
    """Register ``tril`` or ``triu``."""
    function: Callable = getattr(torch, name)

    @jet_rule(name)
    def rule(input: JetTensor, diagonal: int = 0) -> JetTensor:
        return input.with_streams(function(input.streams, diagonal))


for _name in ("tril", "triu"):
    register_triangle(_name)


@jet_rule("pad")
def pad(
    input: JetTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> JetTensor:
    if mode != "constant":
        rule = general_rule(F.pad, f"mode {mode!r} is not covered, only 'constant'")
        return rule(input, pad, mode, value)
    if not value:
        return input.with_streams(F.pad(input.streams, pad))
    return map_primal_and_tangents(
        input, lambda primal: F.pad(primal, pad, value=value), lambda tangents: F.pad(tangents, pad)
    )


@jet_rule("to", "type_as")
def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Cast or move a jet; a cast to an integer dtype returns the plain primal.

    In ``to(other)``, one of the two tensors may be plain.
    """
    kwargs.pop("memory_format", None)  # it would not fit the dimensions of the stack
    if not isinstance(self, JetTensor):  # plain.to(jet)
        example = args[0] if args else kwargs["other"]
        return self.to(dtype=example.dtype, device=example.device)
    targets = [getattr(value, "dtype", value) for value in (*args, *kwargs.values())]
    dtypes = [dtype for dtype in targets if isinstance(dtype, torch.dtype)]
    if any(not dtype.is_floating_point and not dtype.is_complex for dtype in dtypes):
        return self.primal.to(*args, **kwargs)  # integers carry no derivative
    args = tuple(
        torch.empty((), dtype=a.dtype, device=a.device) if isinstance(a, JetTensor) else a
        for a in args
    )
    return self.with_streams(self.streams.to(*args, **kwargs))


@jet_rule("type")
def type_(self: JetTensor, dtype: str | torch.dtype | None = None, **kwargs: bool) -> str | Tensor:
    if dtype is None:
        return self.primal.type()
    return to(self, dtype if isinstance(dtype, torch.dtype) else self.primal[:0].type(dtype).dtype)


def register_cast(name: str) -> None:
    """Register a method that casts or moves a tensor."""

    @jet_rule(name)
    def rule(self: JetTensor, *args: object, **kwargs: object) -> JetTensor:
        kwargs.pop("memory_format", None)  # it would not fit the dimensions of the stack
        return self.with_streams(getattr(self.streams, name)(*args, **kwargs))


for _name in ("float", "double", "half", "bfloat16", "cfloat", "cdouble", "cpu", "cuda"):
    register_cast(_name)


@jet_rule("contiguous")
def contiguous(self: JetTensor, **kwargs: torch.memory_format) -> JetTensor:
    if self.primal.is_contiguous(**kwargs):
        return self  # as torch does: a write into the result changes the jet
    # `strides.match_torch_layout` applies the memory format afterwards.
    return self.with_streams(self.streams.contiguous())


@jet_rule("clone")
def clone(input: JetTensor, **kwargs: torch.memory_format) -> JetTensor:
    return input.with_streams(input.streams.clone())


@jet_rule("masked_fill")
def masked_fill(input: Tensor, mask: Tensor, value: Operand) -> JetTensor:
    if not isinstance(input, JetTensor) or isinstance(value, JetTensor):
        # A number gets the dtype of the input, to which `where` might not promote.
        fill = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=input.dtype)
        return where(mask, fill, input)
    return map_primal_and_tangents(
        input.with_streams(align_streams(input, max(input.ndim, mask.ndim))),
        lambda primal: primal.masked_fill(mask, value),
        lambda tangents: tangents.masked_fill(mask, 0),
    )


@jet_rule(torch.where)
def where(
    condition: Tensor, input: Operand | None = None, other: Operand | None = None
) -> JetTensor:
    if isinstance(condition, JetTensor):
        raise missing_rule(torch.where, "the condition must be a plain boolean tensor")
    layout = common_layout(input, other)
    select = cast("Callable[..., Tensor]", torch.where)  # one of its overloads returns a tuple
    sides = [primal_of(input), primal_of(other)]
    primal = select(condition, *sides)
    if primal.dtype.is_complex:  # torch has no gradient for a real side of a complex result
        sides = [s.to(primal.dtype) if isinstance(s, Tensor) else s for s in sides]
        primal = select(condition, *sides)
    # A constant side has zero tangents, which are broadcast.
    zero = primal.new_zeros(())
    side_tangents = [
        _align_tangents(s, primal) if isinstance(s, JetTensor) else zero for s in (input, other)
    ]
    tangents = select(condition, *side_tangents).expand(layout.streams - 1, *primal.shape)
    return JetTensor(torch.cat([primal.unsqueeze(0), tangents]), layout)


jet_rule(Tensor.where)(lambda self, condition, other: where(condition, self, other))


def _align_tangents(jet: JetTensor, primal: Tensor) -> Tensor:
    """Return all streams of a jet except its primal, in the dtype of a result's ``primal`` and
    aligned for broadcasting with it."""
    return align_streams(jet, primal.ndim)[1:].to(primal.dtype)
