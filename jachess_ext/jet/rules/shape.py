"""Changes of shape, copies and selections: the same on every stream (linear with no constant)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import attribute, jet_rule, missing_rule
from ..tensor import JetTensor, aligned, common_layout
from .streamwise import behind_streams, behind_streams_all, lifted_streams, varargs


@jet_rule("view", "reshape")
def reshape(self: JetTensor, *shape: Any, **named: Any) -> JetTensor:
    shape = shape or tuple(named.values())
    if isinstance(shape[0], torch.dtype):
        raise missing_rule(torch.Tensor.view, "reinterpreting bits has no derivative")
    sizes = varargs(shape[0], shape[1:])
    return self.with_streams(self.streams.reshape(len(self.streams), *sizes))


@jet_rule("view_as", "reshape_as")
def view_as(self: JetTensor, other: Tensor) -> JetTensor:
    return reshape(self, other.shape)


@jet_rule("flatten")
def flatten(input: JetTensor, start_dim: int = 0, end_dim: int = -1) -> JetTensor:
    dims = behind_streams_all((start_dim, end_dim), input.ndim)
    return input.with_streams(input.streams.flatten(*dims))


@jet_rule("unflatten")
def unflatten(self: JetTensor, dim: int, sizes: Any) -> JetTensor:
    return self.with_streams(self.streams.unflatten(behind_streams(dim, self.ndim), sizes))


@jet_rule("transpose", "swapaxes", "swapdims")
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
    order = varargs(*(dims or tuple(named.values()))[:1], (dims or tuple(named.values()))[1:])
    return input.with_streams(input.streams.permute(0, *[d % input.ndim + 1 for d in order]))


@jet_rule("movedim")
def movedim(input: JetTensor, source: Any, destination: Any) -> JetTensor:
    moves = [behind_streams_all(varargs(dims), input.ndim) for dims in (source, destination)]
    return input.with_streams(input.streams.movedim(*moves))


@jet_rule("unsqueeze")
def unsqueeze(input: JetTensor, dim: int) -> JetTensor:
    return input.with_streams(input.streams.unsqueeze(behind_streams(dim, input.ndim + 1)))


@jet_rule("squeeze")
def squeeze(input: JetTensor, dim: Any = None) -> JetTensor:
    if dim is None:
        shape = [size for size in input.shape if size != 1]
        return reshape(input, shape)
    return input.with_streams(
        input.streams.squeeze(tuple(behind_streams_all(varargs(dim), input.ndim)))
    )


@jet_rule("expand")
def expand(self: JetTensor, *sizes: Any) -> JetTensor:
    target = varargs(sizes[0], sizes[1:])
    return self.with_streams(aligned(self, len(target)).expand(len(self.streams), *target))


@jet_rule("expand_as")
def expand_as(self: JetTensor, other: Tensor) -> JetTensor:
    return expand(self, other.shape)


@jet_rule("broadcast_to")
def broadcast_to(input: JetTensor, size: Any) -> JetTensor:
    return expand(input, size)


@jet_rule("repeat")
def repeat(self: JetTensor, *repeats: Any) -> JetTensor:
    counts = varargs(repeats[0], repeats[1:])
    return self.with_streams(aligned(self, len(counts)).repeat(1, *counts))


@jet_rule("repeat_interleave")
def repeat_interleave(
    input: JetTensor, repeats: Any, dim: int | None = None, **named: Any
) -> JetTensor:
    if dim is None:
        input, dim = flatten(input), 0
    streams = input.streams.repeat_interleave(repeats, behind_streams(dim, input.ndim), **named)
    return input.with_streams(streams)


@jet_rule("__getitem__")
def getitem(self: JetTensor, index: Any) -> JetTensor:
    parts = index if isinstance(index, tuple) else (index,)
    if _advanced_indices_are_apart(parts):
        # torch puts the indexed dimensions first in this case, before the streams.
        return self.with_streams(torch.stack([stream[parts] for stream in self.streams]))
    everything = (slice(None),)
    return self.with_streams(self.streams[everything + tuple(parts)])


def _advanced_indices_are_apart(parts: Sequence[Any]) -> bool:
    """True where integer and tensor indices are separated by a slice, None or ellipsis."""
    if not any(isinstance(part, Tensor | list) for part in parts):
        return False
    kinds = [isinstance(part, Tensor | list | int) for part in parts]
    places = [place for place, advanced in enumerate(kinds) if advanced]
    return places[-1] - places[0] + 1 != len(places)


def _selection(name: str) -> None:
    """Functions of ``(input, dim, ...)`` that select along one dimension."""
    function: Callable = getattr(torch, name)

    @jet_rule(name)
    def rule(input: JetTensor, dim: int, *args: Any, **named: Any) -> JetTensor:
        return input.with_streams(
            function(input.streams, behind_streams(dim, input.ndim), *args, **named)
        )


for _name in ("select", "narrow", "index_select"):
    _selection(_name)


@jet_rule("gather")
def gather(input: JetTensor, dim: int, index: Tensor, **named: Any) -> JetTensor:
    everywhere = index.unsqueeze(0).expand(len(input.streams), *index.shape)
    return input.with_streams(
        input.streams.gather(behind_streams(dim, input.ndim), everywhere, **named)
    )


@jet_rule("take_along_dim")
def take_along_dim(input: JetTensor, indices: Tensor, dim: int) -> JetTensor:
    place = behind_streams(dim, input.ndim)
    return input.with_streams(input.streams.take_along_dim(indices.unsqueeze(0), place))


def _each(jet: JetTensor, stacks: Sequence[Tensor]) -> tuple[JetTensor, ...]:
    return tuple(jet.with_streams(stack) for stack in stacks)


@jet_rule("split")
def split(tensor: JetTensor, split_size_or_sections: Any, dim: int = 0, **named: Any) -> Any:
    size = named.get("split_size", split_size_or_sections)
    return _each(tensor, tensor.streams.split(size, behind_streams(dim, tensor.ndim)))


@jet_rule("chunk")
def chunk(input: JetTensor, chunks: int, dim: int = 0) -> Any:
    return _each(input, input.streams.chunk(chunks, behind_streams(dim, input.ndim)))


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
    # torch skips tensors of shape [0], whatever the others' shape; fresh key-value caches are such.
    kept = [tensor for tensor in tensors if tensor.shape != (0,)]
    stacks, jet = lifted_streams(kept or tensors)
    return jet.with_streams(torch.cat(stacks, behind_streams(dim, jet.ndim)))


@jet_rule("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> JetTensor:
    stacks, jet = lifted_streams(tensors)
    return jet.with_streams(torch.stack(stacks, behind_streams(dim, jet.ndim + 1)))


@jet_rule("roll")
def roll(input: JetTensor, shifts: Any, dims: Any = None) -> JetTensor:
    if dims is None:
        return reshape(roll(flatten(input), shifts, 0), input.shape)
    places = behind_streams_all(varargs(dims), input.ndim)
    return input.with_streams(input.streams.roll(varargs(shifts), places))


@jet_rule("flip")
def flip(input: JetTensor, *dims: Any) -> JetTensor:
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
        raise missing_rule(F.pad, f"mode {mode!r} is not covered, only 'constant'")
    streams = F.pad(input.streams, pad)
    if value:
        edge = 1 - F.pad(torch.ones_like(input.primal), pad)
        streams = torch.cat([(streams[0] + value * edge).unsqueeze(0), streams[1:]])
    return input.with_streams(streams)


def _cast(jet: JetTensor, *args: Any, **named: Any) -> JetTensor:
    """``to`` in all its spellings; a jet given as the example stands for its dtype and device."""
    args = tuple(torch.empty((), dtype=a.dtype, device=a.device) if _is_jet(a) else a for a in args)
    return jet.with_streams(jet.streams.to(*args, **named))


def _is_jet(value: Any) -> bool:
    return isinstance(value, JetTensor)


@jet_rule("to")
def to(self: Any, *args: Any, **named: Any) -> Any:
    if not _is_jet(self):  # plain.to(jet)
        example = args[0] if args else named["other"]
        return self.to(dtype=example.dtype, device=example.device)
    if any(isinstance(a, torch.dtype) and not a.is_floating_point for a in args):
        return self.primal.to(*args, **named)  # integers carry no derivative
    return _cast(self, *args, **named)


@jet_rule("type_as")
def type_as(self: Any, other: Tensor) -> Any:
    return to(self, other)


@jet_rule("type")
def type_(self: JetTensor, dtype: Any = None, **named: Any) -> Any:
    return self.primal.type() if dtype is None else to(self, dtype)


@jet_rule("float")
def float_(self: JetTensor, **named: Any) -> JetTensor:
    return _cast(self, torch.float32)


@jet_rule("double")
def double(self: JetTensor, **named: Any) -> JetTensor:
    return _cast(self, torch.float64)


@jet_rule("half")
def half(self: JetTensor, **named: Any) -> JetTensor:
    return _cast(self, torch.float16)


@jet_rule("bfloat16")
def bfloat16(self: JetTensor, **named: Any) -> JetTensor:
    return _cast(self, torch.bfloat16)


@jet_rule("long", "int", "bool")
def integers(self: JetTensor, **named: Any) -> Tensor:
    raise missing_rule(torch.Tensor.long, "a cast to integers has no derivative")


@jet_rule("cuda")
def cuda(self: JetTensor, *args: Any, **named: Any) -> JetTensor:
    return self.with_streams(self.streams.cuda(*args, **named))


@jet_rule("cpu")
def cpu(self: JetTensor, **named: Any) -> JetTensor:
    return self.with_streams(self.streams.cpu())


@jet_rule("contiguous")
def contiguous(self: JetTensor, **named: Any) -> JetTensor:
    return self.with_streams(self.streams.contiguous())


@jet_rule("clone")
def clone(input: JetTensor, **named: Any) -> JetTensor:
    return input.with_streams(input.streams.clone())


@jet_rule("masked_fill")
def masked_fill(input: Any, mask: Tensor, value: Any) -> JetTensor:
    if not _is_jet(input) or _is_jet(value):
        return where(mask, value, input)
    layout = common_layout(input)
    ndim = max(input.ndim, mask.ndim)
    streams = aligned(input, ndim).masked_fill(mask, 0)
    primal = input.primal.masked_fill(mask, value)
    return JetTensor(torch.cat([primal.unsqueeze(0), streams[1:]]), layout)


@jet_rule("where")
def where(condition: Tensor, input: Any = None, other: Any = None, **named: Any) -> JetTensor:
    if isinstance(condition, JetTensor):
        raise missing_rule(torch.where, "the condition must be a plain boolean tensor")
    layout = common_layout(input, other)
    like = input if _is_jet(input) else other
    sides = []
    for side in (input, other):
        if not isinstance(side, Tensor):
            side = torch.as_tensor(side, dtype=like.dtype, device=like.device)
        sides.append(side)
    ndim = max(condition.ndim, sides[0].ndim, sides[1].ndim)
    primal = torch.where(condition, *[s.primal if _is_jet(s) else s for s in sides])
    tangents = [aligned(s, ndim)[1:] if _is_jet(s) else s.new_zeros(()) for s in sides]
    return JetTensor(torch.cat([primal.unsqueeze(0), torch.where(condition, *tangents)]), layout)
