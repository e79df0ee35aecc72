"""Break every operator and every jet rule in turn, and see whether the tests notice.

    python -m python_tests.mutation [--of rules] [--only TEXT] [--without TEXT]

The tests are collected once.  Each mutant is a forked process in which one operator of
`torch.ops.jachess`, or the rules of one torch function, returns something wrong: a NaN, the wrong
sign, a stream set to zero, two streams exchanged, a doubled gradient, an argument ignored.  It runs
the tests of that operator or rule until one fails.  A mutant is

    noticed         a test failed
    without effect  nothing the tests saw would have been different
    survived        every test passed

What was not noticed is reported as survived, except for the functions of `CONSTANT`, whose results
carry no derivative, of `UNSET`, whose results are any numbers, and of `ARRIVE_AS_ANOTHER`.

The unbroken code is run first, as the control.  Exit status 0: all were noticed; 1: one survived;
2: the control failed.  ``--without TEXT`` leaves out the tests with TEXT in their name, which shows
what they alone hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet.engine import errors, registry
from jachess_ext.jet.rules import forward_mode

HERE = Path(__file__).parent
LIMIT = 300  # seconds a mutant may take; one that hangs is noticed
CONTROL_LIMIT = 3600

# ---- what is broken ------------------------------------------------------------------------------

Change = Callable[[Tensor], Tensor]


def _changed(tensor: Tensor, part: Any, change: Callable[[Tensor], Any]) -> Tensor:
    out = tensor.clone()
    out[part] = change(tensor[part])
    return out


def last_is_nan(streams: Tensor) -> Tensor:
    out = streams.clone(memory_format=torch.contiguous_format)
    if out.numel():
        out.view(-1)[-1] = torch.nan
    return out


def doubled_gradient(tensor: Tensor) -> Tensor:
    return tensor + (tensor - tensor.detach()) if tensor.requires_grad else tensor


def rolled(tensor: Tensor) -> Tensor:
    """Every number one place on, the last of a row into the next."""
    return tensor.reshape(-1).roll(1).view(tensor.shape)


OF_A_TENSOR: dict[str, Change] = {
    "last number NaN": last_is_nan,
    "wrong sign": torch.neg,
    "first row zero": lambda x: _changed(x, slice(0, 1), torch.zeros_like) if x.ndim else x * 0,
    "last row zero": lambda x: _changed(x, slice(-1, None), torch.zeros_like) if x.ndim else x * 0,
    "rolled": rolled,
}


def of_streams(q: int, count: int) -> dict[str, Change]:
    """Changes of a stack ``[S, ...]`` along q directions."""
    first, second = slice(1, 1 + q), slice(1 + q, count)
    exchanged = [0, *reversed(range(1, 1 + q)), *range(1 + q, count)]
    return {
        "last number NaN": last_is_nan,
        "wrong primal": lambda x: _changed(x, 0, lambda primal: primal + 0.1),
        "first order: wrong sign": lambda x: _changed(x, first, torch.neg),
        "first order: one stream zero": lambda x: _changed(x, q, torch.zeros_like),
        "first order: streams exchanged": lambda x: x[exchanged],
        "second order: wrong sign": lambda x: _changed(x, second, torch.neg),
        "second order: last stream zero": lambda x: (
            _changed(x, -1, torch.zeros_like) if count > 1 + q else x
        ),
        "gradient doubled": doubled_gradient,
    }


STREAM_KINDS = tuple(of_streams(1, 2))
# Functions whose results carry no derivative, so that most changes change nothing.
CONSTANT = ("zero_", "fill_", "zeros_like", "new_zeros", "empty_like", "new_empty", "full_like")
STEPS = ("round_", "floor_", "ceil_", "floor_divide", "floor_divide_")
STEPS += ("__floordiv__", "__rfloordiv__", "__ifloordiv__")
CONSTANT += ("new_full", *STEPS)
UNSET = ("empty_like", "new_empty")
# torch hands x + y over as Tensor.add, so that Tensor.__add__ is never asked; torch.is_tensor and
# Tensor.__iter__ ask nobody.
ARRIVE_AS_ANOTHER = ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__")
ARRIVE_AS_ANOTHER += ("__div__", "__matmul__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
ARRIVE_AS_ANOTHER += ("__ne__", "__lt__", "__le__", "__gt__", "__ge__", "nelement")
ARRIVE_AS_ANOTHER += ("is_tensor", "__iter__", "__ifloordiv__")


class Seen:
    """Whether the broken code ran, and whether the break changed a number."""

    called = False
    changed = False

    def apply(self, change: Change, tensor: Tensor) -> Tensor:
        self.called = True
        out = change(tensor)
        if torch.compiler.is_compiling() or self.changed:
            return out
        plain, new = tensor.detach(), out.detach()
        same = plain.shape == new.shape and torch.equal(plain.isnan(), new.isnan())
        same = same and torch.equal(plain.nan_to_num(), new.nan_to_num())
        self.changed = not same or (out.requires_grad and change is doubled_gradient)
        return out


SEEN = Seen()


@dataclass(frozen=True)
class Tests:
    """Tests of some files, those for which ``chosen`` holds."""

    files: Sequence[str]
    chosen: Callable[[pytest.Item], bool]

    def __contains__(self, item: pytest.Item) -> bool:
        return any(item.path == HERE / file for file in self.files) and self.chosen(item)


@dataclass(frozen=True)
class Mutant:
    """One break.

    Attributes:
        name: "operator or rule / what is wrong".
        install: breaks the code of this process.
        tests: where they are, and which of them should be run.
        allowed: what it may come to beside "noticed".
    """

    name: str
    install: Callable[[], None]
    tests: Tests
    allowed: tuple[int, ...] = ()


# ---- operators -----------------------------------------------------------------------------------

TESTS_OF = {
    "activation_jet": ("ops/test_activation.py",),
    "attention_jet": ("ops/test_attention.py",),
    "attention_jet_composite": ("ops/test_attention_chunks.py",),
    "gated_activation_jet": ("ops/test_activation.py",),
    "jet_mean_squares": ("ops/test_jet_mean_squares.py",),
    "layer_norm_jet": ("ops/test_norm.py",),
    "ntk_gram": ("ops/test_ntk.py",),
    "rms_norm_jet": ("ops/test_norm.py",),
    "sample_directions": ("ops/test_directions.py",),
    "softmax_jet": ("ops/test_softmax.py",),
}
# Outputs that only autograd reads are broken where the backward operator receives them.
READ_OUTPUTS = {"attention_jet": (0,), "layer_norm_jet": (0, 1), "rms_norm_jet": (0, 1)}
# An argument ignored: the value in its place.
NEUTRAL: dict[str, Any] = {
    "kind": "sigmoid",
    "mask": None,
    "index": None,
    "residual": None,
    "weight": None,
    "bias": None,
    "scale": 1.0,
    "eps": 0.0,
    "causal": False,
    "masked": False,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "summed": 0,
    "dropout_seed": torch.zeros((), dtype=torch.int64),
    "seed": torch.zeros((), dtype=torch.int64),
    "offset": torch.zeros((), dtype=torch.int64),
    "distribution": "gaussian",
    "other_inputs": None,
    "gsum": None,
}
EXCHANGED = {("query", "key"), ("key", "value"), ("g", "u")}
# What an argument is for, where no test can tell: how much memory a kernel may use.
NO_MEANING = ("workspace", "need_weight", "q", "d", "dtype")


# The norms are of the derivatives: nothing flows into the primal.
PRIMAL_UNUSED = ("jet_mean_squares_backward",)


def operator_mutants() -> Iterator[Mutant]:
    for base, files in TESTS_OF.items():
        for name in (base, f"{base}_backward"):
            if not hasattr(torch.ops.jachess, name):
                continue
            schema = getattr(torch.ops.jachess, name).default._schema
            tests = _in_files(files)
            outputs = READ_OUTPUTS.get(name, range(len(schema.returns)))
            for place in outputs:
                said = schema.returns[place].name or "result"
                for kind, change in OF_A_TENSOR.items():
                    install = _install_operator(name, _with_output(place, change))
                    unused = name in PRIMAL_UNUSED and kind == "first row zero"
                    allowed = (NO_EFFECT,) if unused else ()
                    yield Mutant(f"{name} / {said}: {kind}", install, tests, allowed)
            yield from _argument_mutants(name, schema, tests)


def _argument_mutants(name: str, schema: Any, tests: Tests) -> Iterator[Mutant]:
    names = [argument.name for argument in schema.arguments]
    for place, argument in enumerate(names):
        kind = str(schema.arguments[place].type)
        if kind == "Tensor":
            install = _install_operator(name, _with_argument(place, rolled))
            yield Mutant(f"{name} / {argument} rolled", install, tests)
        if argument in NEUTRAL:
            install = _install_operator(name, _with_argument(place, _always(NEUTRAL[argument])))
            yield Mutant(f"{name} / {argument} ignored", install, tests)
        elif kind not in ("Tensor", "List[Tensor]") and argument not in NO_MEANING:
            raise AssertionError(f"say in NEUTRAL what it means to ignore {argument} of {name}")
    for pair in EXCHANGED:
        if set(pair) <= set(names):
            places = [names.index(argument) for argument in pair]
            install = _install_operator(name, _with_exchanged(*places))
            yield Mutant(f"{name} / {pair[0]} and {pair[1]} exchanged", install, tests)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _with_output(place: int, change: Change) -> Wrap:
    def wrap(operator: Callable) -> Callable:
        def broken(*args: Any) -> Any:
            found = operator(*args)
            if isinstance(found, Tensor):
                return SEEN.apply(change, found)
            return tuple(SEEN.apply(change, f) if n == place else f for n, f in enumerate(found))

        return broken

    return wrap


def _with_argument(place: int, change: Callable[[Any], Any]) -> Wrap:
    def wrap(operator: Callable) -> Callable:
        def broken(*args: Any) -> Any:
            given = args[place]
            if isinstance(given, Tensor):
                new = change(given)
                SEEN.called = SEEN.changed = True
            else:
                new = change(given)
                SEEN.called = True
                SEEN.changed |= new != given
            return operator(*args[:place], new, *args[place + 1 :])

        return broken

    return wrap


def _with_exchanged(a: int, b: int) -> Wrap:
    def wrap(operator: Callable) -> Callable:
        def broken(*args: Any) -> Any:
            given = list(args)
            SEEN.called = True
            if given[b] is not None and given[a].shape == given[b].shape:
                given[a], given[b] = given[b], given[a]
                SEEN.changed = True
            return operator(*given)

        return broken

    return wrap


def _install_operator(name: str, wrap: Wrap) -> Callable[[], None]:
    def install() -> None:
        setattr(torch.ops.jachess, name, wrap(getattr(torch.ops.jachess, name)))

    return install


# ---- jet rules -----------------------------------------------------------------------------------

# Rules whose tests are elsewhere than in the rule table: name -> (file, part of the test's name).
OTHER_TESTS = {
    "float": ("jet/test_dtypes.py", "casts"),
    "half": ("jet/test_dtypes.py", "casts"),
    "bfloat16": ("jet/test_dtypes.py", "casts"),
    "empty_like": ("jet/test_api.py", ""),
    "new_empty": ("jet/test_api.py", ""),
    "requires_grad_": ("jet/test_queries.py", "requires_grad"),
    "cfloat": ("jet/test_complex.py", "single_precision"),
    "reshape": ("jet/test_shapes.py", "reshape_and_narrow"),
    "narrow": ("jet/test_shapes.py", "reshape_and_narrow"),
    "_pack_padded_sequence": ("models/test_modules.py", "packed"),
    "_pad_packed_sequence": ("models/test_modules.py", "packed"),
    **dict.fromkeys(STEPS, ("jet/test_traps.py", "steps_are_constant")),
}
ON_A_GPU = ("cuda",)


def rules_by_name() -> dict[str, list[Any]]:
    """The registered functions of each name, and with them those that share a rule: torch.exp and
    Tensor.exp are one, and so are torch.mul and torch.multiply."""
    from python_tests.jet.rule_table import rule_of

    names: dict[Any, str] = {}
    found: dict[str, list[Any]] = {}
    for function in registry.registered_functions():
        name = names.setdefault(rule_of(function), errors.last_name(function))
        if name not in ON_A_GPU:
            found.setdefault(name, []).append(function)
    return found


def rule_mutants() -> Iterator[Mutant]:
    from python_tests.jet.rule_table import is_complex

    queries = _query_functions()
    for name, functions in rules_by_name().items():
        tests = _of_functions(functions)
        if name in OTHER_TESTS:
            file, part = OTHER_TESTS[name]
            tests = Tests([file], lambda item, part=part: part in item.name)
        elif is_complex(functions[0]):
            tests = Tests(["jet/test_complex.py"], lambda item: "there_and_back" in item.name)
        if any(function in queries for function in functions):
            install = _install_rule(functions, _query)
            yield Mutant(f"{name} / another answer", install, tests, _allowed(name))
            continue
        for kind in STREAM_KINDS:
            install = _install_rule(functions, lambda rule, kind=kind: _streams(rule, kind))
            allowed = _allowed(name)
            if name in ("zero_", *STEPS) and kind == "gradient doubled":
                allowed += (SURVIVED,)  # of zero
            yield Mutant(f"{name} / {kind}", install, tests, allowed)
    for name, argument in RULE_ARGUMENTS:
        functions = rules_by_name()[name]
        install = _install_rule(functions, lambda rule, a=argument: _without(rule, a))
        tests = _of_functions(functions)
        if argument == "dropout_p":
            tests = Tests(["jet/test_fused.py"], lambda item: "dropout" in item.name)
        yield Mutant(f"{name} / {argument} ignored", install, tests)
    yield from _general_mutants()


def _allowed(name: str) -> tuple[int, ...]:
    if name in ARRIVE_AS_ANOTHER:
        return (NOT_CALLED,)
    return ((SURVIVED,) if name in UNSET else ()) + ((NO_EFFECT,) if name in CONSTANT else ())


def _general_mutants() -> Iterator[Mutant]:
    """torch's nested forward mode for functions without a rule: all of them broken at once."""
    tests = Tests(["jet/test_operators.py"], lambda item: True)
    for kind in STREAM_KINDS:
        install = _install_rule((), lambda rule, kind=kind: _streams(rule, kind), general=True)
        yield Mutant(f"general rule / {kind}", install, tests)
    for check in ("_check", "_refuse_views"):
        yield Mutant(f"general rule / {check} left out", _leave_out(check), tests)


