"""Every rule of the engine, against finite differences and against torch's own result."""

from __future__ import annotations

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
from .rule_table import ELSEWHERE, NARROWING, OF_LIBRARIES, ROUNDED, ROWS, UNSET, Row, is_complex

STEPS = oracles.Steps(1e-3, 2e-3)
CALLS = [
    pytest.param(function, row, id=f"{function_name(function)}-{n}")
    for n, row in enumerate(ROWS)
    for function in row.functions()
]
# The spellings of one name share a rule, so what follows from the rule alone needs but one.
RULES = [
    pytest.param(function, row, id=f"{function_name(function)}-{n}")
    for n, row in enumerate(ROWS)
    for function in {last_name(f): f for f in reversed(row.functions())}.values()
]


def _one_of_each() -> list[Any]:
    """`RULES`, slow but for the first way of calling each function."""
    first: dict[str, Any] = {}
    for parameters in RULES:
        first.setdefault(last_name(parameters.values[0]), parameters)
    quick = {parameters.id for parameters in first.values()}
    return [
        pytest.param(*p.values, id=p.id, marks=() if p.id in quick else pytest.mark.slow)
        for p in RULES
    ]


# What follows from the rule, whatever it is called with.
ONE_OF_EACH = _one_of_each()


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


@pytest.mark.parametrize("function, row", CALLS)
def test_rule(function: Any, row: Row) -> None:
    call = make_call(function, row)
    torch.manual_seed(1)
    u, w, v = directions = torch.randn(3, len(call.x), dtype=torch.float64)
    bent = _bent(call, call.x)
    jets = jx.jet(bent, call.x, directions)
    expected = call(call.x)
    assert len(jets) == len(expected) > 0
    for jet, plain in zip(jets, expected, strict=True):
        _check_primal(jet.primal, plain, row)
    first = [oracles.first_difference(bent, call.x, d, STEPS) for d in (u, w, v)]
    second = [
        oracles.mixed_difference(bent, call.x, a, b, STEPS) for a, b in ((u, w), (u, v), (w, v))
    ]
    for output, jet in enumerate(jets):
        assert jet.streams.shape == (7, *expected[output].shape)
        for i in range(3):
            _check_close(jet.first[i], first[i][output], 1e-8)
            _check_close(jet.second[i], second[i][output], 1e-6)


@pytest.mark.parametrize("function, row", RULES)
def test_squares_and_their_sum(function: Any, row: Row) -> None:
    """D²f[u_i, u_i] of two of three directions, one by one and added up."""
    call = make_call(function, row)
    torch.manual_seed(1)
    directions = torch.randn(3, len(call.x), dtype=torch.float64)
    bent = _bent(call, call.x)
    first = [oracles.first_difference(bent, call.x, u, STEPS) for u in directions]
    # Twice along one direction goes twice as far as along two.
    steps = oracles.Steps(STEPS.first, STEPS.mixed / 2)
    second = [oracles.mixed_difference(bent, call.x, u, u, steps) for u in directions[:2]]
    inputs = check_inputs(call.x, directions, check_values=True)
    layouts = begin_pass(3, 2, "squares", 2), begin_pass(3, 2, "sum", 2)
    squares, sums = (run_pass(bent, inputs, layout) for layout in layouts)
    for output, (jet, summed) in enumerate(zip(squares, sums, strict=True)):
        assert (len(jet.streams), len(summed.streams)) == (6, 5)
        for i in range(3):
            _check_close(jet.first[i], first[i][output], 1e-8)
            _check_close(summed.first[i], first[i][output], 1e-8)
        for i in range(2):
            _check_close(jet.second[i], second[i][output], 1e-6)
        _check_close(summed.second[0], second[0][output] + second[1][output], 1e-6)


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


@pytest.mark.parametrize("function, row", RULES)
def test_backward_of_rule(function: Any, row: Row) -> None:
    """The gradient of every stream, with respect to the point and to the directions."""
    call = make_call(function, row)
    torch.manual_seed(1)
    directions = torch.randn(2, len(call.x), dtype=torch.float64, requires_grad=True)
    x = call.x.requires_grad_()

    def streams(x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Adding -inf entries keeps them; gradcheck needs finite numbers.  A NaN stays and fails.
        # It would hold the outputs that need a gradient against all of them in order, so that a
        # constant one (a grid of a plain tensor) would shift the rest: every one needs a gradient.
        found = (jet.streams + 0 * x.sum() for jet in jx.jet(call, x, u))
        return tuple(streams.masked_fill(streams == -torch.inf, 0.0) for streams in found)

    assert torch.autograd.gradcheck(streams, (x, directions), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("function, row", ONE_OF_EACH)
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


@pytest.mark.parametrize("function, row", ONE_OF_EACH)
def test_one_direction(function: Any, row: Row) -> None:
    """A single direction gives the same J u as among several; order 1 gives no second streams."""
    call = make_call(function, row)
    torch.manual_seed(1)
    directions = torch.randn(2, len(call.x), dtype=torch.float64)
    together = jx.jet(call, call.x, directions)
    for order in (1, 2):
        alone = jx.jet(call, call.x, directions[1:], order=order)
        for several, one in zip(together, alone, strict=True):
            assert one.second.shape == (0, *one.primal.shape)
            torch.testing.assert_close(one.first[0], several.first[1], rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("function, row", RULES)
def test_dtype_shape_and_value_of_the_primal(function: Any, row: Row) -> None:
    """In every precision the primal is torch's own result, wherever torch has one."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
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
