"""Changes of shape, copies, casts and selections: linear, so the same on every stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.library import transformed
from ..registry import attribute, built_in, general_rule, jet_rule, missing_rule
from ..tensor import JetTensor, aligned, common_layout, primal_of
from .streamwise import (
    behind_streams,
    behind_streams_all,
    lifted_streams,
    on_primal_and_tangents,
    varargs,
    without_dimensions,
)


@jet_rule("view", "reshape")
def reshape(self: JetTensor, *shape: Any, **named: Any) -> JetTensor:
    shape = shape or tuple(named.values())
    if isinstance(shape[0], torch.dtype):
        raise missing_rule(torch.Tensor.view, "reinterpreting bits has no derivative")
    sizes = varargs(shape[0], shape[1:])
    return self.with_streams(self.streams.reshape(len(self.streams), *sizes))


def _as_another(name: str) -> None:
    @jet_rule(f"{name}_as")
    def rule(self: Any, other: Tensor) -> Any:
        """Use only the shape of ``other``, so that a plain ``self`` stays plain."""
        return getattr(self, name)(other.shape)


for _name in ("view", "reshape", "expand"):
    _as_another(_name)


@jet_rule("flatten", "ravel")
def flatten(input: JetTensor, start_dim: int = 0, end_dim: int = -1) -> JetTensor:
    if input.ndim == 0:
        return reshape(input, (1,))
    dims = behind_streams_all((start_dim, end_dim), input.ndim)
    return input.with_streams(input.streams.flatten(*dims))


@jet_rule("unflatten")
def unflatten(self: JetTensor, dim: int, sizes: Any) -> JetTensor:
    return self.with_streams(self.streams.unflatten(behind_streams(dim, self.ndim), sizes))


@jet_rule("transpose", "swapaxes", "swapdims")
@without_dimensions
def transpose(input: JetTensor, dim0: int, dim1: int) -> JetTensor:
    dims = behind_streams_all((dim0, dim1), input.ndim)
    return input.with_streams(input.streams.transpose(*dims))


@jet_rule("t", attribute("T"))
def t(input: JetTensor) -> JetTensor:
    dims = range(input.ndim, 0, -1)
    return input.with_streams(input.streams.permute(0, *dims))


@jet_rule(attribute("mT"))
def m_t(self: JetTensor) -> JetTensor:
    return self.with_streams(self.streams.mT)


@jet_rule("permute")
def permute(input: JetTensor, *dims: Any, **named: Any) -> JetTensor:
    dims = dims or tuple(named.values())
    order = behind_streams_all(varargs(dims[0], dims[1:]), input.ndim)
    return input.with_streams(input.streams.permute(0, *order))


@jet_rule("movedim", "moveaxis")
@without_dimensions
def movedim(input: JetTensor, source: Any, destination: Any) -> JetTensor:
    moves = [behind_streams_all(varargs(dims), input.ndim) for dims in (source, destination)]
    return input.with_streams(input.streams.movedim(*moves))


@jet_rule("unsqueeze")
def unsqueeze(input: JetTensor, dim: int) -> JetTensor:
    return input.with_streams(input.streams.unsqueeze(behind_streams(dim, input.ndim + 1)))


@jet_rule("squeeze")
@without_dimensions
def squeeze(input: JetTensor, dim: Any = None) -> JetTensor:
    if dim is None:
        shape = [size for size in input.shape if size != 1]
        return reshape(input, shape)
    return input.with_streams(
        input.streams.squeeze(tuple(behind_streams_all(varargs(dim), input.ndim)))
    )


@jet_rule("expand")
def expand(self: JetTensor, *sizes: Any, size: Any = None, implicit: bool = False) -> JetTensor:
    sizes = sizes if size is None else (size,)
    target = varargs(sizes[0], sizes[1:])
    return self.with_streams(aligned(self, len(target)).expand(len(self.streams), *target))


@jet_rule("broadcast_to")
def broadcast_to(input: JetTensor, size: Any) -> JetTensor:
    return expand(input, size)


@jet_rule("repeat")
def repeat(self: JetTensor, *sizes: Any, repeats: Any = None) -> JetTensor:
    sizes = sizes if repeats is None else (repeats,)
    counts = varargs(sizes[0], sizes[1:])
    return self.with_streams(aligned(self, len(counts)).repeat(1, *counts))


@jet_rule("tile")
def tile(input: JetTensor, *dims: Any) -> JetTensor:
    counts = varargs(dims[0], dims[1:])
    return repeat(input, [1] * (input.ndim - len(counts)) + counts)


@jet_rule("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple:
    several: list[Any] = varargs(tensors[0], tensors[1:])
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in several])
    return tuple(tensor.expand(shape) for tensor in several)


@jet_rule(Tensor.unfold)
def unfold(self: JetTensor, dimension: int, size: int, step: int) -> Any:
    if self.ndim == 0:
        return unfold(flatten(self), 0, size, step)[0]
    streams = self.streams.unfold(behind_streams(dimension, self.ndim), size, step)
    return self.with_streams(streams)


@jet_rule(torch.linalg.diagonal)
def linalg_diagonal(A: JetTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return torch.diagonal(A, offset, dim1, dim2)


def _at_least(name: str) -> None:
    function: Callable = getattr(torch, name)

    @jet_rule(function, built_in(name))
    def rule(*tensors: Any) -> Any:
        if len(tensors) > 1 or isinstance(tensors[0], list | tuple):
            return tuple(rule(tensor) for tensor in varargs(tensors[0], tensors[1:]))
        (tensor,) = tensors
        if not _is_jet(tensor):
            return function(tensor)
        return reshape(tensor, function(tensor.primal).shape)


for _name in ("atleast_1d", "atleast_2d", "atleast_3d"):
    _at_least(_name)


@jet_rule(torch.meshgrid, built_in("meshgrid"))
def meshgrid(*tensors: Any, indexing: str = "ij") -> Any:
    """Return torch's grids, without its warning about the default of ``indexing``."""
    several: list[Any] = varargs(tensors[0], tensors[1:])
    if indexing == "xy" and len(several) > 1:
        several[:2] = several[1::-1]
    shape = [tensor.numel() for tensor in several]
    grids = [
        tensor.reshape([-1 if n == place else 1 for n in range(len(shape))]).expand(shape)
        for place, tensor in enumerate(several)
    ]
    if indexing == "xy" and len(grids) > 1:
        grids[:2] = grids[1::-1]
    return tuple(grids)


