"""Every rule of the engine, against finite differences and against torch's own result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import jachess_ext as jx
from jachess_ext.jet.engine.errors import function_name, last_name
from jachess_ext.jet.engine.registry import registered_functions, spellings
from jachess_ext.jet.passes.eager import begin_pass, check_inputs, run_pass

from ..models import oracles
from .calls import Call, float_tensors, make_call
from .queries import QUERIES
from .rule_table import (
    ELSEWHERE,
    NARROWING,
    OF_LIBRARIES,
    ROUNDED,
    ROWS,
    UNSET,
    Row,
    is_complex,
)

STEP = 3e-4
RULES = [
    pytest.param(functions[0], row, id=f"{function_name(functions[0])}-{n}")
    for n, row in enumerate(ROWS)
    for functions in row.by_rule()
]


def first_of_each(key: Callable[[Any, Row], Any]) -> list[Any]:
    """The first call of each ``key(function, row)``, and `RULES` beside them, which are slow."""
    seen: set[Any] = set()
    calls = []
    for n, row in enumerate(ROWS):
        for first, *others in row.by_rule():
            for function in (first, *others):
                new = key(function, row) not in seen
                seen.add(key(function, row))
                if new or function is first:
                    name = f"{function_name(function)}-{n}"
                    marks = () if new else pytest.mark.slow
                    calls.append(pytest.param(function, row, id=name, marks=marks))
    return calls


ONE_OF_EACH_NAME = first_of_each(lambda function, row: last_name(function))
ONE_OF_EACH_RULE = first_of_each(lambda function, row: row.rule_of(function))


def _bent(call: Call, at: torch.Tensor) -> Any:
    """``call`` along x + (x − at)² / 3: at ``at`` the point and the directions are x's own, but the
    second streams that the rule receives are not zero.  For jets and plain tensors alike."""

    def bent(x: Any) -> tuple:
        if not isinstance(x, jx.JetTensor):
            return call(x + (x - at).square() / 3)
        streams = x.streams
        curved = torch.zeros_like(streams)
        for i, j, ij in x.jet_layout.terms():
            curved[ij] += streams[i] * streams[j] * (2 / 3)
        return call(x.with_streams(streams + curved))

    return bent


@pytest.mark.parametrize("function, row", RULES)
def test_rule(function: Any, row: Row) -> None:
    """The pairs, squares and sum of squares of several directions, one direction alone, other
    dtypes, and the gradient of all streams."""
    call = make_call(function, row)
    torch.manual_seed(1)
    directions = torch.randn(3, len(call.x), dtype=torch.float64)
    bent = _bent(call, call.x)
    expected = call(call.x)
    assert expected
    differences = oracles.jet_differences(bent, call.x, directions, STEP)
    inputs = check_inputs(call.x, directions, check_values=True)
    runs = [
        jx.jet(bent, call.x, directions),
        *(run_pass(bent, inputs, begin_pass(3, 2, kind, 2)) for kind in ("squares", "sum")),
        jx.jet(bent, call.x, directions[1:2], order=1),
    ]
    assert len({len(outputs) for outputs in (*runs, expected, differences)}) == 1
    for (jet, squared, summed, one), plain, right in zip(
        zip(*runs, strict=True), expected, differences, strict=True
    ):
        _check_primal(jet.primal, plain, row)
        total = right.squares[:2].sum(0, keepdim=True)
        for part, second in (jet, right.pairs), (squared, right.squares[:2]), (summed, total):
            _check_close(part.first, right.first, 1e-8)
            _check_close(part.second, second, 1e-6)
        assert one.streams.shape == (2, *plain.shape)
        torch.testing.assert_close(one.first[0], jet.first[1], rtol=1e-12, atol=1e-12)
    _check_other_dtypes(function, row)
    _check_backward(call)


def _torch_s_own(call: Call) -> tuple | None:
    """None where torch has no such kernel on the CPU, or wants one dtype throughout."""
    try:
        return call(call.x)
    except (RuntimeError, NotImplementedError) as error:
        refusals = ("not implemented for", "same dtype", "but got BFloat16", "Got BFloat16")
        refusals += ("but got Half", "Got Half")
        if any(words in str(error) for words in refusals):
            return None
        raise


def _check_other_dtypes(function: Any, row: Row) -> None:
    """In every precision the primal is torch's own result, wherever torch has one; float16 and
    formulas in float32 are in test_special_points.py."""
    for dtype in (torch.float32, torch.bfloat16) if row.exact else (torch.bfloat16,):
        call = make_call(function, row, dtype)
        expected = _torch_s_own(call)
        if expected is None:
            continue
        directions = torch.randn(2, len(call.x)).to(dtype)
        with torch.no_grad():
            jets = jx.jet(call, call.x, directions)
        for jet, plain in zip(jets, expected, strict=True):
            assert jet.streams.shape == (4, *plain.shape)
            _check_primal(jet.primal, plain, row)


def test_other_names_and_spellings_of_a_function_have_its_derivatives() -> None:
    for row in ROWS:
        for first, *others in row.by_rule():
            call = make_call(first, row)
            torch.manual_seed(1)
            directions = torch.randn(2, len(call.x), dtype=torch.float64)
            calls = [replace(call, function=function) for function in (first, *others)] * bool(
                others
            )
            with torch.no_grad():
                jets = [jx.jet(call, call.x, directions) for call in calls]
            for function, found in zip(others, jets[1:], strict=True):
                name = function_name(function)
                for one, other in zip(found, jets[0], strict=True):
                    assert torch.allclose(one.streams, other.streams, 1e-14, 1e-14, True), name


def _check_primal(actual: torch.Tensor, expected: torch.Tensor, row: Row) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if row.exact:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        limit = 8 * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


def _check_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    finite = torch.isfinite(expected)  # differences of padding with -inf are NaN: no derivative
    assert not actual[~finite].any()
    torch.testing.assert_close(actual[finite], expected[finite], rtol=tolerance, atol=tolerance)


def _check_backward(call: Call) -> None:
    """The gradient of all streams, with respect to the point and to the directions."""
    torch.manual_seed(1)
    point, move = torch.randn(2, 3, len(call.x), dtype=torch.float64)
    point[0] = call.x
    weights: list[torch.Tensor] = []

    def total(point: torch.Tensor) -> torch.Tensor:
        streams = [jet.streams for jet in jx.jet(call, point[0], point[1:])]
        # Adding -inf entries keeps them.  A NaN stays and fails.
        streams = [s.masked_fill(s == -torch.inf, 0.0) for s in streams]
        if not weights:
            torch.manual_seed(2)
            weights.extend(torch.randn_like(s, dtype=torch.float64) for s in streams)
        return sum((w * s).sum() for w, s in zip(weights, streams, strict=True))

    value = total(point.requires_grad_())
    gradient = torch.zeros_like(point)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, point)
    h = 1e-5
    with torch.no_grad():
        expected = (total(point + h * move) - total(point - h * move)) / (2 * h)
    torch.testing.assert_close((gradient * move).sum(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function, row", ONE_OF_EACH_RULE)
def test_what_a_rule_returns_can_be_written_to(function: Any, row: Row) -> None:
    """Where torch lets a result be changed in place while gradients are recorded, so do jets."""
    call = make_call(function, row)

    def written(x: Any) -> list:
        return [tensor.add_(1) for tensor in call(x * 1)]

    try:
        expected = written(call.x.requires_grad_())
    except RuntimeError:  # an expanded result, or several views of one tensor
        return
    torch.manual_seed(1)
    directions = torch.randn(2, len(call.x), dtype=torch.float64)
    jets = jx.jet(written, call.x, directions)
    unwritten = jx.jet(lambda x: call(x * 1), call.x, directions)
    for jet, plain, before in zip(jets, expected, unwritten, strict=True):
        _check_primal(jet.primal, plain, row)
        torch.testing.assert_close(jet.streams[1:], before.streams[1:], rtol=0, atol=0)


def test_every_registered_function_is_in_the_table() -> None:
    """A new rule adds an entry to rule_table.py (or to queries.py)."""
    covered = {function for row in ROWS for function in row.functions()}
    for name in (*NARROWING, *ELSEWHERE, *ROUNDED, *UNSET):
        covered.update(spellings(name))
    covered.update(function for query in QUERIES for function in query.functions())
    others = [f for f in registered_functions() if f not in covered and not is_complex(f)]
    names = [function_name(f) for f in others]
    missing = [name for name in names if name not in OF_LIBRARIES]
    assert not missing, f"no entry in python_tests/jet/rule_table.py for {missing}"


def test_integer_results_are_torch_s_own() -> None:
    x = torch.randn(3, 4)
    results: list[Any] = []

    def fn(jet: Any) -> Any:
        results.append((torch.max(jet, 1), jet.topk(2), jet.sort(0)))
        return jet

    jx.jet(fn, x, torch.randn(2, 3, 4))
    for actual, expected in zip(results[0], (x.max(1), x.topk(2), x.sort(0)), strict=True):
        assert torch.equal(actual.indices, expected.indices)
        assert type(actual) is type(expected)
        assert [*float_tensors(actual)]
