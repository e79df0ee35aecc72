"""Functions that return plain values of the primal (comparisons, metadata), creation of buffers,
and writes in place.

Import this file after those of the out-of-place rules, which the rules of in-place functions call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ...ops.library import dispatch_modes
from ..engine.errors import missing_rule
from ..engine.registry import attribute, general_rule, jet_rule, require_rule, spellings
from ..engine.strides import copy_before_write, record_storage, refuse_overlap
from ..engine.tensor import JetTensor, lift, primal_of, to_tensor
from ..engine.types import Function, Index, Operand
from .streamwise import (
    accept_scalars,
    lift_streams,
    map_primal_and_tangents,
    prepare_write,
    stack_dim,
)

_COMPARISONS = spellings(
    *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__"),
    *("__gt__", "__ge__", "equal", "allclose", "isclose", "isnan", "isinf", "isfinite"),
    *("logical_not", "logical_and", "logical_or", "signbit", "sign", "round", "floor", "ceil"),
    *("greater", "greater_equal", "less", "less_equal", "not_equal", "bucketize", "searchsorted"),
    *("argmax", "argmin", "argsort", "all", "any", "count_nonzero", "nonzero"),
    *("long", "int", "short", "bool", "result_type"),
    *("item", "tolist", "__bool__", "__float__", "__int__"),
)
_FACTORY = spellings("ones_like", "rand_like", "randn_like", "new_ones", "new_tensor", "bernoulli")
_METADATA = spellings(
    *("is_floating_point", "is_complex", "is_conj", "is_neg", "is_contiguous", "stride", "numel"),
    *("element_size", "get_device", "nelement", "is_same_size", "is_tensor", "__format__", "dim"),
)
_ATTRIBUTES = [
    attribute(name)
    for name in ("is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "layout", "grad")
    + ("is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes", "is_xla", "is_xpu")
    if hasattr(torch.Tensor, name)
]


def _call_on_primals(function: Function) -> Function:
    """Return the rule that calls a function on the primals of its arguments."""

    def rule(*args: object, **kwargs: object) -> object:
        return function(*primal_of(args), **primal_of(kwargs))

    return rule


for _function in [*_COMPARISONS, *_FACTORY, *_METADATA, *_ATTRIBUTES]:
    jet_rule(_function, kind="value")(_call_on_primals(_function))


@jet_rule("detach", attribute("data"))
def detach(self: JetTensor) -> Tensor:
    """Return the primal, which shares the jet's storage, so that later writes change both."""
    if self.jet_layout.jet_pass is not None:
        if dispatch_modes():
            copy_before_write(self)  # not possible once the storage is shared
        self.jet_layout.jet_pass.is_detached = True
        record_storage(self, self.jet_layout.jet_pass.aliased)
    return self.primal.detach()


if hasattr(torch, "_nested_tensor_from_mask_left_aligned"):

    @jet_rule(torch._nested_tensor_from_mask_left_aligned)
    def left_aligned(*args: object) -> bool:
        """Return False, so that torch.nn.TransformerEncoder does not use nested tensors."""
        return False


@jet_rule("requires_grad_")
def requires_grad_(self: JetTensor, requires_grad: bool = True) -> JetTensor:
    """Set ``requires_grad`` of the stack; gradient checkpointing calls it for hidden states."""
    self.streams.requires_grad_(requires_grad)
    return self


# ---- buffers ---------------------------------------------------------------------------------
#
# A model creates tensors like its hidden states, and fills them.  These are jets, constants of the
# pass (`constants.py`), since a jet cannot be written into a plain tensor.


def register_buffer_factory(name: str) -> None:
    """Register a function such as ``zeros_like``, which returns a constant."""
    function: Callable[..., Tensor] = getattr(torch, name, None) or getattr(Tensor, name)

    @jet_rule(name)
    def rule(input: JetTensor, *args: object, **kwargs: object) -> Tensor:
        kwargs.pop("memory_format", None)
        return input.make_constant(function(input.primal, *args, **kwargs))


for _name in ("zeros_like", "new_zeros", "empty_like", "new_empty", "full_like", "new_full"):
    register_buffer_factory(_name)


def register_indexed_write(name: str) -> None:
    """Register ``index_add`` or ``index_copy``, which write a source at indices along a
    dimension."""
    function: Callable[..., Tensor] = getattr(torch, name)

    @jet_rule(name)
    @accept_scalars
    def rule(input: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: float) -> JetTensor:
        (stack, source_stack), jet = lift_streams((input, source))
        stack_axis = stack_dim(dim, input.ndim)
        return jet.with_streams(function(stack, stack_axis, index, source_stack, **kwargs))


for _name in ("index_add", "index_copy"):
    register_indexed_write(_name)


@jet_rule("scatter_add")
@accept_scalars
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> JetTensor:
    (stack, source_stack), jet = lift_streams((input, src))
    indices = index.expand(len(stack), *index.shape)
    return jet.with_streams(stack.scatter_add(stack_dim(dim, input.ndim), indices, source_stack))


@jet_rule("scatter_reduce")
def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **kwargs: bool
) -> Tensor:
    if reduce == "prod":  # torch's forward mode is silently 0 there
        raise missing_rule(torch.scatter_reduce, 'reduce="prod"; take the logarithm, and "sum" it')
    return general_rule(torch.scatter_reduce, "")(input, dim, index, src, reduce, **kwargs)


