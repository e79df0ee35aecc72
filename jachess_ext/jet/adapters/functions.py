"""Rules of autograd Functions that are called with a jet.

A Function runs its forward below `__torch_function__`, without gradients, and has a backward of its
own that handles no streams.  So `watch_functions` replaces ``apply`` of every Function by a method
that calls a rule if an argument is a jet.  The rule is the first of these that exists:

    the Function is named in `forward_code`     run the code of its forward on jets
    it belongs to a library                     its rule in `libraries.py`
    it has a ``jvp``                            first derivatives by this method

Other Functions are refused (`autograd_functions.function_refusal`).
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
"""The arguments of a Function's forward, by their names."""
_LIBRARY_RULES: dict[str, tuple[str, set[str], Rule]] = {}
_SAVES_INPUTS = torch_private.find("torch.utils.checkpoint._NoopSaveInputs")
"""The Function by which checkpoints of torch 2.10 save the inputs of a block, jets among them."""


def library_rule(library: str, *names: str, accepts: str) -> Callable[[Rule], Rule]:
    """Decorate a rule, which is called with `Options`, to register it for Functions of a library.

    The library need not be installed.

    Args:
        library: a substring of the name of the Functions' module.
        names: names of the classes.
        accepts: names, separated by blanks, of the arguments that the rule uses, or that do not
            change the result.  A call that sets any other argument (`is_unset`) is refused.
    """

    def register(rule: Rule) -> Rule:
        _LIBRARY_RULES.update(dict.fromkeys(names, (library, set(accepts.split()), rule)))
        return rule

    return register


def is_unset(value: object) -> bool:
    """Return whether an argument is None, False, 0 or empty."""
    return not isinstance(value, Tensor) and not value


@contextmanager
def forward_code(*functions: AutogradFunction) -> Iterator[None]:
    """Differentiate autograd Functions by the code of their forward, while the context lasts.

    If such a Function is called with a jet, its ``forward`` runs on the jet, torch function by
    torch function, in place of ``apply``; its ``backward`` is not called.  Derivatives, and
    gradients through them, are those of the code of ``forward``: ``detach`` and ``no_grad`` inside
    have no effect, as in any Function, and converting a jet to a number is refused.

    Do not name a Function whose backward differs from the derivative on purpose, such as a
    straight-through estimator: the rounding in its forward has the derivative 0.  Do not name a
    Function whose ``forward`` depends on ``torch.is_grad_enabled()``, ``requires_grad`` or
    ``ctx.needs_input_grad`` either, which may differ for a jet.

    With ``jvp(differentiable=False)`` the value and its gradient are those of ``apply``; only the
    tangent is that of the code.

    This context manager also works as a decorator.  Calls with plain tensors do not change.

    Args:
        functions: subclasses of `torch.autograd.Function`.

    Raises:
        TypeError: an argument is no subclass of `torch.autograd.Function`.

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
    """Replace ``apply`` of every autograd Function by a method that calls a rule if an argument is
    a jet.

    The replacement is permanent, since a backward that recomputes a checkpoint calls Functions
    after the pass.  Calls without jets do not change, on any thread.
    """
    if around.APPLY_OWNER is None:
        return

    # The name matters: torch.compile recognises a bound ``apply`` by it.
    def apply(function: AutogradFunction, *args: object, **kwargs: object) -> object:
        jets = [v for v in (*args, *kwargs.values()) if isinstance(v, DerivativeTensor)]
        if jets and function is not _SAVES_INPUTS:
            # Not the attribute ``apply`` of the class, which may be overridden.
            method = MethodType(around.APPLY, function)
            # The defaults of forward's parameters are bound here, as by a Python ``apply``.
            if around.APPLY_IS_C and _has_setup(function):
                bound = inspect.signature(function.forward).bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
            return handle_torch_function(method, jets, *args, **kwargs)
        return super(around.APPLY_OWNER, function).apply(*args, **kwargs)  # type: ignore[misc]

    around.APPLY_OWNER.apply = classmethod(apply)
    if around.APPLY_IS_C:
        around.APPLY = apply  # so that a TorchFunctionMode which calls the method gets here again
        _rebind_early_methods()


def _rebind_early_methods() -> None:
    """Replace every method ``apply`` that a program bound earlier, as by ``f = Square.apply``.

    The bound methods are found in namespaces of modules, objects and classes, in other dicts, lists
    and closures.  Tuples and `functools.partial` cannot be changed; calls through these with a jet
    are refused.
    """
    old_methods = {
        id(method): method
        for method in gc.get_objects()
        if type(method) is BuiltinMethodType
        and method.__name__ == "apply"
        and issubclass(type(method.__self__), type(torch.autograd.Function))
    }
    # id of an old method → the method that replaces it
    replacements = {key: method.__self__.apply for key, method in old_methods.items()}  # type: ignore[attr-defined]
    for holder in gc.get_referrers(*old_methods.values()):
        if isinstance(holder, CellType):
            holder.cell_contents = replacements[id(holder.cell_contents)]
        elif isinstance(holder, list):
            holder[:] = [replacements.get(id(value), value) for value in holder]
        elif holder is not old_methods and not isinstance(holder, tuple | FrameType):
            namespace = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
            if isinstance(namespace, dict):
                _rebind_names(namespace, replacements)


def _rebind_names(namespace: dict[Any, Any], replacements: dict[int, object]) -> None:
    """Replace the values of a namespace whose ids are keys of ``replacements``."""
    cls = None
    if "__module__" in namespace:  # perhaps that of a class, whose method cache setattr updates
        cls = next((o for o in gc.get_referrers(namespace) if isinstance(o, type)), None)
    for name, value in [*namespace.items()]:
        if id(value) in replacements and cls is not None:
            setattr(cls, name, replacements[id(value)])
        elif id(value) in replacements:
            namespace[name] = replacements[id(value)]


def apply_to_jets(function: AutogradFunction, *args: object, **kwargs: object) -> object:
    """Compute ``function.apply(*args, **kwargs)``, where some arguments are jets."""
    jet_pass = common_layout(*args, *kwargs.values()).jet_pass
    forward_functions = around.FORWARD_CODE.get() | (jet_pass.forward_code if jet_pass else set())
    if function in forward_functions or has_known_code(function):
        return _run_forward(function, args, kwargs)
    library, accepted_names, rule = _LIBRARY_RULES.get(function.__name__, ("", set(), None))
    if rule is not None and library in function.__module__:
        options = _name_arguments(function, args, kwargs)
        if unsupported := [n for n in options if not (n in accepted_names or is_unset(options[n]))]:
            raise function_refusal(function, f"was called with {unsupported[0]}, which has no rule")
        with without_autocast(next(iter_tensors(args)).device.type):
            return rule({name: value for name, value in options.items() if name in accepted_names})
    if function.jvp is not torch.autograd.Function.jvp:
        return _apply_with_jvp(function, args, kwargs)
    raise function_refusal(function)


around.APPLY_RULE.append(apply_to_jets)
watch_functions()


def _has_setup(function: AutogradFunction) -> bool:
    """Return whether a Function defines `setup_context`, so that its forward takes no context."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _name_arguments(function: AutogradFunction, args: Args, kwargs: Named) -> Options:
    """Return the arguments of a call by their names in the Function's forward, with defaults."""
    context = () if _has_setup(function) else (None,)
    bound = inspect.signature(function.forward).bind(*context, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[len(context) :])


