"""Formulas: λ over layers (closed forms, monotonicity, temperature), and from squares to norms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jachess_ext.smoothness import layer_profile
from jachess_ext.smoothness.estimators import hessian_norm, safe_sqrt
from jachess_ext.smoothness.settings import Settings

NORMS = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64)


def test_closed_forms() -> None:
    expected = {
        "uniform": [1 / 3, 1 / 3, 1 / 3],
        "inverse": [1 / 8, 3 / 8, 4 / 8],
        "norm": [7 / 16, 5 / 16, 4 / 16],
    }
    for weighting, values in expected.items():
        assert layer_profile(weighting, NORMS).tolist() == pytest.approx(values)
    spread = math.sqrt(((1 - 8 / 3) ** 2 + (3 - 8 / 3) ** 2 + (4 - 8 / 3) ** 2) / 3)
    for temperature in (0.5, 1.0, 3.0):
        powers = [math.exp(-j / (spread * temperature)) for j in (1, 3, 4)]
        values = layer_profile("softmax", NORMS, temperature).tolist()
        assert values == pytest.approx([power / sum(powers) for power in powers])
        powers = [math.exp(-j / temperature) for j in (1, 3, 4)]
        values = layer_profile("raw_softmax", NORMS, temperature).tolist()
        assert values == pytest.approx([power / sum(powers) for power in powers])


@given(st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=12))
def test_smoother_layers_get_more_by_norm_and_softmax_and_less_by_inverse(values: list) -> None:
    norms = torch.tensor(values, dtype=torch.float64)
    order = norms.argsort()
    for weighting, sign in (("norm", -1), ("softmax", -1), ("inverse", 1)):
        profile = layer_profile(weighting, norms)
        assert profile.sum().item() == pytest.approx(1)
        assert (profile >= 0).all()
        steps = sign * profile[order].diff()
        assert (steps >= -1e-12).all(), (weighting, profile)


def test_softmax_does_not_saturate_over_orders_of_magnitude() -> None:
    """It is standardised: the norms' unit does not matter, and no weight comes near 1."""
    wide = torch.tensor([0.01, 1.0, 100.0, 10_000.0], dtype=torch.float64)
    profile = layer_profile("softmax", wide)
    torch.testing.assert_close(profile, layer_profile("softmax", 1e4 * wide))
    assert profile.max() < 0.4 and profile.min() > 0.01


def test_temperature() -> None:
    hot, cold = (layer_profile("softmax", NORMS, t) for t in (1e6, 0.05))
    torch.testing.assert_close(hot, torch.full_like(hot, 1 / 3), rtol=1e-5, atol=0)
    assert cold[0] > 0.999


@pytest.mark.parametrize("weighting", ["uniform", "inverse", "norm", "softmax"])
def test_one_layer_and_equal_layers(weighting: str) -> None:
    assert layer_profile(weighting, torch.tensor([5.0])).tolist() == [1.0]
    same = layer_profile(weighting, torch.tensor([2.0, 2.0], dtype=torch.float64))
    assert same.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    "weighting, norms, temperature, sentence",
    [
        ("largest", [1.0], 1.0, "weights is 'largest'; expected one of uniform, inverse"),
        ("norm", [1.0, float("nan")], 1.0, r"norms are \[1.0, nan\]; expected one positive"),
        ("norm", [1.0, 0.0], 1.0, "expected one positive, finite number per layer"),
        ("norm", [[1.0]], 1.0, "expected one positive, finite number per layer"),
        ("softmax", [1.0, 2.0], 0.0, "temperature is 0.0; expected a finite number above 0"),
    ],
)
def test_bad_input(weighting: str, norms: list, temperature: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layer_profile(weighting, torch.tensor(norms), temperature)  # type: ignore[arg-type]


def test_safe_sqrt() -> None:
    x = torch.tensor([0.0, 4.0, 1e-300], dtype=torch.float64, requires_grad=True)
    y = safe_sqrt(x)
    torch.testing.assert_close(y, x.sqrt())
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0, 0.25, 0.5e150], dtype=torch.float64))
    bad = safe_sqrt(torch.tensor([math.nan, math.inf]))
    assert bad[0].isnan() and bad[1].isinf(), "a broken norm must not turn into a smooth one"


@pytest.mark.parametrize("squared", [False, True])
def test_hessian_norms(squared: bool) -> None:
    squares = torch.tensor([[4.0, 9.0], [1.0, 0.0]], dtype=torch.float64)
    settings = Settings(squared=squared)
    per_dimension = hessian_norm(squares, settings, scale=0.5)
    tensor = hessian_norm(squares, Settings(squared=squared, hessian_norm="tensor"), scale=1.0)
    assert per_dimension.tolist() == ([6.5, 0.5] if squared else [2.5, 0.5])
    assert tensor.tolist() == pytest.approx([13.0, 1.0] if squared else [13**0.5, 1.0])
    corrected = hessian_norm(squares, settings, scale=0.5, pairs=1)
    factor = 1.0 if squared else math.sqrt(math.pi / 2)  # 1/c_1, c_1 = E|N(0, 1)|
    torch.testing.assert_close(corrected, per_dimension * factor)
