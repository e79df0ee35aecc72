"""autograd Functions that are handed a jet: how they are seen, and which of them are served.

A Function runs its forward below `__torch_function__`, without gradients, and has a backward of its
own, which knows no streams.  So `watch_functions` takes a call of ``apply`` with a jet before torch
does.  Served are, in this order,

    named in `forward_code`     its forward's own code, on jets
    of a known library          the rule that `rules/libraries.py` has for it
    with a ``jvp``              first derivatives by it, as torch.func.jvp takes them

and others are refused (registry.py), with a sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from .. import torch_private
from ..ops.library import transformed
from ._types import Args, Named
from .context import without_autocast
from .derivative import DerivativeTensor, carries_derivatives
from .layout import each_tensor, map_tensors
from .registry import (
    APPLY,
    FORWARD_CODE,
    RUNNING_FORWARDS,
    AutogradFunction,
    Rule,
    attribute,
    function_refusal,
    serve_functions,
    spellings,
)
from .strides import memory_of, note_memory, stack_laid_out
from .tensor import JetTensor, common_layout

_LIBRARY_RULES: dict[str, tuple[str, Rule]] = {}


def library_rule(library: str, *names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the Functions of a library, which need not be installed.

    It is called with the Function, then with the arguments of its forward by their names; those
    that it does not name have to be absent, None or False.

    Args:
        library: part of the name of the Functions' module.
        names: names of the classes.
    """

    def register(rule: Rule) -> Rule:
        _LIBRARY_RULES.update(dict.fromkeys(names, (library, rule)))
        return rule

    return register


@contextmanager
def forward_code(*functions: AutogradFunction) -> Iterator[None]:
    """Differentiate autograd Functions by their forward's own code, while the context lasts.

    Where a jet meets one of them, its ``forward`` runs on the jet, torch function by torch
    function, in place of ``apply``; ``backward`` is not asked, nor is what ``forward`` saves for
    it.  Derivatives, and gradients through them, are those of what ``forward`` computes: ``detach``
    and ``no_grad`` inside have no effect, as in any Function, and a number read out of a jet is
    refused.  So name no Function whose backward is something else on purpose, such as a
    straight-through estimator: its rounding has the derivative 0.

    It is a decorator, too.  Plain tensors reach the Functions as ever.

    Args:
        functions: subclasses of `torch.autograd.Function`.

    Raises:
        TypeError: one of them is something else.

    Example:
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
    token = FORWARD_CODE.set(FORWARD_CODE.get() | {*functions})
    try:
        yield
    finally:
        FORWARD_CODE.reset(token)


def watch_functions() -> None:
    """Have every autograd Function ask whether a jet is among its arguments, from now on.

    Not for the time of a pass alone: a backward that runs a checkpoint again calls them, too.  Of
    other calls nothing changes, on any thread.
    """
    # The base of torch.autograd.Function, whose method its ``apply`` calls: ``f = Square.apply``
    # binds that one when a module is imported.
    base = torch_private.single_level_function
    if "apply" in vars(base):
        return

    def asks_first(function: AutogradFunction, *args: object, **kwargs: object) -> object:
        jets = [v for v in (*args, *kwargs.values()) if isinstance(v, DerivativeTensor)]
        if jets:
            apply = MethodType(APPLY, function)  # a class may have an ``apply`` of its own
            return handle_torch_function(apply, jets, *args, **kwargs)
        return super(base, function).apply(*args, **kwargs)  # type: ignore[misc]

    base.apply = classmethod(asks_first)


@serve_functions
def call(function: AutogradFunction, *args: object, **kwargs: object) -> object:
    """Answer ``function.apply(*args, **kwargs)`` with jets among the arguments."""
    layout = common_layout(*args, *kwargs.values())
    if function in FORWARD_CODE.get() or (layout.run and function in layout.run.forward_code):
        return by_forward(function, args, kwargs)
    library, rule = _LIBRARY_RULES.get(function.__name__, ("", None))
    if rule is not None and library in function.__module__:
        with without_autocast(next(each_tensor(args)).device.type):
            return rule(function, **_by_name(function, args, kwargs))
    if function.jvp is not torch.autograd.Function.jvp:
        return _by_jvp(function, args, kwargs)
    raise function_refusal(function)


def _has_setup(function: AutogradFunction) -> bool:
    """Return whether its forward takes no context, which `setup_context` is given."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _by_name(function: AutogradFunction, args: Args, kwargs: Named) -> dict[str, object]:
    """Return the arguments of its forward by their names, with the defaults of what is absent."""
    context = () if _has_setup(function) else (None,)
    bound = inspect.signature(function.forward).bind(*context, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[len(context) :])


# ---- its own jvp -------------------------------------------------------------------------------

_PLAIN = (*(bool, int, float, complex, str, type(None), type, torch.dtype, torch.device), Tensor)


def _by_jvp(function: AutogradFunction, args: Args, kwargs: Named) -> object:
    """Return a Function's result with tangents by its ``jvp``, along every direction."""
    jets = [arg for arg in args if isinstance(arg, JetTensor)]
    layout = common_layout(*jets)
    if layout.order == 2:
        raise function_refusal(function, "has a jvp for first derivatives alone")
    if transformed():
        raise function_refusal(function, "was called inside a transform of torch.func")
    # Only what is an argument itself is an input to torch: a jet in a list goes on to forward.
    inputs = [arg.primal if isinstance(arg, JetTensor) else arg for arg in args]
    outputs, context, others = _with_context(function, inputs, kwargs)
    if others and torch.is_grad_enabled() and any(t.requires_grad for t in each_tensor(inputs)):
        # What forward computes has no graph, so that neither has what jvp makes of it.
        raise function_refusal(
            function,
            "keeps for its jvp what is neither an input nor an output, through which gradients "
            "would be lost: have it keep these alone, or take the pass without gradients "
            "(torch.no_grad(), jx.jvp(..., differentiable=False))",
        )
    several = isinstance(outputs, tuple)
    values: Args = outputs if isinstance(outputs, tuple) else (outputs,)
    tangents = []
    for direction in range(1, 1 + layout.directions):
        along = function.jvp(context, *[_tangent(arg, direction) for arg in args])
        tangents.append(along if isinstance(along, tuple) else (along,))
    results = [
        _joined(function, value, along, jets)
        for value, *along in zip(values, *tangents, strict=True)
    ]
    return tuple(results) if several else results[0]


