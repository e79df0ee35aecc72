"""Collectives in `jx.differentiable`: linear ones are differentiated, the others refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import FunctionType

import torch
from torch import Tensor, distributed
from torch.autograd import forward_ad

from .. import torch_private
from ..ops import collectives
from ..ops.forward_code import AutogradFunction, overridable_functions, run_forward
from ..ops.library import transformed
from .registry import ANSWERS, COPIES, Function


def _answer(operator: Function, *args: object, **kwargs: object) -> Tensor:
    register_imported()
    x, *settings = collectives.positional(operator, args, kwargs)
    name = collectives.NAMES[operator]
    if transformed() or (torch.is_grad_enabled() and collectives.is_linear(name, settings)):
        return collectives.Collective.apply(x, name, *settings)
    return operator(*args, **kwargs)  # type: ignore[no-any-return]


def _answer_list(operator: Function, *args: object, **kwargs: object) -> list[Tensor]:
    tensors, *settings = collectives.positional(operator, args, kwargs)
    return [_answer(collectives.LISTWISE[operator], x, *settings) for x in tensors]


def _refuse_transforms(function: Function, *args: object, **kwargs: object) -> object:
    """Call a function of `torch.distributed`; raise NotImplementedError if a tensor argument is
    differentiated by torch.func or forward-mode AD, which do not see its in-place writes."""
    leaves = torch_private.pytree.tree_leaves((args, kwargs))
    if transformed() and any(isinstance(x, Tensor) and _is_differentiated(x) for x in leaves):
        raise NotImplementedError(
            f"jx.differentiable: torch.distributed.{function.__name__} was called with a tensor "
            "that torch.func or forward-mode AD differentiates, whose derivative would stay this "
            "rank's own without a word; call the function of "
            "torch.distributed._functional_collectives in its place."
        )
    return function(*args, **kwargs)


def _is_differentiated(x: Tensor) -> bool:
    """Return whether a tensor has a tangent, or is differentiated by torch.func, at any level."""
    if forward_ad.unpack_dual(x).tangent is not None:
        return True
    functorch = torch_private.functorch
    wrapped = functorch.is_functorch_wrapped_tensor(x)
    return wrapped and (x.requires_grad or _is_differentiated(functorch.get_unwrapped(x)))


ANSWERS |= {operator: partial(_answer, operator) for operator in collectives.NAMES}
ANSWERS |= {operator: partial(_answer_list, operator) for operator in collectives.LISTWISE}
if distributed.is_available():
    _public = map(vars(distributed).get, distributed.distributed_c10d.__all__)
    ANSWERS |= {f: partial(_refuse_transforms, f) for f in _public if type(f) is FunctionType}


def register_imported() -> None:
    """Register the functions of modules that have been imported since the last call."""
    for wrapper in collectives.wrappers():
        ANSWERS.setdefault(wrapper, partial(_wrap, wrapper))
    for function, dispatching_apply in overridable_functions().items():
        COPIES[dispatching_apply] = partial(_apply, function)


def _apply(function: AutogradFunction, *args: object, **kwargs: object) -> object:
    return run_forward(function, args, kwargs, nullcontext())


def _wrap(wrapper: Function, x: Tensor) -> Tensor:
    if transformed() or torch.is_grad_enabled():
        return collectives.Collective.apply(x, "wait_tensor")
    return wrapper(x)  # type: ignore[no-any-return]
