"""J u and D²z[u, w] at every layer of every family, against oracles that share no code."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import jachess_ext as jx
from jachess_ext.torch_private import release

from . import oracles
from .zoo import ATTENTIONS, FAMILIES, PADDINGS, Case, build_case

REFUSED = [
    (name, kind)
    for name, family in FAMILIES.items()
    for kind in ATTENTIONS
    if kind not in family.attentions
]


def _paddings(name: str) -> tuple[str, ...]:
    return ("none",) if FAMILIES[name].takes == "pixel_values" else PADDINGS


def _cases() -> list[Any]:
    """Every model with every attention and padding; slow but for one padding of each in turn, with
    the attention that `test_parameter_gradients` does not take."""
    cases = []
    for number, (name, family) in enumerate(FAMILIES.items()):
        paddings = _paddings(name)
        chosen = (
            family.attentions[(number + 1) % len(family.attentions)],
            paddings[number % len(paddings)],
        )
        for way in product(family.attentions, paddings):
            marks = () if way == chosen else pytest.mark.slow
            cases.append(pytest.param(name, *way, marks=marks))
    return cases


def _smooth_case(name: str, attention: str, padding: str) -> Case:
    """A case whose differences stay on one side of every kink."""
    for seed in range(50):
        case = build_case(name, attention, padding=padding, seed=seed)
        if not FAMILIES[name].kinked:
            return case
        displacements = oracles.reach(*case.directions, oracles.KINKED)
        if not oracles.crosses_a_kink(case.hidden_states, case.x, displacements):
            return case
    raise AssertionError("every seed steps over a kink: lower the step")


def _real(tensor: Tensor, case: Case) -> Tensor:
    """The rows of real tokens."""
    return tensor[..., case.mask, :]


@pytest.mark.parametrize("name, attention, padding", _cases())
def test_jet_agrees_with_differences_and_reverse(name: str, attention: str, padding: str) -> None:
    old = release(transformers.__version__) < (5, 17)
    if old and (refusal := _refusal(name, attention)):
        pytest.skip(f"transformers {transformers.__version__}: {refusal.splitlines()[0]}")
    _check_derivatives(name, attention, padding)


def _refusal(name: str, attention: str) -> str:
    """Why transformers does not build this model with this attention; "" where it does."""
    try:
        build_case(name, attention)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name, attention", REFUSED)
def test_what_transformers_refuses_is_right_where_another_release_takes_it(
    name: str, attention: str
) -> None:
    """Gemma 2 with sdpa, say: 5.20 takes it, 5.23 does not."""
    if refusal := _refusal(name, attention):
        assert "does not support an attention implementation" in refusal
        return
    for padding in _paddings(name):
        _check_derivatives(name, attention, padding)


def _check_derivatives(name: str, attention: str, padding: str) -> None:
    with oracles.Float64Casts():
        case = _smooth_case(name, attention, padding)
        jets = jx.jet(case.hidden_states, case.x, case.directions)
        with torch.no_grad():
            primals = case.hidden_states(case.x)
        u, w = case.directions
        steps = oracles.KINKED if case.family.kinked else oracles.SMOOTH
        first = [oracles.first_difference(case.hidden_states, case.x, d, steps) for d in (u, w)]
        second = oracles.mixed_difference(case.hidden_states, case.x, u, w, steps)
    assert len(jets) == case.model.config.num_hidden_layers + 1
    for layer, jet in enumerate(jets):
        assert jet.primal.dtype == torch.float64
        assert jet.pairs == [(0, 1)]
        real = [_real(t, case) for t in (jet.primal, jet.first, jet.second)]
        assert oracles.relative_error(real[0], _real(primals[layer], case)) < 1e-12
        for i in range(2):
            error = oracles.relative_error(real[1][i], _real(first[i][layer], case))
            assert error < 1e-6, f"J u_{i} of layer {layer}: {error:.1e}"
        # A first layer that is linear in x has no curvature to be measured against.
        scale = (real[2] if real[2].any() else real[1]).norm()
        error = (real[2][0] - _real(second[layer], case)).norm() / scale
        assert error < 1e-6, f"D²z of layer {layer}: {error:.1e}"
    assert _real(jets[-1].second, case).norm() > 1e-2, "too flat to test anything"
    _check_reverse(case, jets)


def _check_reverse(case: Case, jets: tuple) -> None:
    """v·J u and v·D²z[u, w] for random v on real tokens, by autograd twice."""
    torch.manual_seed(5)
    cotangents = [torch.randn_like(j.primal) * case.mask.unsqueeze(-1) for j in jets]
    math_kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with oracles.Float64Casts(), math_kernel:
        u, w = case.directions
        first, second = oracles.reverse_over_reverse(case.hidden_states, case.x, u, w, cotangents)
    for layer, (jet, v) in enumerate(zip(jets, cotangents, strict=True)):
        real = case.mask.unsqueeze(-1)
        for name, actual, expected in (
            ("J u", jet.first[0], first[layer]),
            ("D²z", jet.second[0], second[layer]),
        ):
            actual = torch.where(real, actual, 0)
            scale = v.norm() * actual.norm() + 1e-6
            error = ((v * actual).sum() - expected).abs() / scale
            assert error < 1e-10, f"{name} of layer {layer}: {error:.1e}"
