"""Rules of autograd Functions that are called with a jet.

A Function runs its forward below `__torch_function__`, without gradients, and has a backward of its
own, which knows no streams.  So `watch_functions` replaces ``apply`` of every Function by one that
asks for a rule if an argument is a jet.  The rule of a Function is, in this order,

    named in `forward_code`     its forward's code, run on jets
    of a library                its rule in `libraries.py`
    with a ``jvp``              first derivatives by it, as torch.func.jvp takes them

and others are refused (`autograd_functions.function_refusal`).
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinMethodType, CellType, FrameType, MethodType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode, handle_torch_function

from ... import torch_private
from ...ops.forward_code import AutogradFunction, has_known_code, run_forward
from ...ops.library import transformed
from ..engine import autograd_functions as around
from ..engine.autograd_functions import function_refusal
from ..engine.context import without_autocast
from ..engine.derivative import DerivativeTensor, carries_derivatives
from ..engine.layout import iter_tensors
from ..engine.registry import attribute, spellings
from ..engine.strides import record_storage, stack_with_strides, storage_id
from ..engine.tensor import JetTensor, common_layout
from ..engine.types import Args, Named, Rule

Options: TypeAlias = dict[str, Any]
"""The arguments of a forward by their names."""
_LIBRARY_RULES: dict[str, tuple[str, set[str], Rule]] = {}
_SAVES_INPUTS = torch_private.find("torch.utils.checkpoint._NoopSaveInputs")
"""The Function by which checkpoints of torch 2.10 save the inputs of a block, jets among them."""


def library_rule(library: str, *names: str, takes: str) -> Callable[[Rule], Rule]:
    """Register a rule for Functions of a library, which need not be installed.

    It is called with `Options`.

    Args:
        library: part of the name of the Functions' module.
        names: names of the classes.
        takes: names of the arguments that the rule takes, or that change no number; a call that
            sets another one (`is_unset`) is refused.
    """

    def register(rule: Rule) -> Rule:
        _LIBRARY_RULES.update(dict.fromkeys(names, (library, set(takes.split()), rule)))
        return rule

    return register


def is_unset(value: object) -> bool:
    """Return whether an argument is None, False, 0 or empty."""
    return not isinstance(value, Tensor) and not value


@contextmanager
def forward_code(*functions: AutogradFunction) -> Iterator[None]:
    """Differentiate autograd Functions by their forward's own code, while the context lasts.

    Called with a jet, such a Function runs its ``forward`` on the jet, torch function by torch
    function, in place of ``apply``; its ``backward`` is not called.  Derivatives, and gradients
    through them, are those of the code of ``forward``: ``detach`` and ``no_grad`` inside have no
    effect, as in any Function, and reading a number out of a jet is refused.  So name no Function
    whose backward differs from the derivative on purpose, such as a straight-through estimator,
    whose rounding has the derivative 0.  Nor one whose ``forward`` depends on
    ``torch.is_grad_enabled()``, ``requires_grad`` or ``ctx.needs_input_grad``, which may differ on
    a jet.

    With ``jvp(differentiable=False)`` the value and its gradient are those of ``apply``, and the
    tangent alone is that of the code.

    It is a decorator, too.  Calls with plain tensors do not change.

    Args:
        functions: subclasses of `torch.autograd.Function`.

    Raises:
        TypeError: an argument is no such class.

    Examples:
        >>> class Cube(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        >>> with jx.forward_code(Cube):
        ...     jx.jet(Cube.apply, torch.tensor([2.0]), torch.ones(2, 1)).second
        tensor([[12.]])
    """
    for function in functions:
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            raise TypeError(
                f"forward_code takes subclasses of torch.autograd.Function, not {function!r}"
            )
    token = around.FORWARD_CODE.set(around.FORWARD_CODE.get() | {*functions})
    try:
        yield
    finally:
        around.FORWARD_CODE.reset(token)


def watch_functions() -> None:
    """Replace ``apply`` of every autograd Function by one that looks for jets among its arguments.

    It stays after a pass, since a backward that recomputes a checkpoint calls Functions, too.
    Calls without jets do not change, on any thread.
    """
    if around.APPLY_OWNER is None:
        return

    # torch.compile knows a bound ``apply`` by this name.
    def apply(function: AutogradFunction, *args: object, **kwargs: object) -> object:
        jets = [v for v in (*args, *kwargs.values()) if isinstance(v, DerivativeTensor)]
        if jets and function is not _SAVES_INPUTS:
            # Not the attribute ``apply`` of the class, which may be overridden.
            method = MethodType(around.APPLY, function)
            if around.APPLY_IS_C and _has_setup(function):  # Python has bound the defaults here
                bound = inspect.signature(function.forward).bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
            return handle_torch_function(method, jets, *args, **kwargs)
        return super(around.APPLY_OWNER, function).apply(*args, **kwargs)  # type: ignore[misc]

    around.APPLY_OWNER.apply = classmethod(apply)
    if around.APPLY_IS_C:
        around.APPLY = apply  # a mode that is asked calls what asks again
        _rebind_early_methods()


def _rebind_early_methods() -> None:
    """Replace every ``apply`` that was bound before, as by ``f = Square.apply`` in a module.

    In namespaces of modules, objects and classes, in other dicts, lists and closures; tuples and
    `functools.partial` cannot be changed, and jets in calls through them are refused.
    """
    early = {
        id(method): method
        for method in gc.get_objects()
        if type(method) is BuiltinMethodType
        and method.__name__ == "apply"
        and issubclass(type(method.__self__), type(torch.autograd.Function))
    }
    late = {key: method.__self__.apply for key, method in early.items()}  # type: ignore[attr-defined]
    for holder in gc.get_referrers(*early.values()):
        if isinstance(holder, CellType):
            holder.cell_contents = late[id(holder.cell_contents)]
        elif isinstance(holder, list):
            holder[:] = [late.get(id(value), value) for value in holder]
        elif holder is not early and not isinstance(holder, tuple | FrameType):
            names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
            if isinstance(names, dict):
                _rebind_names(names, late)


def _rebind_names(names: dict[Any, Any], late: dict[int, object]) -> None:
    owner = None
    if "__module__" in names:  # perhaps the namespace of a class, whose cache must know
        owner = next((o for o in gc.get_referrers(names) if isinstance(o, type)), None)
    for name, value in [*names.items()]:
        if id(value) in late and owner is not None:
            setattr(owner, name, late[id(value)])
        elif id(value) in late:
            names[name] = late[id(value)]


def answer_apply(function: AutogradFunction, *args: object, **kwargs: object) -> object:
    """Compute ``function.apply(*args, **kwargs)`` with jets among the arguments."""
    jet_pass = common_layout(*args, *kwargs.values()).jet_pass
    named = function in around.FORWARD_CODE.get() | (jet_pass.forward_code if jet_pass else set())
    if named or has_known_code(function):
        return _run_forward(function, args, kwargs)
    library, takes, rule = _LIBRARY_RULES.get(function.__name__, ("", set(), None))
    if rule is not None and library in function.__module__:
        options = _name_arguments(function, args, kwargs)
        if on := [name for name in options if not (name in takes or is_unset(options[name]))]:
            raise function_refusal(function, f"was called with {on[0]}, which has no rule")
        with without_autocast(next(iter_tensors(args)).device.type):
            return rule({name: value for name, value in options.items() if name in takes})
    if function.jvp is not torch.autograd.Function.jvp:
        return _apply_with_jvp(function, args, kwargs)
    raise function_refusal(function)


around.APPLY_RULE.append(answer_apply)
watch_functions()


def _has_setup(function: AutogradFunction) -> bool:
    """Return whether a Function has a `setup_context`, so that its forward takes no context."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _name_arguments(function: AutogradFunction, args: Args, kwargs: Named) -> Options:
    """Return the arguments of a call by the names in its forward, defaults included."""
    context = () if _has_setup(function) else (None,)
    bound = inspect.signature(function.forward).bind(*context, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[len(context) :])


# ---- its own jvp -------------------------------------------------------------------------------


_PLAIN = (*(bool, int, float, complex, str, type(None), type, torch.dtype, torch.device), Tensor)


def _apply_with_jvp(function: AutogradFunction, args: Args, kwargs: Named) -> object:
    """Return a Function's outputs as jets, with tangents by its ``jvp`` along every direction."""
    jets = [arg for arg in args if isinstance(arg, JetTensor)]
    layout = common_layout(*jets)
    if layout.order == 2:
        raise function_refusal(function, "has a jvp for first derivatives alone")
    if transformed():
        raise function_refusal(function, "was called inside a transform of torch.func")
    # A jet in a list is no input to torch, and reaches forward as it is.
    inputs = [arg.primal if isinstance(arg, JetTensor) else arg for arg in args]
    outputs, context, constants = _apply_with_context(function, inputs, kwargs)
    values: Args = outputs if isinstance(outputs, tuple) else (outputs,)
    tangents, attributes = [], {**vars(context)}
    for direction in range(1, 1 + layout.directions):
        vars(context).update(attributes)  # torch calls a jvp once, which may delete what it used
        along = function.jvp(context, *[_tangent(arg, direction) for arg in args])
        tangents.append(along if isinstance(along, tuple) else (along,))
    context.saved_for_forward = None  # type: ignore[assignment]  # breaks a cycle through its outputs
    results = tuple(
        value if id(value) in constants else _attach_tangents(function, value, along, jets)
        for value, *along in zip(values, *tangents, strict=True)
    )
    return results if isinstance(outputs, tuple) else results[0]


def _apply_with_context(
    function: AutogradFunction, inputs: Sequence[object], kwargs: Named
) -> tuple[object, FunctionCtx, set[int]]:
    """Apply a Function to plain tensors; return its outputs, its context, and the ids of the
    outputs that are marked as not differentiable."""
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in iter_tensors(inputs))
    member = "setup_context" if _has_setup(function) else "forward"
    records: list[tuple[FunctionCtx, tuple[Tensor, ...], set[int]]] = []

    def noting(context: FunctionCtx, *args: object) -> object:
        result = getattr(function, member)(context, *args)
        if context.dirty_tensors:
            raise function_refusal(function, "writes into its arguments")
        same = {id(tensor) for tensor in iter_tensors([args, result])}
        saved = context.saved_for_forward or context.to_save
        for part in torch_private.pytree.tree_leaves([saved, vars(context)]):
            harmless = not carries_derivatives(part) if isinstance(part, Tensor) else True
            # Intermediate results of forward have no graph, so that tangents by them have none.
            if needs_grad and id(part) not in same and not (isinstance(part, _PLAIN) and harmless):
                raise function_refusal(
                    function,
                    "keeps for its jvp what is neither an input nor an output, through which "
                    "gradients are lost (torch.no_grad() or differentiable=False asks for none)",
                )
        constants = {id(tensor) for tensor in context.non_differentiable or ()}
        records.append((context, context.saved_for_forward, constants))
        return result

    watched = type(function.__name__, (function,), {member: staticmethod(noting)})
    outputs = cast(AutogradFunction, watched).apply(*inputs, **kwargs)
    # Popped, since the context holds its class, and that the list.
    context, saved, constants = records.pop()
    context.saved_for_forward = saved  # which torch forgets
    return outputs, context, constants