@jet_rule("diagonal")
def diagonal(input: JetTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> JetTensor:
    dims = behind_streams_all((dim1, dim2), input.ndim)
    return input.with_streams(input.streams.diagonal(offset, *dims))


@jet_rule("repeat_interleave")
def repeat_interleave(
    input: JetTensor, repeats: Any, dim: int | None = None, **named: Any
) -> JetTensor:
    if dim is None or input.ndim == 0:
        input, dim = flatten(input), 0
    streams = input.streams.repeat_interleave(repeats, behind_streams(dim, input.ndim), **named)
    return input.with_streams(streams)


@jet_rule("__getitem__")
def getitem(self: JetTensor, index: Any) -> JetTensor:
    if isinstance(index, list) and any(isinstance(part, _OF_VIEWS) for part in index):
        index = tuple(index)  # as torch does
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(int(part) if _is_a_number(part) else part for part in parts)
    if not all(map(_is_plain_index, parts)) or _tensors_are_apart(parts):
        return self.with_streams(torch.stack([stream[index] for stream in self.streams]))
    everything = (slice(None),)
    return self.with_streams(self.streams[everything + tuple(parts)])


def _is_a_number(part: Any) -> bool:
    """Return whether it is a tensor that torch reads as a number, so that the result is a view."""
    if not isinstance(part, Tensor) or part.ndim or transformed() or torch.compiler.is_compiling():
        return False
    return part.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


_OF_VIEWS = (slice, type(None), type(Ellipsis))


def _is_plain_index(part: Any) -> bool:
    """Return whether it means the same behind another dimension.

    Lists, arrays, True and the like are given to torch for each stream.
    """
    kinds = (Tensor, Integral, *_OF_VIEWS)
    return isinstance(part, kinds) and not isinstance(part, bool)


def _tensors_are_apart(parts: Sequence[Any]) -> bool:
    """Return whether a slice, None or ellipsis separates integer and tensor indices: torch then
    puts the indexed dimensions first, before the streams."""
    if not any(isinstance(part, Tensor) for part in parts):
        return False
    kinds = [isinstance(part, Tensor | Integral) for part in parts]
    places = [place for place, advanced in enumerate(kinds) if advanced]
    return places[-1] - places[0] + 1 != len(places)


def _selection(name: str) -> None:
    """Register a function of ``(input, dim, ...)`` that selects along one dimension."""
    function: Callable = getattr(torch, name)

    @jet_rule(name)
    @without_dimensions
    def rule(input: JetTensor, dim: int, *args: Any, **named: Any) -> JetTensor:
        return input.with_streams(
            function(input.streams, behind_streams(dim, input.ndim), *args, **named)
        )


for _name in ("select", "narrow", "index_select"):
    _selection(_name)


@jet_rule("gather")
def gather(input: JetTensor, dim: int, index: Tensor, **named: Any) -> JetTensor:
    if input.ndim == 0:
        return reshape(gather(flatten(input), dim, index.reshape(-1)), index.shape)
    everywhere = index.expand(len(input.streams), *index.shape)
    return input.with_streams(
        input.streams.gather(behind_streams(dim, input.ndim), everywhere, **named)
    )


@jet_rule("take_along_dim")
def take_along_dim(input: JetTensor, indices: Tensor, dim: int | None = None) -> JetTensor:
    if dim is None:
        return take_along_dim(flatten(input), indices.flatten(), 0)
    place = behind_streams(dim, input.ndim)
    return input.with_streams(input.streams.take_along_dim(indices.unsqueeze(0), place))


def _each(jet: JetTensor, stacks: Sequence[Tensor]) -> tuple[JetTensor, ...]:
    return tuple(jet.with_streams(stack) for stack in stacks)


def _split_along(name: str, dim: int) -> None:
    @jet_rule(name)
    def rule(input: JetTensor, indices_or_sections: Any) -> Any:
        place = 0 if input.ndim == 1 and name == "hsplit" else dim
        getattr(torch, name)(input.primal, indices_or_sections)  # checks what torch checks
        return tensor_split(input, indices_or_sections, place)


for _name, _dim in (("hsplit", 1), ("vsplit", 0), ("dsplit", 2)):
    _split_along(_name, _dim)


@jet_rule("split")
def split(
    tensor: JetTensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None
) -> Any:
    """Accept ``split_size``, the name of the second argument in ``Tensor.split``."""
    size = split_size_or_sections if split_size is None else split_size
    return _each(tensor, tensor.streams.split(size, behind_streams(dim, tensor.ndim)))


@jet_rule("split_with_sizes")
def split_with_sizes(input: JetTensor, split_sizes: Any, dim: int = 0) -> Any:
    return split(input, list(split_sizes), dim)


@jet_rule("chunk")
def chunk(input: JetTensor, chunks: int, dim: int = 0) -> Any:
    return _each(input, input.streams.chunk(chunks, behind_streams(dim, input.ndim)))


def _written_alone(name: str, rule: Callable) -> None:
    """Register an unsafe split, into whose parts torch allows writes, unlike those of a split."""

    @jet_rule(name)
    def views(input: JetTensor, *args: Any, **named: Any) -> Any:
        parts = [part.streams for part in rule(input, *args, **named)]
        return tuple(
            input.with_streams(
                input.streams.as_strided(part.shape, part.stride(), part.storage_offset())
            )
            for part in parts
        )


for _name, _rule in (
    ("unsafe_split", split),
    ("unsafe_split_with_sizes", split_with_sizes),
    ("unsafe_chunk", chunk),
):
    _written_alone(_name, _rule)


@jet_rule("tensor_split")
def tensor_split(input: JetTensor, indices_or_sections: Any, dim: int = 0) -> Any:
    place = behind_streams(dim, input.ndim)
    return _each(input, input.streams.tensor_split(indices_or_sections, place))


@jet_rule("unbind")
def unbind(input: JetTensor, dim: int = 0) -> Any:
    return _each(input, input.streams.unbind(behind_streams(dim, input.ndim)))


@jet_rule("__iter__")
def iterate(self: JetTensor) -> Any:
    return iter(unbind(self))


@jet_rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Any], dim: int = 0) -> JetTensor:
    # torch skips tensors of shape [0], such as fresh key-value caches, but not their dtypes.
    kept = [tensor for tensor in tensors if tensor.shape != (0,)]
    stacks, jet = lifted_streams(kept or tensors)
    out = torch.cat(stacks, behind_streams(dim, jet.ndim))
    return jet.with_streams(out.to(reduce(torch.promote_types, (t.dtype for t in tensors))))


