"""Detection of calls from within the forward of an autograd Function, and the errors for them.

An autograd Function runs its forward without gradients and has a backward of its own that handles
no jets: its result would lose the gradients of the streams.  `adapters/functions.py` has rules for
some Functions that are called with a jet; for other Functions the pass stops, and the error names
the library and a setting that avoids the Function.  A jet that reaches a Function in a closure or a
list is detected here, at the first torch function that is called with it.

torch switches forward-mode differentiation off around a Function's forward, and otherwise only in
``torch.inference_mode``; code inside a forward that turns gradients on (a straight-through
estimator, a solver of fixed points) leaves it off.  So each call of a torch function checks that
switch, and only if it is off searches the Python stack, which takes longer.
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
"""The Functions named in `forward_code`, whose forward runs on jets."""
FORWARD_RUNNERS: set[CodeType] = set()
"""The code objects of the engine's functions that run the forward of a Function on jets."""
APPLY_RULE: list[Rule] = []
"""A list of one rule: that of every Function's ``apply``, with the Function as its first argument;
`adapters/functions.py` appends it."""


def is_apply(function: Function) -> bool:
    """Return whether ``function`` is the method ``apply`` of an autograd Function."""
    return isinstance(function, MethodType) and function.__func__ is APPLY


def count_surrounding_functions() -> int | None:
    """Return the number of autograd Functions whose forward is running.

    None if forward mode is on, in which case there is none.
    """
    return None if forward_mode_is_on() else len(_running_forwards())


def refuse_opaque_functions(
    function: Function, args: Args, num_surrounding: int | None, derivative_class: type
) -> None:
    """Refuse a call from within an autograd Function whose forward began after the pass.

    Reentrant checkpointing is such a Function, too.  Call this only if forward mode is off.

    Args:
        function: the torch function that was called with ``args``.
        num_surrounding: the result of `count_surrounding_functions` at the beginning of the pass.
        derivative_class: `DerivativeTensor`, whose file imports this one.

    Raises:
        RuntimeError: the call comes from such a Function; the message names it and a way to avoid
            it.
    """
    forwards = _running_forwards()
    num_harmless = num_surrounding or 0
    num_harmless += sum(frame.f_code in FORWARD_RUNNERS for frame in frames())
    # Functions around the whole pass hold no jet.  They are the last ones, since the list begins
    # with the innermost.
    if len(forwards) > num_harmless:
        forward = forwards[-1 - num_harmless]
        fix = _early_binding_advice(forward, derivative_class) if APPLY_IS_C else ""
        raise function_refusal(_function_class(forward), fix=fix)
    # After a forward that returns an input unchanged, torch calls ``input.view_as(input)``.
    is_returned_input = function is torch.Tensor.view_as and args[0] is args[-1]
    was_off_before_pass = num_surrounding is not None or torch.is_inference_mode_enabled()
    if is_returned_input or not was_off_before_pass:
        raise function_refusal(None)


def function_refusal(function: type | None, detail: str = "", fix: str = "") -> RuntimeError:
    """Return the error for a jet that was passed to an autograd Function.

    Args:
        function: the Function; None if it cannot be determined.
        detail: why the Function has no rule, a clause that begins with a verb; "" for the usual
            reason.
        fix: a sentence that replaces the general advice; "" for none.
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
    general_advice = (
        " Write what it computes with torch's own functions, or give it a jvp staticmethod (first "
        "derivatives). If its backward is the derivative of its forward, "
        f"jx.forward_code({function.__qualname__}) takes it through its forward's own code."
    )
    return RuntimeError(
        f"a jet went into the torch.autograd.Function {name}, which {reason}."
        f"{library_advice(name) or fix or general_advice}"
    )


def _early_binding_advice(forward: FrameType, derivative_class: type) -> str:
    """Return the advice for a Function whose ``apply`` was bound before `functions.watch_functions`
    ran; "" if none of the arguments in the frame of its ``forward`` is a jet."""
    names = forward.f_code.co_varnames[: forward.f_code.co_argcount]
    if not any(isinstance(forward.f_locals.get(name), derivative_class) for name in names):
        return ""
    return (
        " Its apply was bound before jachess_ext was used, in a place where it cannot be replaced "
        "(a tuple, a default, functools.partial): import jachess_ext.jet before what binds it."
    )


def _running_forwards() -> list[FrameType]:
    """Return the frames on the Python stack that run a Function's ``forward``, innermost first."""
    codes = _forward_codes(torch.autograd.Function.__subclasses__()[-1])
    return [frame for frame in frames() if frame.f_code in codes]


@functools.lru_cache(maxsize=1)
def _forward_codes(newest_class: type) -> frozenset[CodeType | None]:
    """Return the code objects of all Functions' ``forward``.

    Args:
        newest_class: the last Function that was defined, the key of the cache.
    """
    return frozenset(_forward_code(function) for function in _subclasses())


def _subclasses(
    parent: type[torch.autograd.Function] = torch.autograd.Function,
) -> Iterator[type[torch.autograd.Function]]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def _forward_code(function: type[torch.autograd.Function]) -> CodeType | None:
    """Return the code object of a Function's ``forward`` without its decorators; None if it has
    none."""
    forward = inspect.unwrap(function.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    python_function = forward if hasattr(forward, "__code__") else type(forward).__call__
    return getattr(python_function, "__code__", None)


def _function_class(forward: FrameType) -> type:
    """Return the Function whose ``forward`` runs in this frame.

    Classes may share one code object (if a function defines a class at each call); the class of
    ``ctx`` tells them apart.
    """
    names = forward.f_code.co_varnames[:1]
    context = forward.f_locals.get(names[0]) if names else None
    function: type | None = getattr(context, "_forward_cls", None)
    return function or [c for c in _subclasses() if _forward_code(c) is forward.f_code][-1]