def _tangent(argument: object, direction: int) -> Tensor | None:
    """Return the tangent of an argument for ``jvp``: a copy, since ``jvp`` may write into it; zeros
    for a constant, None for anything else."""
    if isinstance(argument, JetTensor):
        return argument.streams[direction].clone()
    if isinstance(argument, Tensor) and carries_derivatives(argument):
        return torch.zeros_like(argument, requires_grad=False)
    return None


def _attach_tangents(
    function: AutogradFunction, value: object, tangents: list[Tensor | None], jets: list[JetTensor]
) -> object:
    """Return an output with its tangents as a jet; unchanged if all tangents are None."""
    if not isinstance(value, Tensor) or all(tangent is None for tangent in tangents):
        return value
    stack = [value, *(torch.zeros_like(value) if t is None else t for t in tangents)]
    if any(part.shape != value.shape or part.dtype != value.dtype for part in stack):
        raise function_refusal(function, "has a jvp whose tangents do not fit the outputs")
    jet = jets[0].with_streams(stack_with_strides(torch.stack(stack), value.stride()))
    jet_pass = jet.jet_layout.jet_pass
    if jet_pass is not None and storage_id(value) in {storage_id(source) for source in jets}:
        record_storage(
            jet, jet_pass.overlapping
        )  # torch's output is a view, and the stack is not: writes are refused
    return jet


