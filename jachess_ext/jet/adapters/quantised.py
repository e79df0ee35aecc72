"""Frozen quantised weights: bitsandbytes' 4-bit and 8-bit layers, torchao's weight-only ones.

Such a layer is linear in its input, ``y = Ŵ x + b`` with the dequantised matrix Ŵ, so one product
with Ŵ computes all streams.  Ŵ is computed for the product, and again in the backward; in between
only the quantised weight is in memory.

torchao's weights are tensor subclasses, passed to ``linear``.  bitsandbytes calls its own autograd
Functions and operators, without ``__torch_function__``: `register_bitsandbytes` adds
``__torch_function__`` to its two public products once a program has imported the library.  Calls
with plain tensors run the library's code unchanged.

`Linear8bitLt` outside of training (and on a GPU always) also rounds its *input* to int8, so that
its true derivative is zero or undefined.  Then the value is the library's, and the derivatives are
those of the layer without this rounding, Ŵ u, as in the library's own backward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...ops.gemm import rows_times
from ...torch_private import functional
from ..engine.derivative import DerivativeTensor
from ..engine.errors import missing_rule
from ..engine.registry import jet_rule, recognise
from ..engine.tensor import JetTensor
from ..engine.types import Function, Rule
from ..rules.streamwise import add_to_fresh_primal

Dequantise = Callable[[], Tensor]
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class _FrozenLinear(torch.autograd.Function):
    """Compute the product of streams ``[S, ..., k]`` and Ŵᵀ, with the bias ``[n]`` in stream 0.

    Ŵ ``[n, k]`` gets no gradient.
    """

    @staticmethod
    def forward(streams: Tensor, bias: Tensor | None, dequantise: Dequantise) -> Tensor:
        out = rows_times(streams, dequantise())
        return out if bias is None else add_to_fresh_primal(out, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        # Not the matrix itself: a model's dequantised weights would not fit in memory at once.
        ctx.dequantise = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_streams = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_streams = grad @ ctx.dequantise()
        if ctx.needs_input_grad[1]:
            grad_bias = grad[0].flatten(0, -2).sum(0) if grad.ndim > 2 else grad[0]
        return grad_streams, grad_bias, None


def is_quantised(weight: Tensor) -> bool:
    """Return whether the weight of a linear layer is a tensor subclass that can be dequantised."""
    cls = type(weight)
    return cls not in _PLAIN_TYPES and (
        cls.dequantize is not Tensor.dequantize or cls.__module__.startswith("torchao.")
    )


@recognise("linear")
def quantised_linear(
    rule: Rule, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> JetTensor | None:
    """Compute ``linear`` for a jet and a quantised weight; return None for other arguments."""
    if not isinstance(input, JetTensor) or not is_quantised(weight):
        return None
    function = functional.linear
    name = f"{type(weight).__module__}.{type(weight).__name__}"
    if type(weight).dequantize is Tensor.dequantize or _rounds_input(weight):
        raise missing_rule(
            function,
            f"the weight is a {name}, with which torchao also rounds the layer's input; quantise "
            "the weight alone, with Int8WeightOnlyConfig or IntxWeightOnlyConfig",
        )
    _refuse_trainable(function, weight)
    dtype = input.dtype
    bias = None if bias is None else bias.to(dtype)
    streams = input.streams.to(dtype)
    return input.with_streams(
        _FrozenLinear.apply(streams, bias, lambda: weight.dequantize().to(dtype))
    )


def _rounds_input(weight: Tensor) -> bool:
    """Return whether a torchao weight has a setting ``act...``, by which its layer scales or rounds
    its input."""
    return any(
        value is not None and value != weight.dtype
        for name, value in vars(weight).items()
        if name.startswith("act")
    )


def _refuse_trainable(function: Function, weight: Tensor) -> None:
    """Raise MissingJetRule for a weight that requires a gradient."""
    if weight.requires_grad:
        raise missing_rule(
            function,
            "the quantised weight asks for a gradient, which it would not get; freeze it with "
            "weight.requires_grad_(False) and train an adapter (LoRA) on top",
        )


def register_bitsandbytes() -> None:
    """Replace bitsandbytes' two products by functions that take jets, if it has been imported.

    Called at the beginning of every pass.
    """
    library: Any = sys.modules.get("bitsandbytes")
    # The attribute is missing while the library is being imported.
    if library is None or not hasattr(library, "matmul_4bit"):
        return
    if not hasattr(library.matmul_4bit, "takes_jets"):
        library.matmul_4bit = make_overridable(
            library.matmul_4bit, functools.partial(_multiply_4bit, library)
        )
        library.matmul = make_overridable(library.matmul, _multiply_8bit)


def make_overridable(function: Function, rule: Callable[..., JetTensor]) -> Function:
    """Wrap a function to call ``__torch_function__`` of its first argument, and register a jet rule
    for the wrapper.

    Args:
        rule: the rule, which is called with ``function`` and then the arguments of the call.
    """

    @functools.wraps(function)
    def wrapper(A: Tensor, *args: object, **kwargs: object) -> object:
        if isinstance(A, DerivativeTensor):
            return torch.overrides.handle_torch_function(wrapper, (A,), A, *args, **kwargs)
        return function(A, *args, **kwargs)

    wrapper.takes_jets = True  # type: ignore[attr-defined]
    jet_rule(wrapper)(functools.partial(rule, function))
    return wrapper


def _multiply_4bit(
    library: ModuleType,
    function: Callable[..., Tensor],
    A: JetTensor,
    B: Tensor,
    quant_state: Any,
    out: None = None,
    bias: Tensor | None = None,
) -> JetTensor:
    _refuse_trainable(function, B)

    def dequantise() -> Tensor:
        if getattr(quant_state, "packing_format_for_cpu", False):
            # Packed for AVX-512: only the library's own product can unpack it, here times the
            # identity.
            unit = torch.eye(quant_state.shape[1], dtype=torch.bfloat16)
            return function(unit, B, quant_state=quant_state).mT.to(A.dtype)
        packed = B.detach().reshape(-1, 1)
        return library.functional.dequantize_4bit(packed, quant_state).to(A.dtype)

    return A.with_streams(_FrozenLinear.apply(A.streams, bias, dequantise))


def _multiply_8bit(
    function: Callable[..., Tensor],
    A: JetTensor,
    B: Tensor,
    out: None = None,
    state: Any = None,
    threshold: float = 0.0,
    bias: Tensor | None = None,
) -> JetTensor:
    if state is None or state.has_fp16_weights:
        raise missing_rule(
            function,
            "the layer trains its weight and rounds it anew at every call; make it with "
            "has_fp16_weights=False, as load_in_8bit=True does, and train an adapter (LoRA) on top",
        )
    # The library also rounds the input: the value includes this rounding, the tangents do not.
    value = function(A.primal, B, state=state, threshold=threshold, bias=bias)

    # CB is int8, and SCB the largest modulus of each row, the weight of an entry of ±127.
    def dequantise() -> Tensor:
        return (state.CB.float() * (state.SCB.float() / 127).unsqueeze(1)).to(A.dtype)

    tangents = _FrozenLinear.apply(A.streams[1:], None, dequantise)
    return A.with_streams(torch.cat([value.unsqueeze(0), tangents]))