def _leave_out(check: str) -> Callable[[], None]:
    def nothing(*_: Any) -> None:
        SEEN.called = SEEN.changed = True

    return lambda: setattr(forward_mode, check, nothing)


RULE_ARGUMENTS = [
    ("scaled_dot_product_attention", "attn_mask"),
    ("scaled_dot_product_attention", "is_causal"),
    ("scaled_dot_product_attention", "scale"),
    ("scaled_dot_product_attention", "dropout_p"),
    ("scaled_dot_product_attention", "enable_gqa"),
    ("cross_entropy", "label_smoothing"),
    ("cross_entropy", "ignore_index"),
    ("cross_entropy", "weight"),
    ("layer_norm", "eps"),
    ("layer_norm", "weight"),
    ("layer_norm", "bias"),
    ("rms_norm", "eps"),
    ("rms_norm", "weight"),
    ("softmax", "dtype"),
]


def _query_functions() -> set[Any]:
    from python_tests.jet.queries import QUERIES

    # Their results are plain tensors, as answers are.
    steps = registry.spellings("floor_divide", "__floordiv__", "__rfloordiv__")
    return {*steps, *(function for row in QUERIES for function in row.functions())}


def _install_rule(
    functions: Sequence[Any], wrap: Wrap, *, general: bool = False
) -> Callable[[], None]:
    """Break the rules of ``functions``, or all that the general rule serves."""

    def install() -> None:
        rules = registry.GENERAL_RULES if general else registry.RULES
        for function in [*rules] if general else functions:
            rules[function] = wrap(rules[function])

    return install


