"""`jx.gradient_loss`: training on the gradient of a function by one backward of its tangent.

With g = ∂E/∂x and a loss L(E, g), the chain rule gives ∂L/∂θ = ∂/∂θ (v E + ⟨u, g⟩), where
v = ∂L/∂E and u = ∂L/∂g are held fixed; and ⟨u, g⟩ is the tangent of E along u.  So a plain forward
and backward give g, and one jet along u with its backward gives ∂L/∂θ.  ``create_graph=True``
would differentiate the backward itself instead (Kemaev et al., Scalable Meta-Learning via
Mixed-Mode Differentiation, ICML 2025).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .api import can_join_graph
from .engine.types import T
from .gradient_loss_eager import GradientLoss, Loss, eager_gradient_loss


def gradient_loss(fn: Callable[..., Tensor], x: T, loss: Loss[T]) -> GradientLoss[T]:
    """Compute a loss of a function's value and gradient, to be differentiated by parameters.

    Use it for gradient penalties, forces, scores of an energy and meta-gradients.  The result is
    that of ``torch.autograd.grad(fn(x).sum(), x, create_graph=True)`` followed by the loss, but no
    backward is differentiated, so that fused attention is used; it compiles in one graph.

    Args:
        fn: any torch callable, such as an energy.  It runs twice, and has to be the same function
            each time: it may draw no random numbers, and change nothing that it reads.  If its
            two values differ by more than usual rounding, it runs four more times for the check.
        x: the argument of ``fn``, a tensor or a nest (list, dict, ...) of tensors; or a tuple with
            an entry for each argument.
        loss: maps ``fn(x)`` and the gradient of its sum, nested like x, to a scalar.  It may use
            other tensors that require gradients, also x itself.

    Returns:
        `GradientLoss`: loss, value and gradient.  ``loss.backward()`` gives gradients to parameters
        of ``fn``, to x, and to the tensors that ``loss`` uses.  The loss has no second derivative:
        a backward of it with ``create_graph=True`` raises RuntimeError.

    Within ``torch.compile`` ``fn`` is an ``nn.Module``, or a function that closes over modules,
    tensors, numbers and nests of them; anything else breaks the graph and runs eagerly.

    Raises:
        RuntimeError: ``fn`` draws random numbers, or its two runs differ for another reason.
        ValueError: ``loss`` returned something other than one number.
        TypeError, MissingJetRule: as of `jvp`.

    Examples:
        >>> energy = torch.nn.Linear(3, 1)
        >>> def penalty(value, gradient):
        ...     return (gradient.norm(dim=-1) - 1).square().mean()
        >>> result = jx.gradient_loss(energy, torch.randn(5, 3), penalty)
        >>> result.loss.backward()
        >>> energy.weight.grad.shape
        torch.Size([1, 3])
    """
    if not can_join_graph(is_dynamo_compiling(), fn):
        return eager_gradient_loss(fn, x, loss)
    # imports torch._dynamo, which takes seconds
    from .gradient_loss_in_graph import traced_gradient_loss

    return traced_gradient_loss(fn, x, loss)
