"""Parameter gradients of R against finite differences of R, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import jachess_ext as jx

from .tiny_models import classifier, parameter_gradients, token_batch

STEP = 2e-4


def regulariser(model: nn.Module, **settings: Any) -> jx.JacHess:
    defaults = {"weights": "uniform", "dimensions": 3, "seed": 5, "strength": 0.7}
    reg = jx.JacHess(model, **(defaults | settings))
    if reg.normalize:
        reg.calibrate([token_batch([3])])
    return reg


def frozen_value(reg: jx.JacHess, batch: dict) -> torch.Tensor:
    """R as a function of the parameters alone: every call draws what the first step draws."""
    reg.step = 0
    return reg(batch).loss


def directional_difference(reg: jx.JacHess, batch: dict, direction: dict) -> float:
    """Central difference of R along a direction in parameter space, extrapolated to O(h⁴)."""
    parameters = dict(reg.model.named_parameters())

    def shifted(amount: float) -> float:
        with torch.no_grad():
            for name, d in direction.items():
                parameters[name].add_(d, alpha=amount)
        value = frozen_value(reg, batch).item()
        with torch.no_grad():
            for name, d in direction.items():
                parameters[name].sub_(d, alpha=amount)
        return value

    def central(h: float) -> float:
        return (shifted(h) - shifted(-h)) / (2 * h)

    return (4 * central(STEP) - central(2 * STEP)) / 3


def check(reg: jx.JacHess, batch: dict) -> None:
    """Along a random direction in all parameters, and along the gradient in each one alone."""
    gradients = parameter_gradients(frozen_value(reg, batch), reg.model)
    used = {name: g for name, g in gradients.items() if g.norm() > 1e-12}
    assert len(used) >= 10
    torch.manual_seed(9)
    everywhere = {name: torch.randn_like(g) for name, g in gradients.items()}
    total = sum((g * everywhere[name]).sum().item() for name, g in gradients.items())
    scale = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
    assert abs(directional_difference(reg, batch, everywhere) - total) < 1e-5 * scale
    for name in list(used)[::10]:
        unit = used[name] / used[name].norm()
        difference = directional_difference(reg, batch, {name: unit})
        error = abs(difference - used[name].norm().item()) / used[name].norm().item()
        assert error < 1e-5 or error * used[name].norm().item() < 1e-9 * scale, (name, error)


@pytest.mark.parametrize(  # every pair of values occurs
    "name, attention, normalize, squared",
    [
        ("bert", "eager", False, True),
        ("bert", "sdpa", True, False),
        ("gpt2", "eager", True, True),
        ("gpt2", "sdpa", False, True),
    ],
)
def test_jet(name: str, attention: str, normalize: bool, squared: bool) -> None:
    model = classifier(name, attention=attention)
    check(regulariser(model, normalize=normalize, squared=squared), token_batch([4, 3]))


@pytest.mark.parametrize(
    "attention, squared, normalize", [("eager", False, True), ("sdpa", True, False)]
)
def test_reverse(attention: str, squared: bool, normalize: bool) -> None:
    model = classifier("bert", attention=attention)
    settings: dict[str, Any] = {"engine": "reverse", "layers": [1], "scope": "first"}
    settings |= {"squared": squared, "normalize": normalize, "directions": 1, "dimensions": 2}
    check(regulariser(model, **settings), token_batch([3, 2]))


@pytest.mark.parametrize(
    "settings",
    [
        {"directions": 5},
        {"hessian": False, "directions": 1},
        {"hessian_norm": "tensor"},
        {"dimensions": "all"},
        {"layers": "logits"},
        {"scope": "last", "layers": [0]},
        # Not seed 5: a second derivative of 0.009 lies within the step's reach of 0, where the norm
        # of a single pair, |x_ij|, has its kink.
        {"distribution": "rademacher", "seed": 6},
    ],
    ids=str,
)
def test_jet_settings(settings: dict) -> None:
    check(regulariser(classifier("gpt2"), **settings), token_batch([4, 2], side="left"))


def test_exact() -> None:
    settings: dict[str, Any] = {"engine": "exact", "layers": [1], "scope": "last", "dimensions": 1}
    reg = regulariser(classifier("gpt2"), **settings)
    batch = token_batch([2])
    gradients = parameter_gradients(frozen_value(reg, batch), reg.model)
    scale = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
    unit = {name: g / scale for name, g in gradients.items()}
    assert directional_difference(reg, batch, unit) == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize("engine", ["jet", "reverse", "exact"])
def test_no_graph_without_gradients(engine: str) -> None:
    settings: dict[str, Any] = {"layers": [0], "scope": "first", "dimensions": 1}
    with torch.no_grad():
        result = jx.smoothness(classifier("bert"), token_batch([2]), engine=engine, **settings)
    assert not result.jacobian.requires_grad and not result.hessian.requires_grad
    assert not result.hessian_tokens.requires_grad
