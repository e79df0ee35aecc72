"""Values and gradients of every law, against formulas written apart and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jachess_ext import ntk_loss
from jachess_ext.scaling import fit, laws
from jachess_ext.scaling.laws import Law, MeasuredLens, Power, Rectified
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


LAWS: dict[str, Law] = {**{name: law() for name, law in laws.LAWS.items()}, "measured": measured()}
"""Every law of the registry, and the one that needs a kernel."""
CURVE = (30.0, 7.0, 0.4, 0.6)


def drawn(law: Law, generator: np.random.Generator, rows: int) -> np.ndarray:
    """Coordinates round the law's own starts for a curve, [rows, p], off every bound."""
    where = points(law, 1)
    log_losses = np.log(curves.rectified(where, *CURVE))
    starts = law.candidates(where, log_losses, np.ones_like(where))[0]
    u = generator.choice(starts, rows) + 0.3 * generator.standard_normal((rows, starts.shape[1]))
    floors = [place for place, parameter in enumerate(law.parameters) if not parameter.is_log]
    u[:, floors] = np.abs(u[:, floors]) + 1e-3
    return u


@pytest.mark.parametrize("name", LAWS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_gradient_against_central_differences(name: str, seed: int) -> None:
    law, step = LAWS[name], 1e-6
    u = drawn(law, np.random.default_rng(seed), 3)
    where = points(law, 3)
    _, gradient = law.log_loss(u, where)
    for k in range(u.shape[1]):
        forward, backward = u.copy(), u.copy()
        forward[:, k] += step
        backward[:, k] -= step
        difference = (
            law.log_loss(forward, where, False)[0] - law.log_loss(backward, where, False)[0]
        )
        np.testing.assert_allclose(gradient[..., k], difference / (2 * step), rtol=2e-6, atol=2e-9)


@pytest.mark.parametrize("name", laws.LAWS)
def test_values_and_units_are_those_of_the_formula(name: str) -> None:
    """Where sizes are counted in other units (if the law allows them) and losses, too."""
    law = LAWS[name]
    count = 1 if law.sizes_are_examples else 8
    where = points(law, 1)[0]
    for u in drawn(law, np.random.default_rng(0), 20):
        params = {p.name: float(p.value(v)) for p, v in zip(law.parameters, u, strict=True)}
        expected = curves.of_formula(law.formula, where, params)
        np.testing.assert_allclose(np.exp(law.log_loss(u[None], where[None])[0][0]), expected)
        for by, (losses, sizes) in law.units(params).items():
            params[by] *= 3.0**losses * float(count) ** sizes
        np.testing.assert_allclose(
            curves.of_formula(law.formula, count * where, params), 3 * expected, rtol=1e-10
        )


@pytest.mark.parametrize("name", laws.LAWS)
def test_a_fit_finds_the_parameters_again(name: str) -> None:
    """Of exact curves of the law, as close to two noisy ones of another as it comes."""
    law = LAWS[name]
    where = points(law, 1)[0]
    noisy = curves.noisy(
        np.stack([curves.rectified(where, *row) for row in (CURVE, (9, 2, 0.3, 0.8))]),
        np.random.default_rng(0),
        0.002,
    )
    params = fit(where, noisy, name).params
    exact = curves.of_formula(law.formula, where, {k: v[:, None] for k, v in params.items()})
    assert np.square(np.log(exact / noisy)).mean() < 0.05 * np.log(noisy).var()
    again = fit(where, exact, name)
    np.testing.assert_allclose(again.predict(where), exact, rtol=1e-6)
    for by, value in params.items():
        np.testing.assert_allclose(again.params[by], value, rtol=2e-3, err_msg=by)


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
    moved = law.canonical(u, low, high)
    assert np.exp(moved[0, 3]) == pytest.approx(expected)
    where = curves.SIZES[None]
    np.testing.assert_allclose(law.log_loss(moved, where)[0], law.log_loss(u, where)[0])
    low[0, 3] = high[0, 3] = u[0, 3]
    np.testing.assert_array_equal(law.canonical(u, low, high), u)
    u[0, 2] = 0.1
    low[0, 3], high[0, 3] = -1e3, 1e3
    np.testing.assert_array_equal(law.canonical(u, low, high), u)


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


@pytest.mark.parametrize("name", LAWS)
def test_candidates_are_finite_and_one_is_near(name: str) -> None:
    law = LAWS[name]
    where = points(law, 1)
    for curve in (CURVE, *curves.random_rectified(np.random.default_rng(1), 5)):
        log_losses = np.log(curves.rectified(where, *curve))
        found = law.candidates(where, log_losses, np.ones_like(log_losses))
        assert np.isfinite(found).all()
        rows = np.zeros(found.shape[1], dtype=int)
        values, _ = law.log_loss(found[0], where[rows], False)
        away = np.sqrt(((values - log_losses) ** 2).mean(-1)).min()
        assert away < 0.5 * log_losses.std()