# ---- Functions with a jvp ----------------------------------------------------------------------


_GRAPHLESS = (*(bool, int, float, complex, str, type(None)), type, torch.dtype, torch.device)


def _apply_with_jvp(function: AutogradFunction, args: Args, kwargs: Named) -> object:
    """Return a Function's outputs as jets, with tangents computed by the Function's ``jvp``, one
    direction at a time."""
    jets = [arg for arg in args if isinstance(arg, JetTensor)]
    layout = common_layout(*jets)
    if layout.order == 2:
        raise function_refusal(function, "has a jvp for first derivatives alone")
    if transformed():
        raise function_refusal(function, "was called inside a transform of torch.func")
    # Only jets that are arguments are replaced: torch takes no tensor in a list as an input, so
    # that a jet in a list is passed to forward.
    inputs = [arg.primal if isinstance(arg, JetTensor) else arg for arg in args]
    outputs, context, constants = _apply_with_context(function, inputs, kwargs)
    values: Args = outputs if isinstance(outputs, tuple) else (outputs,)
    tangents, attributes = [], {**vars(context)}
    for direction in range(1, 1 + layout.directions):
        # A jvp may delete attributes that it has used, since torch calls it only once.
        vars(context).update(attributes)
        out = function.jvp(context, *[_tangent(arg, direction) for arg in args])
        tangents.append(out if isinstance(out, tuple) else (out,))
    context.saved_for_forward = None  # type: ignore[assignment]  # breaks a cycle through its outputs
    results = tuple(
        value if id(value) in constants else _attach_tangents(function, value, value_tangents, jets)
        for value, *value_tangents in zip(values, *tangents, strict=True)
    )
    return results if isinstance(outputs, tuple) else results[0]


