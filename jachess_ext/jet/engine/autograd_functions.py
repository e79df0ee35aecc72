"""Detection of calls from within the forward of an autograd Function, and the errors for them.

An autograd Function runs its forward without gradients and has a backward of its own, which knows
no jets: its result would lose the gradients of the streams.  `functions.py` has rules for some
Functions with a jet among their arguments; for others the pass stops, and the error names the
library and a setting that avoids the Function.  A jet that reaches a Function in a closure or a
list is detected here, at the first torch function that is called with it.

torch switches forward-mode differentiation off around a Function's forward, and otherwise only in
``torch.inference_mode``; code inside that turns gradients on (a straight-through estimator, a
solver of fixed points) leaves it off.  Every call reads that switch, and searches the Python stack,
which takes longer, only where it is off.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType, FrameType, MethodType

import torch
from torch.utils.checkpoint import CheckpointFunction

from ... import torch_private
from ...ops.forward_code import AutogradFunction
from ...ops.library import forward_mode_is_on
from .errors import frames, library_advice
from .types import Args, Function, Rule

APPLY, APPLY_OWNER = torch_private.find_function_apply()
APPLY_IS_C = APPLY_OWNER is torch.autograd.Function
FORWARD_CODE: ContextVar[frozenset[AutogradFunction]] = ContextVar(
    "jachess_ext.forward_code", default=frozenset()
)
"""The Functions whose forward's own code runs on jets (`forward_code`)."""
FORWARD_RUNNERS: set[CodeType] = set()
"""The code objects that run such a forward in place of torch."""
APPLY_RULE: list[Rule] = []
"""The rule of every Function's ``apply``, with the Function as its first argument
(functions.py)."""


def is_apply(function: Function) -> bool:
    """Return whether this is the method ``apply`` of an autograd Function."""
    return isinstance(function, MethodType) and function.__func__ is APPLY


def surrounding_functions() -> int | None:
    """Return how many autograd Functions surround a pass that begins now; None outside of any."""
    return None if forward_mode_is_on() else len(_running_forwards())


def refuse_opaque_functions(
    function: Function, args: Args, surrounding: int | None, derivative: type[torch.Tensor]
) -> None:
    """Refuse a call from within an autograd Function that began after the pass (or from reentrant
    checkpointing, which is one); called where `forward_mode_is_on` is false.

    Args:
        function: the torch function that was called with ``args``.
        surrounding: the result of `surrounding_functions` at the beginning of the pass.
        derivative: the class of tensors with derivatives.

    Raises:
        RuntimeError: the message names the Function and a way to avoid it.
    """
    forwards = _running_forwards()
    harmless = (surrounding or 0) + sum(frame.f_code in FORWARD_RUNNERS for frame in frames())
    # Functions around the whole pass hold no jet.  The list is innermost first: those that began
    # after the pass stand before them, the outermost last.
    if len(forwards) > harmless:
        forward = forwards[-1 - harmless]
        fix = _early_binding_advice(forward, derivative) if APPLY_IS_C else ""
        raise function_refusal(_function_class(forward), fix=fix)
    # After the forward, torch calls this function on an input that was returned unchanged.
    returned_an_input = function is torch.Tensor.view_as and args[0] is args[-1]
    off_before_the_pass = surrounding is not None or torch.is_inference_mode_enabled()
    if returned_an_input or not off_before_the_pass:
        raise function_refusal(None)


def function_refusal(function: type | None, detail: str = "", fix: str = "") -> RuntimeError:
    """Return the error for a jet that went into an autograd Function.

    Args:
        function: the Function; None where it cannot be determined.
        detail: what it does that has no rule.
        fix: a sentence in place of the advice for any Function.
    """
    if function is CheckpointFunction:
        return RuntimeError(
            "a jet went into reentrant gradient checkpointing, which would lose its gradients; "
            "use gradient_checkpointing_enable(gradient_checkpointing_kwargs="
            '{"use_reentrant": False}), or checkpoint(..., use_reentrant=False)'
        )
    if function is None:
        return RuntimeError(
            "a jet went into a torch.autograd.Function, which would lose its gradients. Write what "
            "it computes with torch's own functions. A full backward hook of a module is one: "
            "remove it for the pass."
        )
    name = f"{function.__module__}.{function.__qualname__}"
    reason = detail or "would lose its gradients"
    ways = (
        " Write what it computes with torch's own functions, or give it a jvp staticmethod (first "
        "derivatives). If its backward is the derivative of its forward, "
        f"jx.forward_code({function.__qualname__}) takes it through its forward's own code."
    )
    return RuntimeError(
        f"a jet went into the torch.autograd.Function {name}, which {reason}."
        f"{library_advice(name) or fix or ways}"
    )


def _early_binding_advice(forward: FrameType, derivative: type[torch.Tensor]) -> str:
    """Return the advice for a Function whose ``apply`` was bound before `functions.watch_functions`
    ran; "" where none of the arguments of its ``forward`` is a jet."""
    names = forward.f_code.co_varnames[: forward.f_code.co_argcount]
    if not any(isinstance(forward.f_locals.get(name), derivative) for name in names):
        return ""
    return (
        " Its apply was bound before jachess_ext was used, in a place where it cannot be replaced "
        "(a tuple, a default, functools.partial): import jachess_ext.jet before what binds it."
    )


def _running_forwards() -> list[FrameType]:
    """Return the stack frames of all Functions' ``forward``, innermost first."""
    codes = _forward_codes(torch.autograd.Function.__subclasses__()[-1])
    return [frame for frame in frames() if frame.f_code in codes]


@functools.lru_cache(maxsize=1)
def _forward_codes(newest: type) -> frozenset[CodeType | None]:
    """Return the code objects of all Functions' ``forward``; cached until a class is added."""
    return frozenset(_forward_code(function) for function in _subclasses())


def _subclasses(
    parent: type[torch.autograd.Function] = torch.autograd.Function,
) -> Iterator[type[torch.autograd.Function]]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def _forward_code(function: type[torch.autograd.Function]) -> CodeType | None:
    """Return the code object of a Function's ``forward``, behind its decorators."""
    forward = inspect.unwrap(function.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    called = forward if hasattr(forward, "__code__") else type(forward).__call__
    return getattr(called, "__code__", None)


def _function_class(forward: FrameType) -> type:
    """Return the Function whose ``forward`` runs in this frame.

    Classes that share code (defined in a function) differ by the class of their ``ctx``.
    """
    names = forward.f_code.co_varnames[:1]
    context = forward.f_locals.get(names[0]) if names else None
    function: type | None = getattr(context, "_forward_cls", None)
    return function or [c for c in _subclasses() if _forward_code(c) is forward.f_code][-1]