def _streams(rule: Callable, kind: str) -> Callable:
    def change_of(jet: jx.JetTensor) -> Change:
        layout = jet.jet_layout
        return of_streams(layout.directions, layout.streams)[kind]

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs)
        target = args[0] if args else None
        if found is None or found is target:  # written in place
            if isinstance(target, jx.JetTensor):
                change = change_of(target)
                target.streams.copy_(SEEN.apply(change, target.streams.clone()))
            return found
        return _mapped(found, lambda jet: jet.with_streams(SEEN.apply(change_of(jet), jet.streams)))

    return broken


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with every jet in it, or in its tuples and lists, changed."""
    if isinstance(value, jx.JetTensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, torch.return_types.max | tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    if hasattr(value, "__next__"):
        return iter([_mapped(item, change) for item in value])
    return value


def _query(rule: Callable) -> Callable:
    """Another answer of the same kind."""

    def another(value: Any) -> Any:
        if isinstance(value, jx.JetTensor):
            return value.detach()
        if isinstance(value, Tensor):
            return ~value if value.dtype == torch.bool else value + 1
        if isinstance(value, bool):
            return not value
        if isinstance(value, int | float):
            return value + 1
        if isinstance(value, str):
            return value + " "
        if isinstance(value, torch.dtype):
            return torch.float16
        if isinstance(value, torch.layout):
            return torch.sparse_coo
        if isinstance(value, tuple | list):
            return type(value)(another(item) for item in value)
        return 0 if value is None else None

    def broken(*args: Any, **kwargs: Any) -> Any:
        SEEN.called = SEEN.changed = True
        return another(rule(*args, **kwargs))

    return broken


def _without(rule: Callable, argument: str) -> Callable:
    import inspect

    signature = inspect.signature(inspect.unwrap(rule))

    def broken(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        default = signature.parameters[argument].default
        SEEN.called = True
        if argument in bound.arguments:
            SEEN.changed = True
            bound.arguments[argument] = default
        return rule(*bound.args, **bound.kwargs)

    return broken


# ---- which tests ---------------------------------------------------------------------------------

LEFT_OUT = ("opcheck", "compile")  # slow, and not about numbers


def _in_files(files: Sequence[str]) -> Tests:
    return Tests(files, lambda item: not any(word in item.name for word in LEFT_OUT))


def _of_functions(functions: Sequence[Any]) -> Tests:
    def chosen(item: pytest.Item) -> bool:
        given = getattr(item, "callspec", None)
        return given is not None and given.params.get("function") in functions

    return Tests(["jet/test_rules.py", "jet/test_queries.py"], chosen)


# ---- running -------------------------------------------------------------------------------------

NOTICED, SURVIVED, NO_EFFECT, NOT_CALLED, NO_TESTS = range(10, 15)
WORDS = {
    NOTICED: "noticed",
    SURVIVED: "survived",
    NO_EFFECT: "without effect",
    NOT_CALLED: "survived: the tests never call it",
    NO_TESTS: "survived: it has no test",
}


def run_tests(session: pytest.Session, items: Sequence[pytest.Item]) -> bool:
    """Whether all pass; stops at the first that fails."""
    for place, item in enumerate(items):
        following = items[place + 1] if place + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def _in_a_fork(limit: int, job: Callable[[], int], quiet: bool = True) -> int:
    """The process that runs ``job``; its exit status is what ``job`` returns."""
    child = os.fork()
    if child:
        return child
    status = NOTICED  # an exception in the broken code outside a test, or the time limit
    signal.signal(signal.SIGALRM, lambda *_: os._exit(NOTICED))
    signal.alarm(limit)
    with contextlib.suppress(BaseException):
        if quiet:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        status = job()
    os._exit(status)


class Runner:
    """The plugin that takes the place of pytest's loop over the tests."""

    def __init__(self, mutants: Sequence[Mutant], jobs: int, without: str | None) -> None:
        self.mutants, self.jobs, self.without = mutants, jobs, without
        self.results: dict[str, int] = {}
        self.control_passed = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        skip = ("cuda", "slow", "sanitizers")
        items = [i for i in session.items if not any(map(i.get_closest_marker, skip))]
        items = [i for i in items if not self.without or self.without not in i.nodeid]
        chosen = {mutant.name: [i for i in items if i in mutant.tests] for mutant in self.mutants}
        needed = {id(item) for tests in chosen.values() for item in tests}
        control = [item for item in items if id(item) in needed]
        _say(f"{len(self.mutants)} mutants, {len(control)} tests; the unbroken code first")
        # What its first call imports, every mutant would import anew: nine tenths of its time.
        torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
        child = _in_a_fork(
            CONTROL_LIMIT, lambda: SURVIVED if run_tests(session, control) else 1, quiet=False
        )
        self.control_passed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == SURVIVED
        if self.control_passed:
            self._run_all(session, chosen)
        return True

    def _run_all(self, session: pytest.Session, chosen: dict[str, list[pytest.Item]]) -> None:
        running: dict[int, Mutant] = {}
        for mutant in self.mutants:
            while len(running) >= self.jobs:
                self._collect(running)
            tests = chosen[mutant.name]
            child = _in_a_fork(LIMIT, lambda m=mutant, t=tests: _try(session, m, t))
            running[child] = mutant
        while running:
            self._collect(running)

    def _collect(self, running: dict[int, Mutant]) -> None:
        child, status = os.wait()
        mutant = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        code = code if code in WORDS else NOTICED  # a crash
        self.results[mutant.name] = code
        if code not in (NOTICED, *mutant.allowed):
            _say(f"{WORDS[code]}: {mutant.name}")

    def survivors(self) -> list[str]:
        allowed = {mutant.name: mutant.allowed for mutant in self.mutants}
        return [n for n, c in self.results.items() if c not in (NOTICED, *allowed[n])]


