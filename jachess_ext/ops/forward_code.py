"""Run the forward of libraries' autograd Functions as plain code, so that it is differentiated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_private import pytree

AutogradFunction: TypeAlias = type[torch.autograd.Function]
Function: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[object, ...]
Named: TypeAlias = Mapping[str, object]

# Module -> names of Functions that torch.func refuses, since they have no `setup_context`, and
# whose backward is not differentiable.
_BY_MODULE = {
    "diffusers.models.attention_dispatch": (
        *("TemplatedUlyssesAttention", "TemplatedUlyssesAnythingAttention", "SeqAllToAllDim"),
    ),
    "torch.distributed._functional_collectives": ("_FromTorchTensor",),  # of torch 2.10
}


def has_known_code(function: object) -> bool:
    """Return whether a function is one of the Functions in `_BY_MODULE`."""
    module = getattr(function, "__module__", None)
    return getattr(function, "__name__", None) in _BY_MODULE.get(str(module), ())


class ForwardContext:
    """Stand-in for the autograd context of a forward that runs as plain code, without a backward.

    Attributes:
        constants: the outputs that the forward has marked as non-differentiable.
    """

    def __init__(self, inputs: Iterable[object]) -> None:
        self.needs_input_grad = tuple(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        self.constants: list[Tensor] = []

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.constants.extend(outputs)

    def ignore(self, *args: object) -> None:
        """Ignore saved tensors, which only a backward uses, and marks of in-place writes, which are
        differentiated."""

    save_for_backward = save_for_forward = mark_dirty = set_materialize_grads = ignore


def run_forward(
    function: AutogradFunction, args: Args, kwargs: Named, within: AbstractContextManager[Any]
) -> object:
    """Run a Function's forward as plain differentiable code (its backward is not used), within a
    context manager, and return its result."""
    context = ForwardContext(args)
    with within:
        if function.setup_context is not torch.autograd.Function.setup_context:
            outputs = function.forward(*args, **kwargs)
            function.setup_context(context, args, outputs)
        else:
            outputs = function.forward(context, *args, **kwargs)
    constants = {id(tensor) for tensor in context.constants}
    return pytree.tree_map_only(Tensor, lambda t: t.detach() if id(t) in constants else t, outputs)


def overridable(function: Function) -> Function:
    """Return a function that dispatches to modes and to tensor subclasses by
    ``__torch_function__``, as torch's own functions do, and otherwise calls ``function``."""

    @wraps(function)
    def dispatch(*args: object, **kwargs: object) -> object:
        if has_torch_function((None,)):
            return handle_torch_function(dispatch, (), *args, **kwargs)
        if has_torch_function(args):
            return handle_torch_function(function, args, *args, **kwargs)
        return function(*args, **kwargs)

    return dispatch


_OVERRIDABLE: dict[AutogradFunction, Function] = {}


def overridable_functions() -> dict[AutogradFunction, Function]:
    """Replace ``apply`` of the Functions in `_BY_MODULE` so that it dispatches to modes and jets.

    Functions whose module has not been imported are left out.

    Returns:
        Function -> its new ``apply``.
    """
    for module, names in _BY_MODULE.items():
        for name in names:
            function = getattr(sys.modules.get(module), name, None)
            if function is not None and function not in _OVERRIDABLE:
                _OVERRIDABLE[function] = overridable(super(function, function).apply)
                function.apply = staticmethod(_OVERRIDABLE[function])
    return _OVERRIDABLE
