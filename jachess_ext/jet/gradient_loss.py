"""`jx.gradient_loss`: training on a gradient with one backward of a tangent.

With g = ∂E/∂x and a loss L(E, g), the chain rule gives ∂L/∂θ = ∂/∂θ (v E + ⟨u, g⟩), v = ∂L/∂E and
u = ∂L/∂g held fixed; and ⟨u, g⟩ is the tangent of E along u.  So a plain forward and backward give
g, and one jet along u with its backward the rest, where ``create_graph=True`` would have the
backward itself differentiated (Kemaev et al., Scalable Meta-Learning via Mixed-Mode
Differentiation, ICML 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import get_device_states

from .. import torch_private
from ..ops.library import constant_when_compiled
from ._types import Function
from .api import graph_serves, jvp
from .context import without_dynamo


class GradientLoss(NamedTuple):
    """Result of `gradient_loss`.

    Attributes:
        loss: a scalar; its ``backward()`` gives the gradients of parameters.
        value: what ``fn`` returned, without a graph.
        gradient: of the sum of ``value``, nested like x, without a graph; None for integers.
    """

    loss: Tensor
    value: Tensor
    gradient: Any


Loss = Callable[[Tensor, Any], Tensor]


def gradient_loss(fn: Callable[..., Tensor], x: object, loss: Loss) -> GradientLoss:
    """Compute a loss of a function and its gradient, to be differentiated by parameters.

    As with ``torch.autograd.grad(fn(x).sum(), x, create_graph=True)``, but no backward is
    differentiated: for gradient penalties, forces, scores of an energy, meta-gradients.  It takes
    fused attention and compiles in one graph.

    Args:
        fn: any torch callable, such as an energy; it runs twice, so it may draw no random numbers.
        x: its argument, a tensor or a nest (list, dict, ...) of tensors; or a tuple with an entry
            for each argument.
        loss: from ``fn(x)`` and the gradient of its sum, nested like x, to a scalar.  It may use
            other tensors that require gradients, x itself among them.

    Returns:
        `GradientLoss`: loss, value and gradient.  ``loss.backward()`` reaches parameters of ``fn``,
        x, and what ``loss`` uses.

    Within ``torch.compile`` ``fn`` has to be an ``nn.Module``, or ``functools.partial`` of one;
    anything else breaks the graph and runs eagerly.

    Raises:
        RuntimeError: ``fn`` draws random numbers, so that its two runs differ.
        ValueError: ``loss`` returned something other than one number.
        TypeError, MissingJetRule: as of `jvp`.

    Example:
        >>> energy = torch.nn.Linear(3, 1)
        >>> def penalty(value, gradient):
        ...     return (gradient.norm(dim=-1) - 1).square().mean()
        >>> result = jx.gradient_loss(energy, torch.randn(5, 3), penalty)
        >>> result.loss.backward()
        >>> energy.weight.grad.shape
        torch.Size([1, 3])
    """
    tracing = is_dynamo_compiling()
    dropout = (
        "gradient_loss runs fn twice, and dropout would differ" if tracing and _drops(fn) else None
    )
    if not graph_serves(tracing, fn, dropout):
        return _eager(fn, x, loss)
    args = x if isinstance(x, tuple) else (x,)

    def summed(args: tuple[object, ...]) -> tuple[Tensor, Tensor]:
        value = fn(*args)
        return value.sum(), value

    # Without gradients of parameters, or the graph would hold a backward to be differentiated.
    with torch.no_grad():
        gradients, (_, value) = torch.func.grad_and_value(summed, has_aux=True)(args)
        gradient = gradients if isinstance(x, tuple) else gradients[0]
        of_value, of_gradient = torch.func.grad(loss, argnums=(0, 1))(value, gradient)
    directions = of_gradient if isinstance(x, tuple) else (of_gradient,)
    total = loss(value, gradient)
    return _joined(total, value, gradient, of_value, jvp(fn, args, directions))


@without_dynamo
def _eager(fn: Callable[..., Tensor], x: object, loss: Loss) -> GradientLoss:
    args = x if isinstance(x, tuple) else (x,)
    leaves, structure = torch_private.pytree.tree_flatten(args)

    def nest(parts: Sequence[object]) -> Any:
        nested = torch_private.pytree.tree_unflatten(list(parts), structure)
        return nested if isinstance(x, tuple) else nested[0]

    points = [_leaf(leaf) for leaf in leaves]
    states = _random_states(points)
    with torch.enable_grad():
        value = fn(*torch_private.pytree.tree_unflatten(points, structure))
        gradients = _gradients(value.sum(), points)
    if not all(map(torch.equal, states, _random_states(points))):
        raise RuntimeError(
            "gradient_loss: fn draws random numbers, such as dropout, and runs twice: call eval(), "
            "or draw them outside; or use create_graph=True within jx.twice_differentiable."
        )
    value = value.detach()
    with torch.enable_grad():
        heads = [_leaf(value), *map(_leaf, gradients)]
        total = loss(heads[0], nest(heads[1:]))  # type: ignore[arg-type]  # the value's leaf
        of_value, *of_gradients = _gradients(total, heads)
        assert of_value is not None
    directions = torch_private.pytree.tree_unflatten(of_gradients, structure)
    derivatives = jvp(fn, args, directions)
    return _joined(total, value, nest(gradients), of_value, derivatives)


def _joined(
    total: Tensor,
    value: Tensor,
    gradient: object,
    of_value: Tensor,
    derivatives: tuple[Tensor, ...],
) -> GradientLoss:
    """Return the loss's number, with the gradients of what it uses itself and those through
    ``fn``."""
    output, tangent = derivatives
    through = tangent.sum() + (of_value * output).sum()
    return GradientLoss(total + (through - through.detach()), value, gradient)


def _leaf(value: object) -> Any:
    """Return a tensor of real or complex numbers as a leaf that requires a gradient."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().requires_grad_()


def _gradients(total: Tensor, leaves: Sequence[object]) -> list[Tensor | None]:
    """Return the gradients of a number in the leaves; None where a leaf takes none."""
    if total.numel() != 1:
        raise ValueError(f"gradient_loss: loss has shape {list(total.shape)}; expected one number.")
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not total.requires_grad:  # of a constant
        total = total + 0 * wanted[0].sum()
    results = iter(torch.autograd.grad(total, wanted, retain_graph=True, materialize_grads=True))
    return [next(results) if any(leaf is w for w in wanted) else None for leaf in leaves]


def _random_states(leaves: Sequence[object]) -> list[Tensor]:
    """Return the states of torch's generators on the CPU and on the leaves' GPUs."""
    return [torch.get_rng_state(), *get_device_states(*leaves)[1]]


@constant_when_compiled  # of modes that the graph guards, since fn reads them
def _drops(fn: Function) -> bool:
    """Return whether a module has dropout switched on: a graph cannot read the generators."""
    module = fn.func if isinstance(fn, partial) else fn
    return isinstance(module, nn.Module) and any(
        isinstance(value, float) and value > 0 and ("drop" in name or "Dropout" in str(type(part)))
        for part in module.modules()
        if part.training
        for name, value in vars(part).items()
    )