# ---- its forward's own code --------------------------------------------------------------------


class _ForwardCodeMode(TorchFunctionMode):
    """The mode in which a forward runs on jets: ``detach`` and ``no_grad`` have no effect, as
    without gradients, and reading a number is refused."""

    def __init__(self, function: AutogradFunction) -> None:
        super().__init__()
        self.function, self.inference = function, torch.is_inference_mode_enabled()

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch_private.set_grad_enabled:
            return None
        # Of a list of jets, torch reads the numbers in C++, without `__torch_function__`.
        lists = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, list | tuple)]
        inspected = (
            lists
            if func in _LIST_READERS
            else args[:1]
            if func in _NUMBER_READERS | _DETACH
            else ()
        )
        if any(isinstance(value, DerivativeTensor) for value in iter_tensors(inspected)):
            if func in _DETACH:
                return args[0]
            raise function_refusal(self.function, f"reads a number out of a jet ({func.__name__})")
        if torch.is_inference_mode_enabled() != self.inference:
            raise function_refusal(self.function, "changes the inference mode in its forward")
        return func(*args, **(kwargs or {}))


_DETACH = {*spellings("detach", "detach_"), attribute("data")}
_NUMBER_METHODS = "item tolist numpy __array__ __float__ __int__ __complex__ __format__"
_NUMBER_READERS = {getattr(Tensor, name) for name in _NUMBER_METHODS.split()}
_LIST_READERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


def _run_forward(function: AutogradFunction, args: Args, kwargs: Named) -> object:
    """Return the result of a Function's forward, run on jets."""
    return run_forward(function, args, kwargs, _ForwardCodeMode(function))


around.FORWARD_RUNNERS.add(_run_forward.__code__)
