"""Values and gradients of every law, against formulas written apart and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jachess_ext import ntk_loss
from jachess_ext.scaling.laws import (
    FreeLens,
    Law,
    MeasuredLens,
    Power,
    Rectified,
)
from python_tests.scaling import curves


def measured() -> MeasuredLens:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    residual = torch.randn(6, dtype=torch.float64, generator=generator) * 3
    times = curves.WITH_ZERO / 1000
    return MeasuredLens(curves.WITH_ZERO, half @ half.T, residual, times, 0.05)


def points(law: Law, rows: int) -> np.ndarray:
    sizes = curves.WITH_ZERO if law.reads_zero else np.append(100.0, curves.SIZES)
    return np.tile(sizes, (rows, 1))


LAWS = [Rectified(), FreeLens(), Power(), measured()]
CENTRES = {
    "rectified": [4.0, 2.0, -1.0, 0.5],
    "lensllm": [4.0, 1.0, -1.0, 0.5],
    "power": [2.0, -1.0, 0.8, 0.1],
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_gradient_against_central_differences(law: Law, seed: int) -> None:
    generator = np.random.default_rng(seed)
    u = np.array(CENTRES[law.name]) + 0.3 * generator.standard_normal((3, len(law.parameters)))
    floors = [place for place, parameter in enumerate(law.parameters) if not parameter.log]
    u[:, floors] = np.abs(u[:, floors]) + 1e-3
    where, step = points(law, 3), 1e-6
    _, gradient = law.log_loss(u, where)
    for k in range(u.shape[1]):
        forward, backward = u.copy(), u.copy()
        forward[:, k] += step
        backward[:, k] -= step
        difference = (
            law.log_loss(forward, where, False)[0] - law.log_loss(backward, where, False)[0]
        )
        np.testing.assert_allclose(gradient[..., k], difference / (2 * step), rtol=2e-6, atol=2e-9)


@pytest.mark.parametrize("law", [Rectified(), FreeLens()], ids=["rectified", "lensllm"])
def test_rectified_value_with_zero(law: Law) -> None:
    u = np.array([[np.log(30.0), np.log(7.0), np.log(0.4), 0.6]])
    value, _ = law.log_loss(u, curves.WITH_ZERO[None])
    np.testing.assert_allclose(
        np.exp(value[0]), curves.rectified(curves.WITH_ZERO, 30.0, 7.0, 0.4, 0.6), rtol=1e-13
    )
    assert np.exp(value[0, 0]) == pytest.approx(30.0 / 7.0 + 0.6)


def test_power_values() -> None:
    u = np.array([[np.log(5.0), np.log(0.3), 0.7, np.log(0.8)]])
    value, _ = Power().log_loss(u, curves.SIZES[None])
    np.testing.assert_allclose(np.exp(value[0]), curves.power(curves.SIZES, 5.0, 0.3, 0.7, 0.8))


def test_measured_value_against_ntk_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    theta, residual = half @ half.T, torch.ones(5, dtype=torch.float64)
    sizes, times = np.array([100.0, 200.0, 400.0]), np.array([3.0, 5.0, 9.0])
    law = MeasuredLens(sizes, theta, residual, times, 0.01)
    u = np.array([[np.log(8.0), np.log(1.7), np.log(0.5), 0.3]])
    value, _ = law.log_loss(u, sizes[None])
    f = ntk_loss(theta, residual, torch.tensor(1.7 * times), 0.01).numpy()
    np.testing.assert_allclose(np.exp(value[0]), 8.0 / (f + sizes**0.5) + 0.3, rtol=1e-12)


@pytest.mark.parametrize(
    ("beta", "alpha", "expected"), [(0.5, 0.3, 1.0), (0.5, 4.0, 1.0), (2.5, 5.0, 12.5 / 3)]
)
def test_power_without_a_floor_has_one_alpha(beta: float, alpha: float, expected: float) -> None:
    """L is B^α / D^(αβ) there: the curve stays, β within its bound of 3."""
    law = Power()
    low, high = (
        np.array([[p.coordinate(getattr(p, end)) for p in law.parameters]])
        for end in ("low", "high")
    )
    u = np.array([[np.log(5.0), np.log(beta), 0.0, np.log(alpha)]])
    moved = law.settle(u, low, high)
    assert np.exp(moved[0, 3]) == pytest.approx(expected)
    where = curves.SIZES[None]
    np.testing.assert_allclose(law.log_loss(moved, where)[0], law.log_loss(u, where)[0])
    low[0, 3] = high[0, 3] = u[0, 3]
    np.testing.assert_array_equal(law.settle(u, low, high), u)
    u[0, 2] = 0.1
    low[0, 3], high[0, 3] = -1e3, 1e3
    np.testing.assert_array_equal(law.settle(u, low, high), u)


def test_recorded_times_are_met_and_continued() -> None:
    sizes, times = np.array([0.0, 100.0, 400.0]), np.array([0.0, 2.0, 32.0])
    law = MeasuredLens(sizes, torch.eye(2, dtype=torch.float64), torch.ones(2), times, 0.1)
    for size, expected in ((0.0, 0.0), (100.0, 2.0), (400.0, 32.0), (200.0, 8.0), (800.0, 128.0)):
        assert law.time(size) == pytest.approx(expected)


def test_one_recorded_time_is_continued_in_proportion() -> None:
    law = MeasuredLens(
        np.array([0.0, 100.0]), torch.eye(2), torch.ones(2), np.array([0.0, 3.0]), 0.1
    )
    assert [law.time(size) for size in (100.0, 50.0, 400.0)] == pytest.approx([3.0, 1.5, 12.0])


def test_transition_balances_the_denominator() -> None:
    u = np.array([[1.0, np.log(25.0), np.log(0.5), 0.2]])
    found = Rectified().log_transition(u)
    value, gradient = found
    assert np.exp(value[0]) ** 0.5 == pytest.approx(25.0)
    step = 1e-6
    for k in range(u.shape[1]):
        moved = u.copy()
        moved[:, k] += step
        slope = (Rectified().log_transition(moved)[0] - value) / step
        assert gradient[0, k] == pytest.approx(slope[0], abs=1e-4)


def test_measured_transition_gradient() -> None:
    law = measured()
    u = np.array([[np.log(40.0), 0.3, np.log(0.4), 0.2]])
    value, gradient = law.log_transition(u)
    kernel = law.kernel_loss(float(np.exp(value[0])), u[:, 1])[0][0]
    assert np.log(kernel) == pytest.approx(0.4 * value[0], abs=1e-9)
    step = 1e-2
    for k in range(u.shape[1]):
        moved = u.copy()
        moved[:, k] += step
        slope = (law.log_transition(moved)[0] - value) / step
        assert gradient[0, k] == pytest.approx(slope[0], rel=0.05, abs=1e-6)


@pytest.mark.parametrize("law", LAWS[:4], ids=lambda law: type(law).__name__)
def test_candidates_are_finite_and_one_is_near(law: Law) -> None:
    truth = np.array([CENTRES[law.name]])
    where = points(law, 1)
    log_losses, _ = law.log_loss(truth, where)
    found = law.candidates(where, log_losses, np.ones_like(log_losses))
    assert np.isfinite(found).all()
    rows = np.zeros(found.shape[1], dtype=int)
    values, _ = law.log_loss(found[0], where[rows], False)
    away = np.sqrt(((values - log_losses) ** 2).mean(-1)).min()
    assert away < 0.5 * log_losses.std()
