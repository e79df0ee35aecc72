"""`jx.differentiable`: torch's derivatives through operators that torch refuses to
differentiate."""

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
from . import (  # noqa: F401  each registers its functions in ANSWERS
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

# Types of most functions that are called; those without an answer need no search for a copy.
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType)


Math: TypeAlias = Literal["replace", "keep"]


def differentiable(math: Math = "replace") -> Differentiable:
    """Return a context in which unmodified code can differentiate operators that torch refuses to
    differentiate.

    Within the context `torch.func`, dual numbers, ``create_graph=True`` and `autograd.functional`,
    in any nesting, differentiate `scaled_dot_product_attention`, in memory linear in the tokens up
    to order two, and the other operators that torch refuses.  Nested derivatives that are wrong in
    torch, such as those of layer norms, are right.  Values and first gradients are torch's own.
    docs/refused.md lists the operators.

    The context is also a decorator, for example of a model's ``forward``.  Like torch's modes it
    applies to the thread that enters it.  Code compiled by `torch.compile` is not affected.  The
    forward has to run within the context, and the backward, too, if a checkpoint runs the forward
    again.

    Args:
        math: what to do in programs that allow only math attention, often because torch refuses to
            differentiate the other kernels.  "replace": run other kernels nevertheless.  "keep":
            run math attention.

    Examples:
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
    return Differentiable(math)


class Differentiable(TorchFunctionMode, ContextDecorator):
    def __init__(self, math: Math) -> None:
        super().__init__()
        self._math = math

    def __enter__(self) -> TorchFunctionMode:
        collectives.register_imported()
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
        if answer is None and isinstance(func, _BUILT_IN):
            return func(*args, **kwargs)
        copy = None if answer else _copy_of(func)
        # Calls in compiled code are not replaced, nor calls with jets, which have their own rules
        # (`_is_plain`).
        if (answer is None and copy is None) or torch.compiler.is_compiling():
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
        assert copy is not None
        with self:
            return copy(*args, **kwargs)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> object:
    """Compute torch's `flex_attention` if it is differentiated within the mode and has no
    score_mod; otherwise return NotImplemented."""
    inputs = [query, key, value]
    has_extras = options.get("score_mod") or options.get("return_lse") or options.get("return_aux")
    if not is_active() or has_extras or not (_is_plain(inputs) and any(levels_of(inputs))):
        return NotImplemented
    return attention_blocks.flex_attention(query, key, value, **options)


attention_blocks.ANSWERS.append(_flex_attention)


def is_active() -> bool:
    """Return whether `differentiable` is active in this thread."""
    return any(isinstance(mode, Differentiable) for mode in torch_private.function_modes())


def _is_plain(values: Sequence[object]) -> bool:
    """Return whether every tensor in the values, or in lists and tuples among them, is a plain
    Tensor or Parameter, not a subclass such as a jet."""
    return all(
        type(x) in (Tensor, torch.nn.Parameter) if isinstance(x, Tensor) else _is_plain(x)
        for x in values
        if isinstance(x, (Tensor, list, tuple))
    )


_COMPOSED = (
    *("multi_head_attention_forward", "layer_norm", "batch_norm", "instance_norm", "grid_sample"),
    *("ctc_loss", "embedding_bag", "hardsigmoid", "glu", "huber_loss", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss"),
)
# Torch disables a mode while the mode handles a call.  But these Python functions call functions
# that the mode has to handle (a backward even runs the forward of a checkpoint again): so the mode
# is entered again around a copy of the function that does not dispatch to modes.
_COPIED: dict[tuple[object, str], tuple[Function, Function]] = {
    (owner, name): (
        original := torch_private.original_of(getattr(owner, name)),
        torch_private.copy_without_override_check(original),
    )
    for owner, name in (
        *((F, name) for name in _COMPOSED),
        (torch.autograd, "grad"),
        # The method calls the function, which also dispatches to modes.
        *((torch.autograd, "backward"), (Tensor, "backward")),
    )
}

COPIES |= dict(_COPIED.values())


def _copy_of(function: Function) -> Function | None:
    """Return the copy of a Python function, or of a Function's `apply`, that runs within the mode;
    None if there is none.

    A mode receives the function that its module has under this name, which may be a profiler's
    wrapper instead of torch's function.  Such a wrapper is recognised by the module's attribute.
    """
    copy = COPIES.get(function)
    names = getattr(function, "__globals__", {})
    if copy is not None or str(names.get("__name__")).startswith("torch."):  # no wrapper: no search
        return copy
    for (owner, name), (_, copy) in _COPIED.items():
        if function is getattr(owner, name):
            return copy
    return None
