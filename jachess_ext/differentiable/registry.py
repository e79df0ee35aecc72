"""Registry of the functions that `jx.differentiable` calls in place of torch's."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Function: TypeAlias = Callable[..., Any]
A = TypeVar("A", bound=Function)

ANSWERS: dict[Function, Function] = {}
"""Torch's function -> the function that is called in its place, outside of the mode."""
COPIES: dict[Function, Function] = {}
"""Python function -> the copy that is called in its place, within the mode."""


def answers(*functions: Function) -> Callable[[A], A]:
    """Return a decorator that registers a function to be called in place of torch's ``functions``.

    The function is called outside of the mode, with plain tensors or tensors that torch's
    transforms wrap.

    Examples:
        >>> @answers(torch.special.erfcx)
        ... def erfcx(input):
        ...     return torch.exp(input * input) * torch.erfc(input)
        >>> del ANSWERS[torch.special.erfcx]
    """

    def register(answer: A) -> A:
        ANSWERS.update(dict.fromkeys(functions, answer))
        return answer

    return register
