"""Autograd of the backward operators.

A backward operator without autograd of its own would drop terms of a second backward with no more
than a warning. Its gradient is taken from the pure-torch twin of the forward operator,
differentiated twice, so it stays right without a second set of kernels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _alias(tensor: Tensor) -> Tensor:
    # A view, not a detached copy: with create_graph the result stays connected to the outer graph.
    view = tensor.view_as(tensor)
    return view if view.requires_grad else view.requires_grad_()


def gradient_of_backward(
    forward: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    gy: Tensor,
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of a backward operator in gy and in the forward's inputs.

    With y = forward(*inputs) and (g_1, g_2, ...) = backward(gy, *inputs), returns the gradient of
    Σ_k <cotangents_k, g_k> in [gy, *inputs].

    Args:
        forward: the pure-torch twin, twice differentiable.
        inputs: the forward's differentiable tensors.
        gy: the cotangent that the backward operator was given, shaped as y.
        cotangents: one per input; None where there is none.

    Returns:
        One gradient per [gy, *inputs], None where there is no dependence.
    """
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        gy_alias, aliases = _alias(gy), [_alias(tensor) for tensor in inputs]
        y = forward(*aliases)
        gradients = torch.autograd.grad(y, aliases, gy_alias, create_graph=True, allow_unused=True)
        pairs = [
            (g, c.to(g.dtype))
            for g, c in zip(gradients, cotangents, strict=True)
            if g is not None and c is not None and g.requires_grad
        ]
        if not pairs:
            return [None] * (1 + len(aliases))
        outputs, weights = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, [gy_alias, *aliases], weights, create_graph=keep_graph, allow_unused=True
            )
        )