def _try(session: pytest.Session, mutant: Mutant, tests: Sequence[pytest.Item]) -> int:
    if not tests:
        return NO_TESTS
    mutant.install()
    if not run_tests(session, tests):
        return NOTICED
    return SURVIVED if SEEN.changed else NO_EFFECT if SEEN.called else NOT_CALLED


def _say(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this in their name")
    parser.add_argument("--without", help="leave out the tests with this in their name")
    parser.add_argument("--of", choices=("operators", "rules"), help="the mutants of these alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    given = parser.parse_args(arguments)
    every = [] if given.of == "rules" else [*operator_mutants()]
    every += [] if given.of == "operators" else [*rule_mutants()]
    mutants = [mutant for mutant in every if given.only in mutant.name]
    if not mutants:
        return 2
    runner = Runner(mutants, given.jobs, given.without)
    began = time.monotonic()
    files = sorted({file for mutant in mutants for file in mutant.tests.files})
    options = ["-q", "--no-summary", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*options, *(str(HERE / file) for file in files)], plugins=[runner])
    if not runner.control_passed:
        _say("the unbroken code fails its tests: nothing can be said")
        return 2
    counts = Counter(WORDS[code].partition(":")[0] for code in runner.results.values())
    survivors = runner.survivors()
    _say(
        f"{len(mutants)} mutants, {counts['noticed']} noticed, {len(survivors)} survived, "
        f"{len(mutants) - counts['noticed'] - len(survivors)} with nothing to notice; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
