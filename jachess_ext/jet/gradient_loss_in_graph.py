"""`jx.gradient_loss` within ``torch.compile``, as part of the traced graph.

Import this file only while dynamo traces: it imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import torch_private
from .compiled.regions import jvp_in_graph
from .engine.types import T
from .gradient_loss_eager import AttachGradients, GradientLoss, Loss, eager_gradient_loss


def traced_gradient_loss(fn: Callable[..., Tensor], x: T, loss: Loss[T]) -> GradientLoss[T]:
    """Compute `gradient_loss` while dynamo traces; eagerly if the graph breaks inside this call."""
    if not is_dynamo_compiling():
        return eager_gradient_loss(fn, x, loss)
    args = x if isinstance(x, tuple) else (x,)

    def sum_value(args: tuple[object, ...]) -> tuple[Tensor, Tensor]:
        value = fn(*args)
        return value.sum(), value

    # No gradients for parameters, else the graph would differentiate this backward.
    with torch.no_grad():
        gradients, (_, value) = torch.func.grad_and_value(sum_value, has_aux=True)(args)
    gradient = gradients if isinstance(x, tuple) else gradients[0]
    # One call gives both, since a loss that draws random numbers would differ in a second call.
    cotangents, total = torch.func.grad_and_value(loss, argnums=(0, 1))(value, gradient)
    cotangent, gradient_cotangents = torch_private.pytree.tree_map(Tensor.detach, cotangents)
    directions = gradient_cotangents if isinstance(x, tuple) else (gradient_cotangents,)
    derivatives = jvp_in_graph(fn, args, directions, False, True, is_second_run=True)
    return GradientLoss(_attach_gradients(total, cotangent, *derivatives), value, gradient)


# After a graph break in this function, dynamo would trace only the remainder, with the first run of
# fn eager: NumPy's random numbers would be constants of the second run. So dynamo skips this frame.
torch_private.skip_code(traced_gradient_loss.__code__)


@torch._dynamo.nonstrict_trace
def _attach_gradients(total: Tensor, cotangent: Tensor, output: Tensor, tangent: Tensor) -> Tensor:
    """Apply `AttachGradients` in a region that dynamo does not trace, as tracing would drop the
    RuntimeError of the backward."""
    return AttachGradients.apply(total, cotangent, output, tangent)
