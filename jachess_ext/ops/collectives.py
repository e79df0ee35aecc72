"""Derivatives through torch's collectives, which have no forward mode in torch.

``torch.func.jvp`` treats the result of a functional collective as a constant, and ``vmap`` may use
it before it has arrived.  A collective is linear: its tangent is the collective of the tangent, and
its adjoint is another collective.  All ranks have to compute the same derivatives in the same
order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import torch_private
from .forward_code import overridable
from .library import Context, Gradients

Function: TypeAlias = Callable[..., Any]

BATCH = {
    **{"all_reduce": 0, "broadcast": 0, "wait_tensor": 0},
    **{"all_gather_into_tensor": 1, "all_to_all_single": 1, "reduce_scatter_tensor": 1},
}
"""Name of each collective -> the position of a batch dimension in its tensors: 1 if the collective
splits or joins dimension 0, else 0."""


def _operators(name: str) -> list[Function]:
    """Return the operators of this name that torch's Python functions call: overload packets and
    their default overloads."""
    spaces = torch.ops._c10d_functional, torch.ops._c10d_functional_autograd
    packets = [getattr(space, name) for space in spaces if hasattr(space, name)]
    return [*packets, *(packet.default for packet in packets)]


NAMES = {operator: name for name in BATCH for operator in _operators(name)}
"""Operator of one tensor -> the collective's name."""
LISTWISE = {
    operator: single
    for name in BATCH
    for single in _operators(name)[:1]
    for end in ("_coalesced", "s")
    for operator in _operators(name + end)
}
"""Operator of a list of tensors -> the operator that computes each tensor."""


def positional(
    operator: Function, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Any]:
    """Return all arguments of a call of an operator, in the order of its schema."""
    overload: Any = getattr(operator, "default", operator)
    arguments = overload._schema.arguments[len(args) :]
    return [*args, *(kwargs[argument.name] for argument in arguments)]


def reduction(name: str, settings: Sequence[object]) -> str:
    """Return the reduction of a collective: "sum", "avg", "max", ...; "" if it does not reduce.

    Args:
        settings: the arguments after the tensor.
    """
    operation = getattr(settings[0], "op", settings[0]) if "reduce" in name else ""
    return str(operation).rpartition(".")[2].lower()


def is_linear(name: str, settings: Sequence[object]) -> bool:
    """Return whether a collective is a linear function of its tensor."""
    return reduction(name, settings) in ("", "sum", "avg")


class Collective(torch.autograd.Function):
    """Run a collective and wait for its result; differentiable in any nesting of `torch.func`."""

    @staticmethod
    def forward(x: Tensor, name: str, *settings: object) -> Tensor:
        if torch_private.functorch.is_legacy_batchedtensor(x):  # at level 1, the only level
            inner = torch_private.remove_batch_dim(x, 1, 0, BATCH[name])
            out = Collective.forward(inner, name, *settings)
            return torch_private.add_batch_dim(out, BATCH[name], 1)
        space = torch.ops._c10d_functional
        with torch_private.disable_torch_function():
            if name != "wait_tensor":
                x = getattr(space, name)(x.contiguous(), *settings)
            return space.wait_tensor(x).view_as(x)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.constants = inputs[1:]

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Gradients:
        return _adjoint(gradient, *ctx.constants), *[None] * len(ctx.constants)

    @staticmethod
    def jvp(ctx: Context, tangent: Tensor, *_: None) -> Tensor:
        _check(*ctx.constants)
        return Collective.apply(tangent, *ctx.constants)

    @staticmethod
    def vmap(
        info: object, in_dims: Sequence[int], x: Tensor, name: str, *settings: object
    ) -> tuple[Tensor, int]:
        dim = BATCH[name]
        return Collective.apply(x.movedim(in_dims[0], dim), name, *settings), dim


def _adjoint(gradient: Tensor, name: str, *settings: Any) -> Tensor:
    _check(name, *settings)
    *sizes, group = settings or (None,)
    if name == "all_to_all_single":  # the sizes of the results, then those of the inputs
        return Collective.apply(gradient, name, *reversed(sizes), group)
    if name == "all_gather_into_tensor":
        return Collective.apply(gradient, "reduce_scatter_tensor", "sum", *settings)
    if name == "reduce_scatter_tensor":
        gathered = Collective.apply(gradient, "all_gather_into_tensor", *settings[1:])
        return gathered / settings[1] if reduction(name, settings) == "avg" else gathered
    if name == "broadcast":
        total = Collective.apply(gradient, "all_reduce", "sum", group)
        return total * (torch_private.process_group(group).rank() == settings[0])
    return Collective.apply(gradient, name, *settings)


def _check(name: str, *settings: object) -> None:
    if not is_linear(name, settings):
        raise NotImplementedError(
            f"jx.differentiable: {name} with {reduction(name, settings)!r} has no derivative here, "
            "where torch's tangent would be 0 without a word; expected 'sum' or 'avg': gather the "
            "tensors of all ranks (all_gather) and reduce them by torch's own function, or "
            "detach() what is a constant, such as the maximum that a softmax subtracts."
        )


_WRAPPERS: list[Function] = []


def wrappers() -> list[Function]:
    """Return the functions of torch.distributed._functional_collectives that wrap a collective's
    result in an AsyncCollectiveTensor, which waits for it on first use; [] until that module is
    imported."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and not _WRAPPERS:
        _WRAPPERS.extend(_operators("_wrap_tensor_autograd"))
        if not _WRAPPERS:  # torch 2.10, whose function does not dispatch to modes
            _WRAPPERS.extend([module._maybe_wrap_tensor, overridable(module._maybe_wrap_tensor)])
            module._maybe_wrap_tensor = _WRAPPERS[1]
    return _WRAPPERS
