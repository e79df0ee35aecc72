"""No unit changes a fit: sizes, losses and weights in others give the same law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jachess_ext.scaling import LossTable, fit, laws, select
from python_tests.scaling import curves

LAWS = [*(name for name, law in laws.LAWS.items() if not law.sizes_are_examples), "ats"]
LAWS.remove("lensllm")  # the rectified law by another name
AHEAD = 32 * curves.SIZES[-1]

FACTORS = 1e3, 1e3, 1e-3
"""Of sizes, losses and weights."""


def noisy_losses() -> np.ndarray:
    rows = [
        curves.rectified(curves.SIZES, 90.0, 30.0, 0.4, 0.5),
        curves.rectified(curves.SIZES, 40.0, 10.0, 0.3, 0.8),
        curves.power(curves.SIZES, 6.0, 0.3, 0.9, 1.0),
    ]
    return curves.noisy(np.stack(rows), np.random.default_rng(0), 0.01)


def fitted(law: str, factors: tuple[float, ...], **given: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Return the parameters, and in the first units: prediction, ends at 90 % and 50 %, D*."""
    d, y, w = factors
    found: Any = fit(curves.SIZES * d, noisy_losses() * y, law, weights=np.full(14, w), **given)
    params, at = found.params, AHEAD * d
    values = [found.predict(at), *found.interval(at), *found.interval(at, 0.5)]
    return params, np.array(values) / y


@pytest.mark.parametrize("law", LAWS)
def test_units_change_nothing(law: str) -> None:
    first, expected = fitted(law, (1.0, 1.0, 1.0))
    params, values = fitted(law, FACTORS)
    np.testing.assert_allclose(values, expected, rtol=2e-6)
    width, old = (np.log(v[2] / v[1]) for v in (values, expected))
    np.testing.assert_allclose(width, old, rtol=1e-5)
    d, y, _ = FACTORS
    if law == "ats":
        np.testing.assert_allclose(params["slope"], first["slope"])
        moved = first["intercept"] + np.log(y) - first["slope"] * np.log(d)
        np.testing.assert_allclose(params["intercept"], moved)
        return
    units = laws.LAWS[law]().units(first)  # test_laws holds them against the formula
    assert set(params) == set(first)
    for name, value in first.items():
        of_losses, of_sizes = units.get(name, (0.0, 0.0))
        unit = y**of_losses * d**of_sizes
        np.testing.assert_allclose(params[name], value * unit, rtol=1e-3, err_msg=name)


def test_units_change_no_interval_of_the_law_chosen() -> None:
    losses, (d, y, w) = noisy_losses()[0], FACTORS
    first = fit(curves.SIZES, losses)
    other = fit(curves.SIZES * d, losses * y, weights=np.full(14, w))
    assert other.law == first.law
    ends, expected = other.interval(AHEAD * d), first.interval(AHEAD)
    np.testing.assert_allclose(np.array(ends) / y, expected, rtol=1e-4)


def test_the_transition_has_the_unit_of_sizes() -> None:
    losses = noisy_losses()[0]
    rows, thousands = (fit(curves.SIZES * d, losses, "rectified").transition for d in (1, 1e-3))
    for name in ("size", "low", "high"):
        assert getattr(thousands, name) == pytest.approx(getattr(rows, name) / 1000)


def test_unequal_weights_count_as_shares() -> None:
    weights, losses = np.linspace(1, 3, 14), noisy_losses()
    one, other = (fit(curves.SIZES, losses, "power", weights=w * weights) for w in (1, 64))
    np.testing.assert_array_equal(one.predict(AHEAD), other.predict(AHEAD))
    np.testing.assert_array_equal(one.interval(AHEAD), other.interval(AHEAD))


@pytest.mark.parametrize(
    ("law", "given", "other"),
    [
        ("rectified", {"fixed": {"E": 0.4}}, {"fixed": {"E": 40.0}}),
        ("rectified", {"bounds": {"E": (0.55, 0.6)}}, {"bounds": {"E": (55.0, 60.0)}}),
        ("rectified", {"fixed": {"B": 80.0}}, {"fixed": {"B": 8000.0}}),
        (
            "power",
            {"fixed": {"alpha": 0.5}, "bounds": {"E": (0.3, 0.4)}},
            {"fixed": {"alpha": 0.5}, "bounds": {"E": (3e3, 4e3)}},
        ),
    ],
)
def test_bounds_are_in_the_units_given(law: str, given: dict, other: dict) -> None:
    first, expected = fitted(law, (1.0, 1.0, 1.0), **given)
    params, values = fitted(law, (1.0, 100.0, 1.0), **other)
    np.testing.assert_allclose(values, expected, rtol=2e-6)
    for name, (low, high) in given.get("bounds", {}).items():
        assert ((first[name] > low * (1 - 1e-9)) & (first[name] < high * (1 + 1e-9))).all()
    for name, value in given.get("fixed", {}).items():
        np.testing.assert_allclose(first[name], value)
    for name, value in other.get("fixed", {}).items():
        np.testing.assert_allclose(params[name], value)


def test_a_measured_kernel_reads_its_times_at_rows() -> None:
    """Losses and weights may be in any unit, sizes only in rows: F is added to D^β."""
    kernel, exact = curves.with_kernel()
    losses = curves.noisy(exact, np.random.default_rng(0), 0.002)
    one = fit(curves.SIZES, losses, "lensllm", **kernel)
    other = fit(curves.SIZES, losses * 100, "lensllm", weights=np.full(14, 100.0), **kernel)
    assert other.predict(AHEAD) == pytest.approx(100 * one.predict(AHEAD), rel=1e-6)
    assert other.interval(AHEAD)[0] == pytest.approx(100 * one.interval(AHEAD)[0], rel=1e-5)
    assert one.params["t"] == pytest.approx(2.5, rel=0.1)
    for name, unit in (("B", 100), ("t", 1), ("beta", 1), ("E", 100)):
        assert other.params[name] == pytest.approx(unit * one.params[name], rel=1e-4)


@pytest.mark.parametrize("method", ["blend", *LAWS])
def test_a_selection_does_not_depend_on_units(method: str) -> None:
    results = []
    for size_unit, loss_unit in ((1.0, 1.0), FACTORS[:2]):
        sizes = curves.SIZES * size_unit
        table = LossTable(("a", "b", "c"), sizes, noisy_losses() * loss_unit, None)
        chosen = select(table, float(sizes[-1]), 32 * float(sizes[-1]), method)
        rows = chosen.to_frame().set_index("name").loc[list(table.names)]
        ratio = np.log(rows.high / rows.low)
        results.append((chosen.ranking, ratio, rows.predicted / loss_unit, rows.prob_best))
    assert results[0][0] == results[1][0]
    for first, second in zip(results[0][1:], results[1][1:], strict=True):
        np.testing.assert_allclose(second, first, rtol=2e-5, atol=1e-9)