@jet_rule("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> JetTensor:
    stacks, jet = lifted_streams(tensors)
    return jet.with_streams(torch.stack(stacks, behind_streams(dim, jet.ndim + 1)))


@jet_rule("roll")
def roll(input: JetTensor, shifts: Any, dims: Any = None) -> JetTensor:
    if dims in (None, (), []):
        return reshape(roll(flatten(input), shifts, 0), input.shape)
    places = behind_streams_all(varargs(dims), input.ndim)
    return input.with_streams(input.streams.roll(varargs(shifts), places))


@jet_rule("flip")
@without_dimensions
def flip(input: JetTensor, *dims: Any, **named: Any) -> JetTensor:
    dims = dims or tuple(named.values())
    places = behind_streams_all(varargs(dims[0], dims[1:]), input.ndim)
    return input.with_streams(input.streams.flip(places))


def _triangle(name: str) -> None:
    function: Callable = getattr(torch, name)

    @jet_rule(name)
    def rule(input: JetTensor, diagonal: int = 0) -> JetTensor:
        return input.with_streams(function(input.streams, diagonal))


for _name in ("tril", "triu"):
    _triangle(_name)


@jet_rule("pad")
def pad(
    input: JetTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> JetTensor:
    if mode != "constant":
        rule = general_rule(F.pad, f"mode {mode!r} is not covered, only 'constant'")
        return rule(input, pad, mode, value)
    if not value:
        return input.with_streams(F.pad(input.streams, pad))
    return on_primal_and_tangents(
        input, lambda primal: F.pad(primal, pad, value=value), lambda rest: F.pad(rest, pad)
    )


def _cast(jet: JetTensor, *args: Any, **named: Any) -> JetTensor:
    """Call ``to`` on the stack; a jet as an argument stands for its dtype and device."""
    args = tuple(torch.empty((), dtype=a.dtype, device=a.device) if _is_jet(a) else a for a in args)
    return jet.with_streams(jet.streams.to(*args, **named))


def _is_jet(value: Any) -> bool:
    return isinstance(value, JetTensor)


@jet_rule("to")
def to(self: Any, *args: Any, **named: Any) -> Any:
    named.pop("memory_format", None)  # it counts the primal's dimensions
    if not _is_jet(self):  # plain.to(jet)
        example = args[0] if args else named["other"]
        return self.to(dtype=example.dtype, device=example.device)
    given = [getattr(a, "dtype", a) for a in (*args, *named.values())]
    dtypes = [dtype for dtype in given if isinstance(dtype, torch.dtype)]
    if any(not dtype.is_floating_point and not dtype.is_complex for dtype in dtypes):
        return self.primal.to(*args, **named)  # integers carry no derivative
    return _cast(self, *args, **named)


@jet_rule("type_as")
def type_as(self: Any, other: Tensor) -> Any:
    return to(self, other)


@jet_rule("type")
def type_(self: JetTensor, dtype: Any = None, **named: Any) -> Any:
    if dtype is None:
        return self.primal.type()
    return to(self, dtype if isinstance(dtype, torch.dtype) else self.primal[:0].type(dtype).dtype)


def _cast_to(name: str) -> None:
    @jet_rule(name)
    def rule(self: JetTensor, **named: Any) -> JetTensor:
        return self.with_streams(getattr(self.streams, name)())


for _name in ("float", "double", "half", "bfloat16", "cfloat", "cdouble", "cpu"):
    _cast_to(_name)


@jet_rule("cuda")
def cuda(self: JetTensor, *args: Any, **named: Any) -> JetTensor:
    return self.with_streams(self.streams.cuda(*args, **named))


@jet_rule("contiguous")
def contiguous(self: JetTensor, **named: Any) -> JetTensor:
    if self.primal.is_contiguous(**named):
        return self
    return self.with_streams(self.streams.contiguous())


@jet_rule("clone")
def clone(input: JetTensor, **named: Any) -> JetTensor:
    return input.with_streams(input.streams.clone())


@jet_rule("masked_fill")
def masked_fill(input: Any, mask: Tensor, value: Any) -> JetTensor:
    if not _is_jet(input) or _is_jet(value):
        fill = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=input.dtype)
        return where(mask, fill, input)
    wide = input.with_streams(aligned(input, max(input.ndim, mask.ndim)))
    return on_primal_and_tangents(
        wide, lambda primal: primal.masked_fill(mask, value), lambda rest: rest.masked_fill(mask, 0)
    )


@jet_rule(Tensor.where)
def where_method(self: Any, condition: Tensor, other: Any) -> JetTensor:
    return where(condition, self, other)


@jet_rule(torch.where)
def where(condition: Tensor, input: Any = None, other: Any = None) -> JetTensor:
    if isinstance(condition, JetTensor):
        raise missing_rule(torch.where, "the condition must be a plain boolean tensor")
    layout = common_layout(input, other)
    sides = [primal_of(input), primal_of(other)]
    plain: Any = torch.where  # for mypy: one overload returns a tuple
    primal: Tensor = plain(condition, *sides)
    if primal.dtype.is_complex:  # torch has no gradient for a real side of a complex result
        sides = [s.to(primal.dtype) if isinstance(s, Tensor) else s for s in sides]
        primal = plain(condition, *sides)
    shape = (layout.streams - 1, *primal.shape)
    zero = primal.new_zeros(())
    tangents = [_tangents(side, primal) if _is_jet(side) else zero for side in (input, other)]
    rest: Tensor = torch.where(condition, tangents[0], tangents[1]).expand(shape)
    return JetTensor(torch.cat([primal.unsqueeze(0), rest]), layout)


def _tangents(jet: JetTensor, primal: Tensor) -> Tensor:
    """Return x_i and x_ij in the dtype of a result's primal, to broadcast against it."""
    return aligned(jet, primal.ndim)[1:].to(primal.dtype)
