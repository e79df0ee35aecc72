"""torch's own samples of its operators through `jx.jet`: right, or refused by `MissingJetRule`.

Of every operator one sample by default; several, also as a method and with arguments alone, in the
slow test, which counts.  `operators.py` says what the oracles are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import jachess_ext as jx
from jachess_ext.jet.engine import registry
from jachess_ext.jet.rules import forward_mode_kept
from jachess_ext.jet.rules.forward_mode import forward_mode_rule

from .operators import Call, Verdict, calls, judge, operators, quiet, title

pytest.importorskip(
    "expecttest", reason="torch's table of operators needs it: pip install expecttest"
)
LEAST_RIGHT = {torch.float64: 400, torch.complex128: 160}
BAD = ("wrong", "raises")


@cache
def _operators(dtype: torch.dtype = torch.float64) -> list[Any]:
    return operators(dtype=dtype)


class _Met(dict):
    """The general rules, noting which were asked for."""

    def __init__(self, rules: dict) -> None:
        super().__init__(rules)
        self.met = False

    def get(self, function: Any, default: Any = None) -> Any:
        found = super().get(function, default)
        self.met |= found is not None
        return found


def _verdicts(op: Any, limit: int | None, dtype: torch.dtype = torch.float64) -> Iterator[Verdict]:
    for call in calls(op, limit, dtype):
        rules = _Met(registry.GENERAL_RULES)
        registry.GENERAL_RULES, before = rules, registry.GENERAL_RULES
        try:
            found = judge(call, independent=True)
            if found.kind == "right" and rules.met:
                found = judge(call, independent=False)
        finally:
            registry.GENERAL_RULES = before
        yield found


def test_other_names_of_a_function_are_served_where_it_is() -> None:
    for op in _operators():
        every = [call for call in calls(op, 1) if not call.strided] if op.aliases else []
        same = [c for c in every if c.leaves is every[0].leaves and c.places == every[0].places]
        first, *others = map(_jets, same) if same else [None]
        if first is not None:
            assert None not in others, title(op)
            torch.testing.assert_close(others, [first] * len(others), equal_nan=True)


def _jets(call: Call) -> list[Tensor] | None:
    """Return the streams of every output along two directions, or None without a rule."""
    torch.manual_seed(1)
    steps = tuple(torch.randn(2, *p.shape, dtype=p.dtype) for p in call.points)
    try:
        with torch.no_grad():
            return [jet.streams for jet in jx.jet(call, call.points, steps)]
    except jx.MissingJetRule:
        return None


def _worst(verdicts: Iterator[Verdict]) -> Verdict:
    order = (*BAD, "no rule", "no gradient", "right", "skipped")
    return min(verdicts, key=lambda v: order.index(v.kind), default=Verdict("skipped"))


@pytest.mark.parametrize("dtype", LEAST_RIGHT)
@pytest.mark.parametrize("part", range(8))
def test_a_sample_of_every_operator(part: int, dtype: torch.dtype) -> None:
    chosen = _operators(dtype)[part::8]
    with quiet():
        found = {title(op): next(_first(op, dtype), Verdict("skipped")) for op in chosen}
    bad = {name: v.detail for name, v in found.items() if v.kind in BAD and name != AT_A_KINK}
    assert not bad
    assert sum(v.kind == "right" for v in found.values()) >= LEAST_RIGHT[dtype] // 8


# Its samples are norms of 0, whose second derivative is NaN: test_norm_at_zero.py.
AT_A_KINK = "linalg.norm.subgradients_at_zero"


def _first(op: Any, dtype: torch.dtype) -> Iterator[Verdict]:
    """The first sample whose primal is a number; its gradient is left to the slow test."""
    for call in calls(op, 2, dtype):
        found = judge(call, gradients=False)
        if found.kind != "skipped":
            yield found
            return


@pytest.mark.parametrize("name", ["kron", "linalg.inv"])
def test_gradients_through_the_general_rule(name: str) -> None:
    """Of every operator in the slow test."""
    (op,) = [op for op in _operators() if op.name == name]
    assert {v.kind for v in _verdicts(op, 2)} - {"skipped"} == {"right"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LEAST_RIGHT)
def test_samples_of_every_operator(dtype: torch.dtype) -> None:
    with quiet():
        found = {title(op): _worst(_verdicts(op, 6, dtype)) for op in _operators(dtype)}
    counts = Counter(v.kind for v in found.values())
    print(dict(counts), {n: v.detail[:80] for n, v in found.items() if v.kind.startswith("no ")})
    assert not {name: v for name, v in found.items() if v.kind in BAD and name != AT_A_KINK}
    assert counts["right"] >= LEAST_RIGHT[dtype]


@pytest.mark.slow
def test_variants_without_a_forward_mode() -> None:
    """They are refused, or served by a rule of their own: torch's forward mode may give zeros for
    them in silence."""
    with quiet():
        # Sparse tensors are no points of ours, cfloat rounds the differences, normal has a sample
        # without a tensor.
        left_out = ("sparse", "cfloat", "normal")
        chosen = [op for op in operators(forward=False) if not op.name.startswith(left_out)]
        found = {title(op): _worst(_verdicts(op, 3)) for op in chosen}
    assert "scatter_reduce.prod" in found
    assert not {name: v for name, v in found.items() if v.kind in BAD}


# ---- the general rule --------------------------------------------------------------------------


def test_a_layer_norm_by_torch_s_forward_mode_is_noticed() -> None:
    """torch's own error: were the general rule to serve it, the samples would show it."""
    (op,) = [op for op in _operators() if op.name == "nn.functional.layer_norm"]
    function = torch.nn.functional.layer_norm
    before = registry.RULES[function]
    registry.RULES[function] = forward_mode_rule(function, has_gradients=True)
    try:
        kinds = {judge(call, independent=False).kind for call in calls(op, 2)}
    finally:
        registry.RULES[function] = before
    assert "wrong" in kinds


