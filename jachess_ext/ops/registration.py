"""Registers fake kernels and autograd of an operator and of its backward operator.

A backward operator without autograd of its own would drop terms of a second backward with no more
than a warning.  Its gradient is taken from the pure-torch reference of the forward operator,
differentiated twice, so it stays right without a second set of kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .library import loaded


def register(
    name: str,
    *,
    fake: Callable[..., Any],
    fake_backward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    save_backward: Callable[..., None],
    double_backward: Callable[..., Any],
) -> None:
    """Registers ``jachess::name`` and ``jachess::name_backward``, where the library is loaded.

    Args:
        fake, fake_backward: as of `torch.library.register_fake`.
        save, backward: of the forward operator, as of `torch.library.register_autograd`.
        save_backward, double_backward: of the backward operator.
    """
    if not loaded():
        return
    torch.library.register_fake(f"jachess::{name}", fake)
    torch.library.register_fake(f"jachess::{name}_backward", fake_backward)
    torch.library.register_autograd(f"jachess::{name}", backward, setup_context=save)
    torch.library.register_autograd(
        f"jachess::{name}_backward", double_backward, setup_context=save_backward
    )


def register_operator(
    name: str,
    reference: Callable[..., Any],
    *,
    tensors: int,
    differentiable: int = 1,
    fake: Callable[..., Any] | None = None,
) -> None:
    """`register` for an operator whose backward takes its results' gradients and its arguments.

    Args:
        reference: the pure-torch reference, with the operator's own arguments and results.
        tensors: how many of the operator's first arguments are tensors or None.
        differentiable: how many of these, from the first, the backward gives a gradient of.
        fake: as of `torch.library.register_fake`; None: one result like the first argument.
    """

    def fake_backward(*args: Any) -> Any:
        given = args[results(args) :]
        found = tuple(contiguous_like(x) for x in given[:differentiable])
        return found if differentiable > 1 else found[0]

    def results(args: Sequence[Any]) -> int:
        """How many gradients of results stand before the forward's arguments."""
        return len(args) - arguments

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.constants = inputs[tensors:]

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operator = getattr(torch.ops.jachess, f"{name}_backward")
        found = operator(*gradients, *ctx.saved_tensors, *ctx.constants)
        return _padded(found if differentiable > 1 else (found,), arguments)

    def save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        split = results(inputs) + tensors
        ctx.save_for_backward(*inputs[:split])
        ctx.constants = inputs[split:]

    def double_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradients, given = saved[:-tensors], saved[-tensors:]

        def forward(*inputs: Tensor) -> Any:
            return reference(*inputs, *given[differentiable:], *ctx.constants)

        found = gradient_of_backward(forward, given[:differentiable], gradients, cotangents)
        return _padded(found, len(gradients) + arguments)

    if not loaded():
        return
    schema = getattr(torch.ops.jachess, name).default._schema
    arguments = len(schema.arguments)
    register(
        name,
        fake=fake or (lambda x, *_: contiguous_like(x)),
        fake_backward=fake_backward,
        save=save,
        backward=backward,
        save_backward=save_backward,
        double_backward=double_backward,
    )


def register_without_derivative(name: str, fake: Callable[..., Any]) -> None:
    """Registers the fake kernel, and a sentence in place of a derivative that would be zero."""

    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"torch.ops.jachess.{name} has no derivative: call jachess_ext.ops.{name}, which takes "
            "its pure-torch reference where a gradient is asked for."
        )

    if loaded():
        torch.library.register_fake(f"jachess::{name}", fake)
        torch.library.register_autograd(f"jachess::{name}", backward)


def contiguous_like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _padded(gradients: Sequence[Tensor | None], length: int) -> tuple[Tensor | None, ...]:
    return (*gradients, *([None] * (length - len(gradients))))


def _alias(tensor: Tensor) -> Tensor:
    # A view, not a detached copy: with create_graph the result stays connected to the outer graph.
    view = tensor.view_as(tensor)
    return view if view.requires_grad else view.requires_grad_()


def gradient_of_backward(
    forward: Callable[..., Any],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of a backward operator in the gradients it was given and in the forward's inputs.

    With (y_1, ...) = forward(*inputs) and (g_1, g_2, ...) = backward(*gradients, *inputs), returns
    the gradient of Σ_k <cotangents_k, g_k> in [*gradients, *inputs].

    Args:
        forward: the pure-torch reference, twice differentiable.
        inputs: the forward's differentiable tensors.
        gradients: what the backward operator was given, shaped as y_1, ...
        cotangents: one per input; None where there is none.

    Returns:
        One gradient per [*gradients, *inputs], None where there is no dependence.
    """
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given, aliases = [_alias(g) for g in gradients], [_alias(tensor) for tensor in inputs]
        y = forward(*aliases)
        found = torch.autograd.grad(y, aliases, given, create_graph=True, allow_unused=True)
        pairs = [
            (g, c.to(g.dtype))
            for g, c in zip(found, cotangents, strict=True)
            if g is not None and c is not None and g.requires_grad
        ]
        if not pairs:
            return [None] * (len(given) + len(aliases))
        outputs, weights = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, [*given, *aliases], weights, create_graph=keep_graph, allow_unused=True
            )
        )
