"""The table from torch functions to jet rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, TypeAlias, TypeVar

import torch

from ... import torch_private
from ...torch_private import functional as F
from .autograd_functions import APPLY_RULE, is_apply
from .errors import missing_rule
from .types import Function, Rule

R = TypeVar("R", bound=Rule)
Functions: TypeAlias = "str | Function | Sequence[Functions]"
"""A torch function, a name that `spellings` looks up, or a sequence of these."""

Kind: TypeAlias = Literal["formula", "value", "composed"]
"""How a rule computes its result (`jet_rule`)."""

RULES: dict[Function, Rule] = {}
"""The rules that `jet_rule` registered."""
_KINDS: dict[Function, Kind] = {}
GENERAL_RULES: dict[Function, Rule] = {}
"""The rules by torch's forward mode, for functions without their own rule or for calls that it does
not cover."""
_NAMESPACES = (torch, torch.Tensor, F, torch.special, torch_private.find("torch._C._nn"))


_ALIASES = """
    acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh digamma digamma
    digamma psi erfinv erfinv i0 i0 lgamma gammaln linalg.matrix_power matrix_power matmul matmul
    matrix_exp matrix_exp mvlgamma multigammaln outer ger sigmoid expit trunc fix vstack row_stack
"""
_ALIAS_PAIRS = zip(_ALIASES.split()[::2], _ALIASES.split()[1::2], strict=True)
# Alias of a function → the function, whose rule is used for both.  ``torch.arccos`` is another
# object than ``torch.acos``, so that a rule registered for one would not be found for the other.
OTHER_NAMES: dict[Function, Rule] = {
    function: first_name
    for first_name, name in ((attrgetter(path)(torch), name) for path, name in _ALIAS_PAIRS)
    for space in (torch, torch.Tensor, torch.special, torch.linalg)
    if (function := getattr(space, name, None)) not in (None, first_name)
}


def spellings(*names: str) -> list[Rule]:
    """Return all torch functions with one of these names: ``torch.x``, ``Tensor.x``, ``F.x``, ...

    Raises:
        AttributeError: torch has no function of one of the names.

    Examples:
        >>> spellings("gelu", "sin") == [F.gelu, torch._C._nn.gelu, torch.sin, torch.Tensor.sin]
        True
    """
    functions = []
    for name in names:
        # torch.half is a dtype, torch.cpu a module, torch.__eq__ compares modules.
        spaces = (torch.Tensor,) if name.startswith("__") else _NAMESPACES
        matches = [f for space in spaces if callable(f := getattr(space, name, None))]
        if not matches:
            raise AttributeError(f"torch has no function named {name!r} to register a jet rule for")
        functions.extend(matches)
    return functions


def built_in_functions(name: str) -> list[Rule]:
    """Return the C++ functions that torch's Python function ``name`` calls; [] if torch exposes
    none."""
    namespaces = ("torch._C._VariableFunctions", "torch._C._nn")
    functions = [torch_private.find(f"{namespace}.{name}") for namespace in namespaces]
    return [function for function in functions if function is not None]


def attribute(name: str) -> Rule:
    """Return the getter of a Tensor attribute, which ``__torch_function__`` receives as the
    function when ``tensor.<name>`` is evaluated."""
    return getattr(torch.Tensor, name).__get__


def jet_rule(*functions: Functions, kind: Kind = "formula") -> Callable[[R], R]:
    """Decorate a function to register it as the jet rule of ``functions``.

    The rule has the torch function's own signature; one or more of its tensor arguments are
    `JetTensor`.  It returns what the torch function returns, with a `JetTensor` wherever the result
    depends on one.  A later registration replaces an earlier one.

    Args:
        functions: torch functions, or names, which `spellings` looks up.
        kind: how the rule computes the result, for `rule_kinds`: "formula", by a formula for the
            derivatives; "value", from the primals, without derivatives; or "composed", by calls of
            torch functions that have rules.

    Examples:
        >>> @jet_rule(torch.special.erfcx)
        ... def erfcx(input):
        ...     return torch.exp(input * input) * torch.erfc(input)
    """

    def register(rule: R) -> R:
        for function in _flatten(functions):
            RULES[function], _KINDS[function] = rule, kind
        return rule

    return register


def recognise(*functions: Functions) -> Callable[[R], R]:
    """Decorate a function, the recogniser, to call it before the rules of ``functions``.

    The recogniser is called as ``recogniser(rule, *args, **kwargs)`` with the ordinary rule.  It
    returns a jet (deferred, or the result of a fused operator), or None to leave the call to the
    rule.

    Examples:
        >>> @recognise(torch.square)
        ... def square_of_a_square_root(rule, input):
        ...     return None  # call the ordinary rule
    """

    def prepend(recogniser: Rule, rule: Rule) -> Rule:
        def recognise_or_call_rule(*args: object, **kwargs: object) -> object:
            jet = recogniser(rule, *args, **kwargs)
            return rule(*args, **kwargs) if jet is None else jet

        recognise_or_call_rule.ordinary = getattr(rule, "ordinary", rule)  # type: ignore[attr-defined]
        return recognise_or_call_rule

    def register(recogniser: R) -> R:
        for function in _flatten(functions):
            RULES[function] = prepend(recogniser, RULES[function])
        return recogniser

    return register


def _flatten(functions: Iterable[Functions]) -> Iterator[Function]:
    for function in functions:
        if isinstance(function, str):
            yield from spellings(function)
        elif isinstance(function, Sequence):
            yield from _flatten(function)
        else:
            yield function


def find_rule(function: Function) -> Rule | None:
    """Return the rule of a torch function: its own, else the forward-mode rule; None if there is
    neither."""
    rule = RULES.get(function) or GENERAL_RULES.get(function) or OTHER_NAMES.get(function)
    if rule is None and is_apply(function):
        return functools.partial(APPLY_RULE[0], function.__self__)  # type: ignore[attr-defined]
    if rule is None and getattr(function, "__name__", "") == "custom_function_call":
        return APPLY_RULE[0]  # ``apply`` calls this function inside a transform of torch.func
    return rule


def require_rule(function: Function) -> Rule:
    """Return the rule of a torch function that `find_rule` finds; raise MissingJetRule if there is
    none."""
    rule = find_rule(function)
    if rule is None:
        raise missing_rule(function)
    return rule


def original_function(function: Function) -> Function:
    """Return torch's own function if ``function`` is a user's patch of it, else ``function``."""
    has_rule = function in RULES or function in GENERAL_RULES or function in OTHER_NAMES
    return function if has_rule else torch_private.original_of(function)


def general_rule(function: Function, detail: str) -> Rule:
    """Return the forward-mode rule (`rules/forward_mode.py`) of a function, for calls that its own
    rule does not cover.

    Args:
        detail: which call is not covered, for the error.

    Raises:
        MissingJetRule: the function has no forward-mode rule.
    """
    rule = GENERAL_RULES.get(function)
    if rule is None:
        raise missing_rule(function, detail)
    return rule


def register_general_rule(function: Function, rule: Rule) -> None:
    """Register the forward-mode rule (`rules/forward_mode.py`) of a function."""
    GENERAL_RULES[function] = rule


def registered_functions() -> tuple[Rule, ...]:
    """Return all torch functions that have a rule of their own; for tests."""
    return tuple(RULES)


def rule_kinds() -> dict[Function, tuple[str, ...]]:
    """Return, for each torch function that takes jets, the kinds of its rules, in the order in
    which they are tried.

    docs/rules.md explains the kinds.

    Examples:
        >>> rule_kinds()[torch.mul], rule_kinds()[torch.eq], rule_kinds()[torch.kron]
        (('recogniser', 'formula'), ('value',), ('forward mode',))
    """
    kinds = {}
    for function in {**RULES, **GENERAL_RULES, **OTHER_NAMES}:
        rule = RULES.get(function)
        words = ["recogniser"] if getattr(rule, "ordinary", rule) is not rule else []
        words += [_KINDS[function]] if function in _KINDS else []
        words += ["forward mode"] if function in GENERAL_RULES else []
        kinds[function] = tuple(words) or ("other name",)
    return kinds
