"""`jx.gradient_loss` outside of ``torch.compile``."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import torch_private
from ..ops.library import Context, Gradients, wide
from .api import jvp
from .engine.context import without_dynamo
from .engine.types import T
from .passes.eager import can_read_values
from .passes.fsdp import collect_groups
from .rows.check import Generators
from .rows.sameness import CAUSES, require_same

if TYPE_CHECKING:  # Python 3.10 has no generic named tuples at runtime

    class GradientLoss(NamedTuple, Generic[T]):
        """Result of `gradient_loss`.

        Attributes:
            loss: a scalar; its ``backward()`` gives the gradients of parameters.
            value: the value of ``fn``, without a graph.
            gradient: the gradient of the sum of ``value``, nested like x, without a graph; None for
                integer tensors.
        """

        loss: Tensor
        value: Tensor
        gradient: T

else:
    GradientLoss = namedtuple("GradientLoss", "loss value gradient")

Loss: TypeAlias = Callable[[Tensor, T], Tensor]
_ALTERNATIVE = "use torch.autograd.grad(..., create_graph=True) within jx.differentiable"
_CHANGED = (
    f"gradient_loss: fn runs twice, and is not the same function each time: {CAUSES}. Call "
    f"eval(), or draw, count and write outside of it; or {_ALTERNATIVE}, which runs it once"
)


@without_dynamo
def eager_gradient_loss(fn: Callable[..., Tensor], x: T, loss: Loss[T]) -> GradientLoss[T]:
    """Compute `gradient_loss` outside ``torch.compile``."""
    args = x if isinstance(x, tuple) else (x,)
    leaves, structure = torch_private.pytree.tree_flatten(args)

    def nest(leaves: Sequence[object]) -> Any:
        nested = torch_private.pytree.tree_unflatten(list(leaves), structure)
        return nested if isinstance(x, tuple) else nested[0]

    points = [_leaf(leaf) for leaf in leaves]

    def run() -> tuple[Tensor, list[Tensor | None]]:
        """Return the value, and the gradients of its sum by the points."""
        with torch.enable_grad():
            value = fn(*torch_private.pytree.tree_unflatten(points, structure))
            return value.detach(), _gradients(value.sum(), points)

    can_read = can_read_values()
    generators = Generators() if can_read else None
    value, gradients = run()
    if generators and generators.have_advanced():
        raise RuntimeError(_CHANGED)
    with torch.enable_grad():
        loss_inputs = [_leaf(value), *map(_leaf, gradients)]
        total = loss(loss_inputs[0], nest(loss_inputs[1:]))
        value_cotangent, *gradient_cotangents = _gradients(total, loss_inputs)
    assert value_cotangent is not None
    directions = torch_private.pytree.tree_unflatten(gradient_cotangents, structure)
    with collect_groups() as groups:
        derivatives: tuple[Tensor, ...] = jvp(fn, args, directions)
    if can_read:
        slope, size = _slope(gradients, gradient_cotangents)

        def common_results() -> list[Tensor]:
            """Return the results of the jet that the first run can be compared with: the value, and
            1 + ⟨u, g⟩ / size."""
            output, tangent = (tensor.detach() for tensor in derivatives)
            return [output, 1 + (tangent.sum(dtype=torch.double) / size).to(output.dtype)]

        def repeat_runs() -> Iterator[tuple[list[Tensor], ...]]:
            nonlocal derivatives
            tangent_run, primal_run = common_results(), [value, *_drop_none(gradients)]
            derivatives = ()  # frees their graph before the next run
            derivatives = jvp(fn, args, directions)
            yield tangent_run, common_results()
            derivatives = ()
            for _ in range(2):
                next_value, next_gradients = run()
                yield primal_run, [next_value, *_drop_none(next_gradients)]
            derivatives = jvp(fn, args, directions)
            yield tangent_run, common_results()

        ratio = 1 + (slope / size).to(value.dtype)
        require_same(fn, [value, ratio], common_results(), repeat_runs(), _CHANGED, groups)
    return GradientLoss(
        AttachGradients.apply(total, value_cotangent, *derivatives), value, nest(gradients)
    )


def _drop_none(results: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tensors of a list without its Nones."""
    return [result for result in results if result is not None]


def _slope(
    gradients: Sequence[Tensor | None], steps: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return ⟨u, g⟩, the derivative along ``steps`` u, and the sum of the absolute values of its
    terms, in units of which it is rounded."""
    pairs = zip(gradients, steps, strict=True)
    terms = [(wide(g).conj() * wide(u)).real for g, u in pairs if g is not None and u is not None]
    slopes = torch.stack([term.sum(dtype=torch.double) for term in terms])
    magnitudes = torch.stack([term.abs().sum(dtype=torch.double) for term in terms])
    return slopes.sum(), magnitudes.sum() + torch.finfo(torch.double).tiny


class AttachGradients(torch.autograd.Function):
    """Return the loss unchanged, with a backward that also differentiates v E + ⟨u, g⟩.

    The gradient of the value E is v, and that of the tangent ⟨u, g⟩ is 1, both times the gradient
    of the loss.  Adding v E + ⟨u, g⟩ to the loss instead could overflow where the loss is finite.
    """

    @staticmethod
    def forward(
        ctx: Context, total: Tensor, value_cotangent: Tensor, output: Tensor, tangent: Tensor
    ) -> Tensor:
        ctx.save_for_backward(value_cotangent)
        ctx.constants = tangent.shape, tangent.dtype
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Context, cotangent: Tensor) -> Gradients:
        # With u and v held fixed, a second derivative would be wrong.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"the loss of gradient_loss has no second derivative: for one, {_ALTERNATIVE}"
            )
        (value_cotangent,) = ctx.saved_tensors
        shape, dtype = ctx.constants
        scalar = cotangent.reshape(())
        return cotangent, None, scalar * value_cotangent, scalar.to(dtype).expand(shape)


def _leaf(value: object) -> Any:
    """Return a real or complex tensor as a leaf that requires a gradient, any other object
    unchanged."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().requires_grad_()


def _gradients(total: Tensor, leaves: Sequence[object]) -> list[Tensor | None]:
    """Return the gradients of a scalar with respect to the leaves; None for a leaf that requires
    no gradient."""
    if total.numel() != 1:
        raise ValueError(f"gradient_loss: loss has shape {list(total.shape)}; expected one number.")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not total.requires_grad:  # a constant
        total = total + 0 * tensors[0].sum()
    results = iter(torch.autograd.grad(total, tensors, retain_graph=True, materialize_grads=True))
    return [next(results) if any(leaf is t for t in tensors) else None for leaf in leaves]
