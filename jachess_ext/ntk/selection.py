"""Which parameters the kernel sums over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from torch import nn

Chosen = Iterable[str] | Callable[[str, nn.Parameter], bool] | None


def choose_parameters(model: nn.Module, parameters: Chosen) -> dict[str, nn.Parameter]:
    """The chosen parameters by name, each once even where it is tied under several names.

    Args:
        parameters: None: all that require gradients; names (any name of a tied parameter); or a
            predicate (name, parameter) -> bool over those that require gradients.

    Raises:
        TypeError: one string, or something that is neither names nor a predicate.
        ValueError: an unknown or frozen name; nothing left.
    """
    if parameters is None:
        chosen = _trainable(model)
    elif callable(parameters):
        chosen = {name: p for name, p in _trainable(model).items() if parameters(name, p)}
    elif isinstance(parameters, Iterable) and not isinstance(parameters, str):
        chosen = _named(model, parameters)
    else:
        raise TypeError(
            f"parameters is {parameters!r}; expected None, a list of names, or a predicate "
            "(name, parameter) -> bool"
        )
    if not chosen:
        raise ValueError(
            "there is no parameter to take the kernel over: none that requires gradients"
            + (" was chosen" if parameters is not None else "; call requires_grad_(True) on some")
        )
    return chosen


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    every = dict(model.named_parameters(remove_duplicate=False))
    first_name = {id(p): name for name, p in model.named_parameters()}
    chosen = {}
    for name in names:
        if name not in every:
            near = get_close_matches(str(name), every, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"the model has no parameter named {name!r}{hint}")
        if not every[name].requires_grad:
            raise ValueError(
                f"parameter {name!r} is frozen; call requires_grad_(True) on it or leave it out"
            )
        chosen[first_name[id(every[name])]] = every[name]
    return chosen
