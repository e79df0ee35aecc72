"""The batched minimiser: Huber's loss, bounds, rows that do not see each other; scipy as judge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from jachess_ext.scaling.least_squares import huber, huber_weights, minimise

WIDE = 50.0


def exponential(x: np.ndarray, y: np.ndarray):  # type: ignore[no-untyped-def]
    """Residuals of y = e^a e^(−e^b x) + c."""

    def residuals(u, rows, gradient):  # type: ignore[no-untyped-def]
        rate = np.exp(u[:, 1:2])
        part = np.exp(u[:, :1] - rate * x)
        jacobian = np.stack([part, -part * rate * x, np.ones_like(part)], -1)
        return part + u[:, 2:] - y[rows], jacobian

    return residuals


@given(
    size=st.floats(0.0, 10.0),
    weight=st.floats(0.0, 3.0),
    delta=st.one_of(st.floats(0.01, 5.0), st.just(np.inf)),
)
def test_huber(size: float, weight: float, delta: float) -> None:
    value = huber(np.array([[-size]]), np.array([[weight]]), np.array([delta]))[0]
    expected = size**2 / 2 if size <= delta else delta * (size - delta / 2)
    assert value == pytest.approx(weight * expected)
    slope = huber_weights(np.array([[size]]), np.array([[weight]]), np.array([delta]))[0, 0] * size
    assert slope == pytest.approx(weight * min(size, delta))


@pytest.mark.parametrize("delta", [np.inf, 0.05])
def test_as_good_as_scipy(delta: float) -> None:
    generator = np.random.default_rng(3)
    x = np.linspace(0, 4, 25)
    truth = generator.uniform([0.0, -0.5, -0.5], [1.5, 0.5, 1.0], (40, 3))
    clean = np.exp(truth[:, :1] - np.exp(truth[:, 1:2]) * x) + truth[:, 2:]
    y = clean + 0.05 * generator.standard_t(2, clean.shape)
    residuals = exponential(x, y)
    start = np.zeros((40, 3))
    box = np.full((40, 3), WIDE)
    ours = minimise(residuals, start, -box, box, np.ones_like(y), np.full(40, delta))
    for row in range(40):
        number = np.array([row])
        loss = {"loss": "linear"} if delta == np.inf else {"loss": "huber", "f_scale": delta}
        judge = least_squares(
            lambda u, number=number: residuals(u[None], number, False)[0][0],
            start[row],
            jac=lambda u, number=number: residuals(u[None], number, True)[1][0],
            **loss,
        )
        assert ours.objective[row] <= judge.cost * (1 + 1e-6)


def test_bounds_are_kept_and_optimal_there() -> None:
    x, y = np.linspace(0, 3, 12), np.exp(1 - np.linspace(0, 3, 12))[None] - 0.3
    low, high = np.array([[-WIDE, -WIDE, 0.0]]), np.array([[WIDE, WIDE, WIDE]])
    start = np.array([[0.0, 0.0, 0.5]])
    found = minimise(exponential(x, y), start, low, high, np.ones_like(y), np.array([np.inf]))
    assert found.u[0, 2] == 0.0  # −0.3 without the bound
    judge = least_squares(
        lambda u: exponential(x, y)(u[None], np.array([0]), False)[0][0],
        start[0] + 1e-3,
        bounds=(low[0], high[0]),
        xtol=1e-14,
        ftol=1e-14,
    )
    assert found.objective[0] <= judge.cost * (1 + 1e-6)


def test_fixed_coordinates_and_weights_of_zero() -> None:
    x = np.linspace(0, 3, 12)
    y = (np.exp(0.5 - x) + 0.2)[None]
    weights = np.ones_like(y)
    y[0, 4], weights[0, 4] = 99.0, 0.0
    low, high = np.array([[-WIDE, 0.0, -WIDE]]), np.array([[WIDE, 0.0, WIDE]])
    found = minimise(exponential(x, y), np.zeros((1, 3)), low, high, weights, np.array([np.inf]))
    np.testing.assert_allclose(found.u[0], [0.5, 0.0, 0.2], atol=1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = np.random.default_rng(0)
    x = np.linspace(0, 4, 15)
    y = np.exp(generator.uniform(-1, 1, (6, 1)) - x) + 0.01 * generator.standard_normal((6, 15))
    box = np.full((6, 3), WIDE)
    settings_ = (np.zeros((6, 3)), -box, box, np.ones_like(y), np.full(6, 0.02))
    together = minimise(exponential(x, y), *settings_)
    for row in range(6):
        one = slice(row, row + 1)
        alone = minimise(exponential(x, y[one]), *(part[one] for part in settings_))
        np.testing.assert_allclose(alone.u[0], together.u[row], rtol=1e-9, atol=1e-9)
