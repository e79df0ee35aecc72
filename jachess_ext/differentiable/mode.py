"""`jx.differentiable`: torch's own derivatives through what torch refuses to differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import torch_private
from ..ops import attention_blocks
from ..ops.attention import with_plain_mask
from ..ops.attention_blocks import watch_flex_attention
from . import (  # noqa: F401  each registers what it answers
    attention,
    collectives,
    distances,
    linalg,
    losses,
    norms,
    recurrent,
    sampling,
    segments,
    sparse,
)
from .levels import levels_of
from .registry import ANSWERS, COPIES, Function

_OF_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType)  # all but a few calls


Math: TypeAlias = Literal["replace", "keep"]


def differentiable(math: Math = "replace") -> TorchFunctionMode:
    """Make what torch refuses to differentiate differentiable, as a context for unmodified code.

    Within it `torch.func`, dual numbers, ``create_graph=True`` and `autograd.functional`, in any
    nesting, go through `scaled_dot_product_attention`, in memory linear in the tokens up to order
    two, and through what else torch refuses; where torch's nested derivatives are wrong, as those
    of layer norms, they are right.  Values and first gradients are torch's own.  The list is in
    docs/refused.md.

    It is a decorator, too, of a model's ``forward``, say.  As torch's modes it is of the thread
    that enters it.  What `torch.compile` compiles within it is torch's own.  The forward has to run
    within it, and the backward where a checkpoint runs the forward anew.

    Args:
        math: what becomes of a program that allows math attention alone, as programs do because
            torch refuses the others.  "replace": other kernels run all the same.  "keep": they do
            not.

    Example:
        >>> q, k, v, dq, dk, dv = torch.randn(6, 1, 2, 5, 8)
        >>> attend = torch.nn.functional.scaled_dot_product_attention
        >>> with jx.differentiable():
        ...     y, tangent = torch.func.jvp(attend, (q, k, v), (dq, dk, dv))
        >>> tangent.shape
        torch.Size([1, 2, 5, 8])
        >>> q = q.requires_grad_()
        >>> with jx.differentiable():
        ...     energy = torch.nn.functional.scaled_dot_product_attention(q, q, q).square().sum()
        ...     (force,) = torch.autograd.grad(energy, q, create_graph=True)
        >>> torch.autograd.grad(force.square().sum(), q)[0].shape
        torch.Size([1, 2, 5, 8])
    """
    if math not in get_args(Math):
        raise ValueError(f"math is {math!r}; expected one of {', '.join(get_args(Math))}")
    return _Differentiable(math)


class _Differentiable(TorchFunctionMode, ContextDecorator):
    def __init__(self, math: Math) -> None:
        super().__init__()
        self._math = math

    def __enter__(self) -> TorchFunctionMode:
        collectives.adopt()
        watch_flex_attention()
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        answer = ANSWERS.get(func)
        if answer is None and isinstance(func, _OF_C):
            return func(*args, **kwargs)
        inside = None if answer else _entered(func)
        # What is compiled is torch's own; a jet has an answer of its own.
        if (answer is None and inside is None) or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if answer is attention.attend:
            if self._math == "keep" and attention.math_is_forced():
                return func(*args, **kwargs)
            if (plain := with_plain_mask(args, kwargs)) is not None:
                args, kwargs = (), plain
        if not _is_plain((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if answer is not None:
            return answer(*args, **kwargs)
        assert inside is not None
        with self:
            return inside(*args, **kwargs)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> object:
    """Answer torch's `flex_attention`, without a score_mod, where a derivative may be asked for."""
    inputs = [query, key, value]
    modified = options.get("score_mod") or options.get("return_lse") or options.get("return_aux")
    if not is_active() or modified or not (_is_plain(inputs) and any(levels_of(inputs))):
        return NotImplemented
    return attention_blocks.flex_attention(query, key, value, **options)


attention_blocks.ANSWERS.append(_flex_attention)


def is_active() -> bool:
    """Return whether this thread runs within `differentiable`."""
    modes = torch_private.function_modes()
    return any(isinstance(mode, _Differentiable) for mode in modes)


def _is_plain(values: Sequence[object]) -> bool:
    """Return whether the tensors are of no subclass, as jets are."""
    return all(
        type(x) in (Tensor, torch.nn.Parameter) if isinstance(x, Tensor) else _is_plain(x)
        for x in values
        if isinstance(x, (Tensor, list, tuple))
    )


_COMPOSED = (
    *("multi_head_attention_forward", "layer_norm", "batch_norm", "instance_norm", "grid_sample"),
    *("ctc_loss", "embedding_bag", "hardsigmoid", "huber_loss", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss"),
)
# Within its answer a mode is off.  So it would be for what these functions of Python call:
# what is answered itself, or the forward of a checkpoint that a backward runs anew.
_PLACES: dict[tuple[object, str], tuple[Function, Function]] = {
    (owner, name): (
        original := torch_private.original_of(getattr(owner, name)),
        torch_private.unasked(original),
    )
    for owner, name in (
        *((F, name) for name in _COMPOSED),
        (torch.autograd, "grad"),
        # The method calls the function, which asks, too.
        *((torch.autograd, "backward"), (Tensor, "backward")),
    )
}

COPIES |= dict(_PLACES.values())


def _entered(function: Function) -> Function | None:
    """Return the copy of a function above, or what runs for a Function's `apply`.  What asks names
    itself by what it finds at its place, which may be a profiler's function around it."""
    copy = COPIES.get(function)
    names = getattr(function, "__globals__", {})
    if copy is not None or str(names.get("__name__")).startswith("torch."):  # spares the search
        return copy
    for (owner, name), (_, copy) in _PLACES.items():
        if function is getattr(owner, name):
            return copy
    return None
