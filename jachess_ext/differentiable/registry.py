"""The table of the functions that `jx.differentiable` calls in place of torch's."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Function: TypeAlias = Callable[..., Any]
A = TypeVar("A", bound=Function)

ANSWERS: dict[Function, Function] = {}
COPIES: dict[Function, Function] = {}
"""Python functions, and the copies that run in their place, within the mode."""


def answers(*functions: Function) -> Callable[[A], A]:
    """Register the decorated function to be called in place of torch's ``functions``.

    It is called outside of the mode, with tensors that are plain or of torch's transforms.

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