@jet_rule(torch.scatter, Tensor.scatter)
@accept_scalars
def scatter(
    input: Tensor, dim: int, index: Tensor, src: Operand | None = None, **kwargs: Operand
) -> JetTensor:
    """Write the tensor ``src``, or a number, which may be given as ``src`` or as ``value``."""
    source = kwargs.pop("value", src)
    if kwargs or source is None or isinstance(index, JetTensor):
        raise missing_rule(torch.scatter, "covered are (input, dim, index, src) and (…, value)")
    stack_axis = stack_dim(dim, input.ndim)
    if not isinstance(source, Tensor):
        return map_primal_and_tangents(
            cast(JetTensor, input),
            lambda primal: primal.scatter(dim, index, source),
            lambda tangents: tangents.scatter(
                stack_axis, index.expand(len(tangents), *index.shape), 0
            ),
        )
    (stack, source_stack), jet = lift_streams((input, source))
    return jet.with_streams(
        stack.scatter(stack_axis, index.expand(len(stack), *index.shape), source_stack)
    )


# ---- writes in place -------------------------------------------------------------------------
#
# The result of the out-of-place rule is written into the jet's storage, so that its views change,
# too; autograd's version counter detects a write into a saved tensor.


_IN_PLACE = (
    *("add", "sub", "mul", "div", "neg", "pow", "addcmul", "lerp", "masked_fill", "clamp"),
    *("clamp_min", "clamp_max", "relu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "abs"),
    *("square", "tril", "triu", "nan_to_num", "reciprocal", "leaky_relu", "elu", "dropout"),
    *("index_add", "index_copy", "scatter", "scatter_add"),
    *("round", "floor", "ceil", "floor_divide"),
)
_OPERATORS = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__ipow__": "pow"}
_OPERATORS |= {"__itruediv__": "div", "__idiv__": "div", "__ifloordiv__": "floor_divide"}


_PLAIN_TARGET = (
    "a plain tensor cannot hold derivatives, unless the pass made it (torch.zeros, torch.empty), a "
    "variable alone holds it, and no view of it exists; make it with x.new_zeros, or write into a "
    "clone of a tensor with derivatives"
)


def _write(target: Tensor, value: Operand, function: Function) -> JetTensor:
    """Overwrite ``target`` with ``value``, which is broadcast and cast to it.

    Args:
        function: the in-place function, for errors.
    """
    if not isinstance(target, JetTensor):
        raise missing_rule(function, _PLAIN_TARGET)
    value = value if isinstance(value, Tensor) else to_tensor(value, device=target.device)
    if torch.broadcast_shapes(value.shape, target.shape) != target.shape:
        raise missing_rule(
            function, f"a result of shape {tuple(value.shape)} does not fit {tuple(target.shape)}"
        )
    source = lift(value, target.jet_layout).streams
    refuse_overlap(target, target.streams.stride()[1:], function)
    prepare_write(target)
    # Missing dimensions are inserted after that of the streams; broadcasting would insert them
    # before it.
    shape = [len(source), *(1,) * (target.ndim - value.ndim), *value.shape]
    target.streams.copy_(source.reshape(shape))
    return target


def _write_result(function: Function, rule: Callable[..., Tensor]) -> Function:
    """Return the rule of an in-place function.

    Args:
        rule: the rule of the out-of-place function.
    """

    def write(self: Tensor, *args: object, **kwargs: object) -> JetTensor:
        # The rule gets a clone, since autograd may save its argument.
        return _write(self, rule(self.clone(), *args, **kwargs), function)

    return write


def register_in_place(name: str, in_place_name: str) -> None:
    """Register the in-place version ``in_place_name`` of the function ``name``."""
    for function in spellings(in_place_name):
        jet_rule(function)(_write_result(function, require_rule(spellings(name)[0])))


for _name in _IN_PLACE:
    register_in_place(_name, f"{_name}_")
for _operator, _name in _OPERATORS.items():
    register_in_place(_name, _operator)


@jet_rule("__setitem__")
def setitem(self: Tensor, index: Index | tuple[Index, ...], value: Operand) -> None:
    """Write into each stream separately, so that an index means the same as for a plain tensor."""
    if not isinstance(self, JetTensor):
        raise missing_rule(torch.Tensor.__setitem__, _PLAIN_TARGET)
    index = primal_of(index)
    if isinstance(value, JetTensor):
        # Not by iterating, which returns several views from one call: autograd allows no write into
        # their base, which ``y[:, 0] += ...`` does, as it writes a view of y into y.
        stack = lift(value, self.jet_layout).streams
        sources: list[Operand] = [stack[stream] for stream in range(len(stack))]
    else:
        sources = [value, *[0] * (len(self.streams) - 1)]
    prepare_write(self)
    for stream, source in enumerate(sources):
        self.streams[stream][index] = source  # type: ignore[assignment]  # complex is left out


jet_rule("copy_")(lambda self, src, non_blocking=False: _write(self, src, Tensor.copy_))
jet_rule("fill_")(lambda self, value: _write(self, value, Tensor.fill_))
jet_rule("zero_")(lambda self: _write(self, 0, Tensor.zero_))
