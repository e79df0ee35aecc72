"""autograd Functions around a jet: how a call from within one is seen, and the error for it.

An autograd Function runs its forward without gradients and has a backward of its own, which knows
no jets: what it returned would have lost its gradients.  `functions.py` serves some of those that
have a jet among their arguments; else the pass stops, and the error names the library and a
setting that avoids the Function.  Jets that a closure or a list carries are seen here, at the
first torch function that meets one.

torch switches forward-mode differentiation off around a Function's forward, and otherwise only in
``torch.inference_mode``; code inside that turns gradients on (a straight-through estimator, a
solver of fixed points) leaves it off.  Every call reads that switch; only where it is off is the
stack searched, which takes longer.  Without the switch, the stack is searched at every call.
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
"""The code that runs these forwards, each of which torch does not run."""
APPLY_RULE: list[Rule] = []
"""What answers ``apply`` of every Function, which it takes first (functions.py)."""


def is_apply(function: Function) -> bool:
    """Return whether this is the method ``apply`` of an autograd Function."""
    return isinstance(function, MethodType) and function.__func__ is APPLY


def surrounding_functions() -> int | None:
    """Return how many autograd Functions surround a pass that begins now; None where the switch
    shows that there is none."""
    return None if forward_mode_is_on() else len(_running_forwards())


def refuse_opaque_functions(
    function: Function, args: Args, surrounding: int | None, derivative: type[torch.Tensor]
) -> None:
    """Refuse a call from within an autograd Function, or reentrant checkpointing, that began after
    the pass; called where `forward_mode_is_on` is false.

    Args:
        function: the torch function that was called with ``args``.
        surrounding: the result of `surrounding_functions` at the beginning of the pass.
        derivative: the class of tensors with derivatives.

    Raises:
        RuntimeError: the message names the Function and a way to avoid it.
    """
    forwards = _running_forwards()
    harmless = (surrounding or 0) + sum(frame.f_code in FORWARD_RUNNERS for frame in frames())
    # Functions around the whole pass are harmless: they hold no jet.  Those that began since stand
    # before them in the list, the outermost of them last.
    if len(forwards) > harmless:
        forward = forwards[-1 - harmless]
        fix = _early_binding_advice(forward, derivative) if APPLY_IS_C else ""
        raise function_refusal(_function_class(forward), fix=fix)
    # After its forward, torch calls this function on what a Function returned as it came.
    returned_an_input = function is torch.Tensor.view_as and args[0] is args[-1]
    off_before_the_pass = surrounding is not None or torch.is_inference_mode_enabled()
    if returned_an_input or not off_before_the_pass:
        raise function_refusal(None)


def function_refusal(function: type | None, detail: str = "", fix: str = "") -> RuntimeError:
    """Return the error for an autograd Function; ``detail`` says what it does that is not served.

    Args:
        function: None where it is not known.
        fix: what to do, if it is not what helps with any Function.
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
    """Say what to do where a Function was handed a jet without having asked
    (`functions.watch_functions`); "" where none of its arguments is one."""
    names = forward.f_code.co_varnames[: forward.f_code.co_argcount]
    if not any(isinstance(forward.f_locals.get(name), derivative) for name in names):
        return ""
    return (
        " Its apply was bound before jachess_ext was used, in a place where it cannot be replaced "
        "(a tuple, a default, functools.partial): import jachess_ext.jet before what binds it."
    )


def _running_forwards() -> list[FrameType]:
    """Return the running calls of ``forward`` of autograd Functions, innermost first."""
    codes = _forward_codes(torch.autograd.Function.__subclasses__()[-1])
    return [frame for frame in frames() if frame.f_code in codes]


@functools.lru_cache(maxsize=1)
def _forward_codes(newest: type) -> frozenset[CodeType | None]:
    """Return the code of every Function's ``forward``; cached until there is a newer Function."""
    return frozenset(_forward_code(function) for function in _subclasses())


def _subclasses(
    parent: type[torch.autograd.Function] = torch.autograd.Function,
) -> Iterator[type[torch.autograd.Function]]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def _forward_code(function: type[torch.autograd.Function]) -> CodeType | None:
    """Return the code of a Function's ``forward``, inside decorators that name what they wrap."""
    forward = inspect.unwrap(function.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    called = forward if hasattr(forward, "__code__") else type(forward).__call__
    return getattr(called, "__code__", None)


def _function_class(forward: FrameType) -> type:
    """Return the Function whose ``forward`` this is.

    Functions that share code, as classes defined in a function do, are told apart by their context.
    """
    names = forward.f_code.co_varnames[:1]
    context = forward.f_locals.get(names[0]) if names else None
    function: type | None = getattr(context, "_forward_cls", None)
    return function or [c for c in _subclasses() if _forward_code(c) is forward.f_code][-1]
