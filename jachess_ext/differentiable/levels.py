"""Which derivatives of a call are being computed, by its tensors and torch's transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import torch_private


class Levels(NamedTuple):
    """Nesting of the derivatives of a call that are being computed.

    Attributes:
        forward: number of levels of forward mode (`torch.func.jvp`, and dual numbers).
        reverse: number of levels of `torch.func`'s reverse mode.
        has_graph: whether a tensor requires a gradient outside of these levels.
    """

    forward: int
    reverse: int
    has_graph: bool

    @property
    def has_nested_forward(self) -> bool:
        """Return whether forward mode is nested with another derivative."""
        return self.forward > 0 and self.forward + self.reverse + self.has_graph > 1


def levels_of(tensors: Sequence[Tensor]) -> Levels:
    """Return the numbers of levels at which any of the tensors is differentiated."""
    functorch = torch_private.functorch
    has_dual_level = forward_ad._current_level >= 0
    if functorch.peek_interpreter_stack() is None:
        has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return Levels(int(has_dual_level and any(map(_has_tangent, tensors))), 0, has_graph)
    wrapper_levels, unwrapped = set(), []
    for x in tensors:
        while functorch.is_functorch_wrapped_tensor(x):
            wrapper_levels.add(functorch.maybe_get_level(x))
            x = functorch.get_unwrapped(x)
        unwrapped.append(x)
    stack = functorch.get_interpreter_stack()
    kinds = [layer.key() for layer in stack if layer.level() in wrapper_levels]
    forward = kinds.count(functorch.TransformType.Jvp)
    if has_dual_level:
        with torch_private.pyfunctorch.temporarily_clear_interpreter_stack():
            forward += any(map(_has_tangent, unwrapped))
    reverse = kinds.count(functorch.TransformType.Grad)
    return Levels(forward, reverse, any(x.requires_grad for x in unwrapped))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def is_batched(x: Tensor | None) -> bool:
    """Return whether a tensor is batched by `torch.func.vmap` at any level."""
    functorch = torch_private.functorch
    while x is not None and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