def _apply_with_context(
    function: AutogradFunction, inputs: Sequence[object], kwargs: Named
) -> tuple[object, FunctionCtx, set[int]]:
    """Apply a Function to plain tensors; return its outputs, its context, and the ids of the
    outputs that it marks as not differentiable.

    Raises:
        RuntimeError: the Function writes into its arguments; or gradients are needed, and it saves
            an intermediate result for its jvp, which has no graph.
    """
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in iter_tensors(inputs))
    method = "setup_context" if _has_setup(function) else "forward"
    records: list[tuple[FunctionCtx, tuple[Tensor, ...], set[int]]] = []

    def run_and_record(context: FunctionCtx, *args: object) -> object:
        result = getattr(function, method)(context, *args)
        if context.dirty_tensors:
            raise function_refusal(function, "writes into its arguments")
        arguments_and_outputs = {id(tensor) for tensor in iter_tensors([args, result])}
        saved = context.saved_for_forward or context.to_save
        for leaf in torch_private.pytree.tree_leaves([saved, vars(context)]):
            is_integer = isinstance(leaf, Tensor) and not carries_derivatives(leaf)
            is_graphless = is_integer or isinstance(leaf, _GRAPHLESS)
            # Intermediate results of forward have no graph, so tangents computed from them have
            # none either.
            if needs_grad and not is_graphless and id(leaf) not in arguments_and_outputs:
                raise function_refusal(
                    function,
                    "keeps for its jvp what is neither an input nor an output, through which "
                    "gradients are lost (torch.no_grad() or differentiable=False asks for none)",
                )
        constants = {id(tensor) for tensor in context.non_differentiable or ()}
        records.append((context, context.saved_for_forward, constants))
        return result

    recorder = type(function.__name__, (function,), {method: staticmethod(run_and_record)})
    outputs = cast(AutogradFunction, recorder).apply(*inputs, **kwargs)
    # Pop, to break a cycle: the context refers to its class, and the class to the list.
    context, saved, constants = records.pop()
    context.saved_for_forward = saved  # torch has deleted it
    return outputs, context, constants


def _tangent(argument: object, direction: int) -> Tensor | None:
    """Return the tangent of an argument for ``jvp``, copied, since ``jvp`` may write into it; zeros
    for a plain tensor, None for an argument without derivatives."""
    if isinstance(argument, JetTensor):
        return argument.streams[direction].clone()
    if isinstance(argument, Tensor) and carries_derivatives(argument):
        return torch.zeros_like(argument, requires_grad=False)
    return None


def _attach_tangents(
    function: AutogradFunction, value: object, tangents: list[Tensor | None], jets: list[JetTensor]
) -> object:
    """Return an output of a Function and its tangents as a jet; the output unchanged if all
    tangents are None."""
    if not isinstance(value, Tensor) or all(tangent is None for tangent in tangents):
        return value
    stack = [value, *(torch.zeros_like(value) if t is None else t for t in tangents)]
    if any(t.shape != value.shape or t.dtype != value.dtype for t in stack):
        raise function_refusal(function, "has a jvp whose tangents do not fit the outputs")
    jet = jets[0].with_streams(stack_with_strides(torch.stack(stack), value.stride()))
    jet_pass = jet.jet_layout.jet_pass
    if jet_pass is not None and storage_id(value) in {storage_id(source) for source in jets}:
        # torch's output is a view, the stack is not: refuse writes
        record_storage(jet, jet_pass.overlapping)
    return jet


# ---- the code of forward -----------------------------------------------------------------------


class _ForwardCodeMode(TorchFunctionMode):
    """The mode in which a Function's forward runs on jets.

    ``detach`` and ``no_grad`` have no effect, as in a forward that torch runs without gradients,
    and converting a jet to a number is refused.
    """

    def __init__(self, function: AutogradFunction) -> None:
        super().__init__()
        self.function, self.in_inference_mode = function, torch.is_inference_mode_enabled()

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch_private.set_grad_enabled:
            return None
        # From a list of jets torch gets the numbers in C++, without `__torch_function__`.
        lists = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, list | tuple)]
        sources = (
            lists
            if func in _LIST_READERS
            else args[:1]
            if func in _NUMBER_READERS | _DETACH
            else ()
        )
        if any(isinstance(value, DerivativeTensor) for value in iter_tensors(sources)):
            if func in _DETACH:
                return args[0]
            raise function_refusal(self.function, f"reads a number out of a jet ({func.__name__})")
        if torch.is_inference_mode_enabled() != self.in_inference_mode:
            raise function_refusal(self.function, "changes the inference mode in its forward")
        return func(*args, **(kwargs or {}))


_DETACH = {*spellings("detach", "detach_"), attribute("data")}
_NUMBER_METHODS = "item tolist numpy __array__ __float__ __int__ __complex__ __format__"
_NUMBER_READERS = {getattr(Tensor, name) for name in _NUMBER_METHODS.split()}
_LIST_READERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


def _run_forward(function: AutogradFunction, args: Args, kwargs: Named) -> object:
    """Run a Function's forward on jets, and return its result."""
    return run_forward(function, args, kwargs, _ForwardCodeMode(function))


around.FORWARD_RUNNERS.add(_run_forward.__code__)