def _with_context(
    function: AutogradFunction, inputs: Sequence[object], kwargs: Named
) -> tuple[object, Any, bool]:
    """Apply a Function to plain tensors; also return its context, and whether that holds tensors
    which are neither inputs nor outputs."""
    noted: list[tuple[Any, Args | None, bool]] = []

    def note(context: Any, outputs: object) -> None:
        if context.dirty_tensors:
            raise function_refusal(function, "writes into its arguments")
        same = {id(tensor) for tensor in each_tensor([inputs, outputs])}
        saved = context.saved_for_forward or context.to_save
        leaves = torch_private.pytree.tree_leaves([saved, vars(context)])
        others = any(
            id(leaf) not in same and carries_derivatives(leaf)
            if isinstance(leaf, Tensor)
            else not isinstance(leaf, _PLAIN)
            for leaf in leaves
        )
        noted.append((context, context.saved_for_forward, others))

    def forward(context: object, *args: object) -> object:
        outputs = function.forward(context, *args)
        note(context, outputs)
        return outputs

    def setup_context(context: object, inputs: object, output: object) -> None:
        function.setup_context(context, inputs, output)  # type: ignore[arg-type]
        note(context, output)

    member = setup_context if _has_setup(function) else forward
    members = {member.__name__: staticmethod(member)}
    noting = cast(AutogradFunction, type(function.__name__, (function,), members))
    outputs = noting.apply(*inputs, **kwargs)
    context, saved, others = noted[0]
    context.saved_for_forward = saved  # which torch forgets after its own call of jvp
    return outputs, context, others


def _tangent(argument: object, direction: int) -> Tensor | None:
    """Return what ``jvp`` is called with; a copy, into which it may write."""
    if isinstance(argument, JetTensor):
        return argument.streams[direction].clone()
    if isinstance(argument, Tensor) and carries_derivatives(argument):
        return torch.zeros_like(argument, requires_grad=False)
    return None


def _joined(
    function: AutogradFunction, value: object, tangents: list[Tensor | None], jets: list[JetTensor]
) -> object:
    """Return an output as a jet; as it is where ``jvp`` gave no tangent."""
    if not isinstance(value, Tensor) or all(tangent is None for tangent in tangents):
        return value
    stack = [value, *(torch.zeros_like(value) if t is None else t for t in tangents)]
    if any(part.shape != value.shape or part.dtype != value.dtype for part in stack):
        raise function_refusal(
            function,
            f"has a jvp that returned {[(list(t.shape), t.dtype) for t in stack[1:]]} for an "
            f"output {list(value.shape)} of {value.dtype}",
        )
    jet = jets[0].with_streams(stack_laid_out(torch.stack(stack), value.stride()))
    run = jet.jet_layout.run
    if run is not None and memory_of(value) in {memory_of(source) for source in jets}:
        note_memory(jet, run.expanded)  # torch's output is a view, which no write may leave behind
    return jet


# ---- its forward's own code --------------------------------------------------------------------


class _Context:
    """What a forward gets as its context where its own code runs on jets."""

    def __init__(self, inputs: Iterable[object]) -> None:
        self.needs_input_grad = tuple(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        self.constants: list[Tensor] = []

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.constants.extend(outputs)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"a forward under jx.forward_code has no context with {name!r}")

    def ignore(self, *args: object) -> None:
        """Save nothing: only backward would read it; what is written in place is a jet."""

    save_for_backward = save_for_forward = mark_dirty = set_materialize_grads = ignore


class _OneFunction(TorchFunctionMode):
    """The mode in which a forward runs on jets: torch runs it without gradients, so that inside
    there is nothing to detach from."""

    def __init__(self, function: AutogradFunction) -> None:
        super().__init__()
        self.function, self.inference = function, torch.is_inference_mode_enabled()

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is _SET_GRADIENTS:
            return None
        if args and isinstance(args[0], DerivativeTensor):
            if func in _DETACH:
                return args[0]
            if func in _READ:
                raise function_refusal(
                    self.function, f"reads a number out of a jet ({func.__name__}) in its forward"
                )
        if torch.is_inference_mode_enabled() != self.inference:
            raise function_refusal(self.function, "changes the inference mode in its forward")
        return func(*args, **(kwargs or {}))


_SET_GRADIENTS = torch._C._set_grad_enabled
_DETACH = {*spellings("detach", "detach_"), attribute("data")}
_READ = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__complex__")
}


def by_forward(function: AutogradFunction, args: Args, kwargs: Named) -> object:
    """Return what a Function's forward makes of jets."""
    context = _Context(args)
    running = RUNNING_FORWARDS.set(RUNNING_FORWARDS.get() + 1)
    try:
        with _OneFunction(function):
            if _has_setup(function):
                outputs = function.forward(*args, **kwargs)
                function.setup_context(cast(Any, context), args, outputs)
            else:
                outputs = function.forward(context, *args, **kwargs)
    finally:
        RUNNING_FORWARDS.reset(running)
    constants = {id(tensor) for tensor in context.constants}
    return map_tensors(outputs, lambda t: t.detach() if id(t) in constants else t)