def _jet(function: Any, *, gradients: bool) -> Any:
    x = torch.rand(3, dtype=torch.float64).requires_grad_(gradients)
    return jx.jet(function, x, torch.ones(2, 3, dtype=torch.float64))


def test_gradients_that_would_be_wrong_are_refused() -> None:
    assert "torch.copysign" in forward_mode_kept.FORWARD_ONLY
    y = torch.ones(3, dtype=torch.float64)
    assert _jet(lambda x: torch.copysign(x, y), gradients=False).second.isfinite().all()
    with pytest.raises(jx.MissingJetRule, match="backward"):
        _jet(lambda x: torch.copysign(x, y), gradients=True)


def test_what_draws_at_random_is_refused() -> None:
    """The general rule runs a function once for each pair of directions."""
    for name in (*forward_mode_kept.FORWARD_REVERSE, *forward_mode_kept.FORWARD_ONLY):
        assert "rrelu" not in name and "fractional" not in name and "lowrank" not in name
    with pytest.raises(jx.MissingJetRule, match="rrelu"):
        _jet(lambda x: torch.nn.functional.rrelu(-x, training=True), gradients=False)


def test_a_view_by_the_general_rule_is_refused() -> None:
    assert registry.GENERAL_RULES.get(torch.narrow_copy) is not None
    rule = forward_mode_rule(torch.Tensor.as_strided, has_gradients=True)
    with pytest.raises(jx.MissingJetRule, match="view"):
        _jet(lambda x: rule(x, (2,), (1,)), gradients=False)


def test_what_forward_mode_does_not_know_is_a_missing_rule() -> None:
    rule = forward_mode_rule(torch.nn.functional.huber_loss, has_gradients=True)
    with pytest.raises(jx.MissingJetRule, match="forward mode"):
        _jet(lambda x: rule(x, torch.zeros(3, dtype=torch.float64)), gradients=False)


class _Own(torch.Tensor):
    """A tensor of a class of its own."""


def test_tensors_of_other_classes_are_refused() -> None:
    own = torch.ones(3, dtype=torch.float64).as_subclass(_Own)
    rule = registry.GENERAL_RULES[torch.kron]
    with pytest.raises(jx.MissingJetRule, match="class of its own"):
        _jet(lambda x: rule(x, own), gradients=False)


@pytest.mark.parametrize("order", [1, 2])
def test_one_direction_and_order_one(order: int) -> None:
    x, u = torch.rand(2, 3, dtype=torch.float64)
    jet = jx.jet(torch.asinh, x, u[None], order=order)
    torch.testing.assert_close(jet.first[0], u / (x * x + 1).sqrt())
    assert jet.second.shape == (0, 3)


def test_a_tangent_as_a_target() -> None:
    x, u = torch.rand(2, 3, dtype=torch.float64)
    output, tangent = jx.jvp(torch.asinh, (x.requires_grad_(),), (u,), differentiable=False)
    assert torch.equal(output, torch.asinh(x)) and output.requires_grad
    torch.testing.assert_close(tangent, (u / (x * x + 1).sqrt()).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_torch_s(dtype: torch.dtype) -> None:
    x, y = torch.rand(2, 3, 3).to(dtype)
    with torch.autocast("cpu"):
        for function in (lambda x: torch.addr(x, x[0], y[0]), torch.asinh, torch.linalg.inv):
            if dtype == torch.bfloat16 and function is torch.linalg.inv:
                continue
            jet = jx.jet(function, x, torch.ones(1, 3, 3, dtype=dtype))
            assert jet.primal.dtype == jet.first.dtype == function(x).dtype


@pytest.mark.parametrize(
    "function, gradients",
    [
        (lambda x: torch.norm(x, 3), True),
        (torch.special.i1, True),
    ],
)
def test_what_several_samples_have_shown_wrong_is_refused(function: Any, gradients: bool) -> None:
    """In torch a norm's backward raises, and i1's derivative at 0 is the constant 1/2, so that its
    third derivative there is 0 instead of 3/8."""
    with pytest.raises(jx.MissingJetRule):
        _jet(function, gradients=gradients)
