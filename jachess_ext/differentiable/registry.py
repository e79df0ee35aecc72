"""The table from torch's functions to what differentiates them in their place."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Function: TypeAlias = Callable[..., Any]
A = TypeVar("A", bound=Function)

ANSWERS: dict[Function, Function] = {}
COPIES: dict[Function, Function] = {}
"""Functions of Python, and what runs within the mode instead of them."""


def answers(*functions: Function) -> Callable[[A], A]:
    """Register the decorated function as what `jx.differentiable` calls in place of torch's
    ``functions``, with their arguments.

    It is called without the mode, in plain tensors or those of torch's transforms.

    Example:
        >>> @answers(torch.special.erfcx)
        ... def erfcx(input):
        ...     return torch.exp(input * input) * torch.erfc(input)
        >>> del ANSWERS[torch.special.erfcx]
    """

    def register(answer: A) -> A:
        ANSWERS.update(dict.fromkeys(functions, answer))
        return answer

    return register
