"""One table from torch functions to jet rules, and what is said when an entry is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .. import torch_private
from .opaque import known_fix

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

_RULES: dict[Any, Rule] = {}
_GENERAL: dict[Any, Rule] = {}
_NAMESPACES = tuple(
    space
    for space in (torch, torch.Tensor, F, torch.special, torch_private.find("torch._C._nn"))
    if space is not None
)


class MissingJetRule(NotImplementedError):
    """An operation met a jet and no rule says how to carry derivatives through it."""


def spellings(*names: str) -> list[Any]:
    """Every torch function called by one of ``names``: ``torch.x``, ``Tensor.x``, ``F.x``, ...

    Raises:
        AttributeError: if a name is spelled nowhere in torch (a typing error in a rules file).
    """
    found = []
    for name in names:
        # torch.half is a dtype, torch.cpu a module, torch.__eq__ compares modules.
        spaces = (torch.Tensor,) if name.startswith("__") else _NAMESPACES
        here = [f for space in spaces if callable(f := getattr(space, name, None))]
        if not here:
            raise AttributeError(f"torch has no function named {name!r} to register a jet rule for")
        found.extend(here)
    return found


def built_in(name: str) -> list[Any]:
    """The function in C++ that torch's Python function called ``name`` goes on to: in a list, which
    is empty where torch does not say."""
    found = torch_private.find(f"torch._C._VariableFunctions.{name}")
    return [] if found is None else [found]


def attribute(name: str) -> Any:
    """The getter torch reports to ``__torch_function__`` when ``tensor.<name>`` is read."""
    return getattr(torch.Tensor, name).__get__


def jet_rule(*functions: Any) -> Callable[[R], R]:
    """Register the decorated function as the jet rule of ``functions``.

    The rule has the torch function's own signature; one or more of its tensor arguments are
    `JetTensor`.  It returns what the torch function returns, with `JetTensor` wherever the result
    depends on one.  Strings are looked up with `spellings`.  A later registration replaces an
    earlier one, so that a user's rule wins.

    Example:
        >>> @jet_rule(torch.special.erfcx)
        ... def erfcx(input): ...
    """

    def register(rule: R) -> R:
        for function in _flatten(functions):
            _RULES[function] = rule
        return rule

    return register


def recognise(*functions: Any) -> Callable[[R], R]:
    """Register a function that is asked before the rules of ``functions``.

    It is called as ``recogniser(rule, *args, **kwargs)`` with the ordinary rule, and returns a jet
    (deferred, or made by a fused operator), or None to leave the call to the rule.
    """

    def register(recogniser: R) -> R:
        for function in _flatten(functions):
            _RULES[function] = _asked_first(recogniser, _RULES[function])
        return recogniser

    return register


def _asked_first(recogniser: Rule, rule: Rule) -> Rule:
    def asked(*args: Any, **kwargs: Any) -> Any:
        found = recogniser(rule, *args, **kwargs)
        return rule(*args, **kwargs) if found is None else found

    return asked


def _flatten(functions: Iterable[Any]) -> Iterator[Any]:
    for function in functions:
        if isinstance(function, str):
            yield from spellings(function)
        elif isinstance(function, list | tuple):
            yield from _flatten(function)
        else:
            yield function


def find_rule(function: Any) -> Rule | None:
    """The rule registered for a torch function, or the general one where it serves, or None."""
    rule = _RULES.get(function)
    return _GENERAL.get(function) if rule is None else rule


def general_rule(function: Any, detail: str) -> Rule:
    """The general rule of a function (`rules/forward_mode.py`), for the calls that its own rule
    does not cover.

    Raises:
        MissingJetRule: it does not serve this function; ``detail`` says what is not covered.
    """
    rule = _GENERAL.get(function)
    if rule is None:
        raise missing_rule(function, detail)
    return rule


def serve_generally(function: Any, rule: Rule) -> None:
    """Give a function without a rule of its own the general one (`rules/forward_mode.py`)."""
    _GENERAL[function] = rule


def registered_functions() -> tuple[Any, ...]:
    """Every torch function that has a rule (for tests and for ``jachess doctor``)."""
    return tuple(_RULES)


def function_name(function: Any) -> str:
    """The name to write in Python: ``torch.nn.functional.gelu``, ``torch.Tensor.mT.__get__``."""
    if isinstance(function, torch_private.higher_order_operator):
        # Asked while torch.compile traces, which cannot follow resolve_name.
        return f"torch.ops.higher_order.{function.__name__}"
    known = torch.overrides.resolve_name(function) if callable(function) else None
    if known is not None:
        return known
    name = getattr(function, "__qualname__", None) or str(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else name


def last_name(function: Any) -> str:
    """``gelu`` or ``mT``: the name that all spellings of a function share."""
    return function_name(function).removesuffix(".__get__").rpartition(".")[2]


_AROUND = (
    "it was called inside a transform of torch.func (vmap, grad, jvp), which hides a jet: take the "
    "pass inside and the transform outside, torch.func.vmap(lambda x: jx.jvp(f, (x,), (t,))), or "
    "write the batch out."
)
# What helps where no rule is meant to be written: part of a function's name, and the mend.
_MENDS = {
    "aten.": _AROUND,
    "_make_dual": _AROUND,
    "grouped_mm": "transformers computes its mixtures of experts with it unless told otherwise: "
    'load the model with from_pretrained(..., experts_implementation="eager"), or call '
    'model.set_experts_implementation("eager").',
    "flex_attention": "torch traces it with its compiler before a rule could see it: call "
    "scaled_dot_product_attention with an attn_mask instead (of a transformers model: "
    'model.set_attn_implementation("sdpa")).',
}


def missing_rule(function: Any, detail: str = "") -> MissingJetRule:
    """The error for an operation that has no rule; names operation, module and the mend."""
    name = function_name(function)
    reason = f": {detail}" if detail else ""
    register = (
        f"Register a rule with @jet_rule({name}), after 'from jachess_ext.jet import jet_rule' "
        f"(recipe: jachess_ext/jet/README.md)."
    )
    mend = next((mend for part, mend in _MENDS.items() if part in name), known_fix(name).strip())
    mend = mend or register
    return MissingJetRule(
        f"no jet rule for {name}{reason} (called in {_calling_module()}). Derivatives through it "
        f"would be wrong, so the pass stops here. {mend[0].upper()}{mend[1:]}"
    )


def calling_modules() -> list[torch.nn.Module]:
    """Every ``nn.Module`` whose forward is on the Python stack, innermost first.

    Reading the stack costs nothing until an error is raised, and needs no hook in the model.
    """
    modules: list[torch.nn.Module] = []
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    return modules


def _calling_module() -> str:
    """Name the innermost and outermost ``nn.Module`` whose forward is on the Python stack."""
    if torch.compiler.is_compiling():  # which cannot follow the stack
        return "code that is being compiled"
    modules = calling_modules()
    if not modules:
        return "no torch.nn.Module"
    inner, root = modules[0], modules[-1]
    path = next((name for name, module in root.named_modules() if module is inner), "")
    where = f" {path!r} of {type(root).__name__}" if path else ""
    return f"module {type(inner).__name__}{where}"
