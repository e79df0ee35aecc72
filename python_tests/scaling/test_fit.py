"""`fit`: parameters come back from noisy curves, intervals hold, scipy agrees; bad input."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares

from jachess_ext import ntk_loss
from jachess_ext.scaling import Transition, fit, laws
from python_tests.scaling import curves


def test_rounding_refuses_no_point_of_an_exact_line() -> None:
    for unit in (1.0, 1e-3, 0.37, 7.3):
        line = fit(curves.SIZES * unit, 30 * curves.SIZES**-0.2, "ats", tau=1e-3)
        assert line.dof + 2 == 13  # all but the smallest, as published


def test_no_curve_is_continued_faster_than_one_over_the_size() -> None:
    """Curves without a trend, that a steep fall right after the last size would fit best."""
    losses = curves.noisy(np.ones((60, 7)), np.random.default_rng(0), 0.2)
    fitted = fit(curves.SIZES[:7], losses, "rectified")
    last, ahead = np.asarray(fitted.predict(curves.SIZES[[6, 11]])).T
    assert (ahead > last / 32 * (1 - 1e-9)).all()


def test_wider_bounds_let_a_curve_fall_faster() -> None:
    losses = curves.rectified(curves.WITH_ZERO, 8e7, 4e7, 2.0, 0.3)
    bounded = fit(curves.WITH_ZERO, losses, "rectified")
    assert bounded.params["beta"] == pytest.approx(1.0)
    wide = fit(curves.WITH_ZERO, losses, "rectified", bounds={"beta": (0.01, 3.0)})
    assert wide.params["beta"] == pytest.approx(2.0, rel=1e-4)


def test_intervals_of_held_out_sizes_cover() -> None:
    """1,000 curves, 3 points of tolerance: two standard errors of the share are 3.2 and 1.9."""
    generator = np.random.default_rng(7)
    truth = curves.random_rectified(generator, 1000)
    clean = np.stack([curves.rectified(curves.WITH_ZERO, *row) for row in truth])
    losses = curves.noisy(clean, generator, 0.005)
    fitted = fit(curves.WITH_ZERO[:13], losses[:, :13], "rectified")
    for level in (0.5, 0.9):
        low, high = fitted.interval(curves.WITH_ZERO[-1], level)
        inside = (low <= losses[:, -1]) & (losses[:, -1] <= high)
        assert inside.mean() == pytest.approx(level, abs=0.03)


def test_parameter_intervals_cover() -> None:
    """In units in which B and D_l depend on beta; 400 curves, ± 1.5 points each."""
    unit = 1e-5
    generator = np.random.default_rng(9)
    truth = np.array(curves.random_rectified(generator, 400))
    clean = np.stack([curves.rectified(curves.WITH_ZERO, *row) for row in truth])
    losses = curves.noisy(clean, generator, 0.005)
    found = fit(curves.WITH_ZERO * unit, losses, "rectified").parameter_intervals(0.9)
    scale, shift, beta, floor = truth.T
    true = {"B": scale * unit**beta, "D_l": shift * unit**beta, "beta": beta, "E": floor}
    assert found.keys() == true.keys()
    for name, value in true.items():
        low, high = found[name]
        inside = (low <= value) & (value <= high)
        assert inside.mean() == pytest.approx(0.9, abs=0.05), name


@pytest.mark.parametrize(("noise", "count"), [(0.002, 6), (0.05, 30)])
def test_intervals_cover_whatever_the_noise(noise: float, count: int) -> None:
    """300 curves, ± 1.7 points each."""
    sizes = np.geomspace(200, 409600, count)
    clean = np.tile(curves.power(sizes, 30.0, 0.5, 0.5, 1.0), (300, 1))
    losses = curves.noisy(clean, np.random.default_rng(2), noise)
    found = fit(sizes, losses, "power", fixed={"alpha": 1.0})
    low, high = found.parameter_intervals(0.9)["beta"]
    inside = (low <= 0.5) & (high >= 0.5)
    if count == 30:  # of fewer residuals the median is low
        assert np.median(found.delta) == pytest.approx(1.345 * noise, rel=0.1)
    assert inside.mean() == pytest.approx(0.9, abs=0.06)


def test_intervals_of_a_floor_end_at_0() -> None:
    losses = curves.noisy(9 * curves.SIZES**-0.3, np.random.default_rng(3), 0.01)
    low, high = fit(curves.SIZES, losses, "rectified").parameter_intervals()["E"]
    assert low == 0 < high


def test_parameter_intervals_of_a_line() -> None:
    """In units in which the intercept is among the sizes."""
    unit = 5e-5
    losses = curves.noisy(
        np.tile(30 * curves.SIZES**-0.2, (300, 1)), np.random.default_rng(0), 0.05
    )
    intervals = fit(curves.SIZES * unit, losses, "ats", tau=1e6).parameter_intervals(0.9)
    for name, true in (("intercept", np.log(30 * unit**0.2)), ("slope", -0.2)):
        low, high = intervals[name]
        assert np.mean((low <= true) & (true <= high)) == pytest.approx(0.9, abs=0.04)


def test_fixed_parameters_have_no_interval() -> None:
    losses = curves.noisy(9 * curves.SIZES**-0.3, np.random.default_rng(3), 0.01)
    found = fit(curves.SIZES, losses, "power", fixed={"E": 0.0, "alpha": 1.0})
    assert list(found.parameter_intervals()) == ["B", "beta"]


def test_transition_interval_covers() -> None:
    generator = np.random.default_rng(8)
    truth = curves.random_rectified(generator, 600)
    clean = np.stack([curves.rectified(curves.WITH_ZERO, *row) for row in truth])
    found = fit(curves.WITH_ZERO, curves.noisy(clean, generator, 0.005), "rectified").transition
    true = np.array([shift ** (1 / beta) for _, shift, beta, _ in truth])
    inside = [t is not None and t.low <= d <= t.high for t, d in zip(found, true, strict=True)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("name", sorted(laws.LAWS.keys() - {"lensllm"}))
def test_as_good_as_scipy_from_many_starts(name: str) -> None:
    generator = np.random.default_rng(5)
    rows = curves.random_rectified(generator, 2 if name == "rectified" else 6)
    exact = np.stack([curves.rectified(curves.SIZES, *row) for row in rows])
    losses = curves.noisy(exact, generator, 0.01)
    fitted, parameters = fit(curves.SIZES, losses, name), laws.LAWS[name]().parameters
    written = laws.LAWS[name].formula.partition("= ")[2].replace("^", "**")
    formula = compile(written, name, "eval")

    def residual(u: np.ndarray, y: np.ndarray) -> np.ndarray:
        params = {p.name: p.value(v) for p, v in zip(parameters, u, strict=True)}
        return np.log(eval(formula, {"D": curves.SIZES, **params})) - y

    low = [np.log(p.low) if p.is_log else max(p.low, 1e-12) for p in parameters]
    high = [np.log(p.high) if p.is_log else p.high for p in parameters]
    scales = [(1, 150) if p.name == "B" else (0.2, 0.9) for p in parameters]
    for row, y in enumerate(np.log(losses)):
        costs = []
        for _ in range(6):
            start = [generator.uniform(*ends) for ends in scales]
            start = [np.log(x) if p.is_log else x for x, p in zip(start, parameters, strict=True)]
            huber: dict[str, Any] = {"loss": "huber", "f_scale": fitted.delta[row]}
            costs.append(
                least_squares(residual, start, args=(y,), bounds=(low, high), **huber).cost
            )
        assert fitted.objective[row] <= min(costs) * (1 + 1e-4)


def test_measured_kernel_end_to_end() -> None:
    """Losses made from Eq. 9 and 10 with a known Θ: B, β, E and the stretch of t come back."""
    given_, losses = curves.with_kernel()
    theta, residual = given_["theta"], given_["residual"]
    found = fit(curves.SIZES, losses, "lensllm", **given_)
    assert found.params["t"] == pytest.approx(2.5, rel=0.02)
    assert found.params["B"] == pytest.approx(40.0, rel=0.02)
    assert found.params["beta"] == pytest.approx(0.4, rel=0.01)
    assert found.params["E"] == pytest.approx(0.7, rel=0.02)
    np.testing.assert_allclose(found.predict(curves.SIZES), losses, rtol=1e-4)
    transition = found.transition
    assert transition is not None
    time = torch.tensor([found.params["t"] * transition.size / 400])
    there = ntk_loss(theta, residual, time, 0.02).item()
    assert there == pytest.approx(transition.size ** found.params["beta"], rel=1e-6)
    assert transition.low < transition.size < transition.high < 1.5 * transition.size
    per_size = given_ | {"theta": [theta] * 14, "residual": [residual] * 14}
    again = fit(curves.SIZES, losses, "lensllm", **per_size)
    assert again.params["t"] == pytest.approx(found.params["t"])


PLOTTED: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    ("ats", {}),
    ("lensllm", {"theta": torch.eye(2), "residual": torch.ones(2), "t": curves.SIZES, "lr": 1e-6}),
]


@pytest.mark.parametrize("law, how", PLOTTED)
def test_the_plot_shows_points_curves_and_intervals(
    law: str | None, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = np.stack([30 * curves.SIZES**-0.3 + 0.4, 50 * curves.SIZES**-0.2 + 0.2])
    losses *= np.exp(0.01 * np.random.default_rng(0).standard_normal(losses.shape))
    losses = losses[0] if law == "lensllm" else losses
    fitted = fit(curves.SIZES, losses, law, **how)
    axes = fitted.plot(level=0.5)
    lines = [line.get_xydata() for line in axes.get_lines()]
    points = np.concatenate([line[:, 1] for line in lines[1::2]])
    np.testing.assert_array_equal(points, losses.flatten())
    for row, (x, low, high) in enumerate(_bands(axes)):
        curve = lines[2 * row]
        np.testing.assert_allclose(curve[:, 0], x)
        expected = np.atleast_2d(fitted.predict(curve[:, 0]))[row]
        np.testing.assert_allclose(curve[:, 1], expected)
        ends = [np.atleast_2d(end)[row] for end in fitted.interval(x, 0.5)]
        np.testing.assert_allclose([low, high], ends)
    assert fitted.plot(axes) is axes


def _bands(axes: Any) -> list[tuple[Any, Any, Any]]:
    """Return x and both edges of every band that is drawn."""
    bands = []
    for band in axes.collections:
        edge = band.get_paths()[0].vertices
        half = (len(edge) - 3) // 2
        low, high = edge[1 : half + 1], edge[half + 2 : -1][::-1]
        bands.append((low[:, 0], low[:, 1], high[:, 1]))
    assert bands
    return bands


def test_a_fit_without_width_is_drawn_without_intervals() -> None:
    fitted = fit(curves.SIZES[:4], 30 * curves.SIZES[:4] ** -0.3 + 0.4, "rectified")
    axes = fitted.plot()
    assert len(axes.get_lines()) == 2 and not axes.collections


def test_fixed_bounded_and_weighted() -> None:
    losses = curves.rectified(curves.WITH_ZERO, 90.0, 30.0, 0.4, 0.5)
    fixed = fit(curves.WITH_ZERO, losses, "rectified", fixed={"E": 0.5})
    bounded = fit(curves.WITH_ZERO, losses, "rectified", bounds={"beta": (0.45, 1)})
    assert fixed.params["beta"] == pytest.approx(0.4) and bounded.params["beta"] == 0.45
    spoiled = losses.copy()
    spoiled[3] = 77.0
    weights = np.ones(15)
    weights[3] = 0.0
    kept = fit(curves.WITH_ZERO, spoiled, "rectified", weights=weights)
    assert kept.params["beta"] == pytest.approx(0.4, rel=1e-3)
    spoiled[3] = np.nan
    with warnings.catch_warnings(action="error"):  # a starting point that is no number
        fit(curves.WITH_ZERO, 10 * losses, "rectified", weights=weights)
    assert fit(curves.WITH_ZERO, spoiled, "rectified", weights=weights).params == kept.params


def falling(generator: np.random.Generator, count: int, sizes: np.ndarray) -> np.ndarray:
    """Power laws from the first size on, down to a floor."""
    scale, beta, floor = generator.uniform([0.5, 0.15, 0.0], [4.0, 0.7, 0.8], (count, 3)).T
    return scale[:, None] * (sizes / sizes[0]) ** -beta[:, None] + floor[:, None]


def test_no_transition_is_named_where_none_is_seen() -> None:
    """Seen in 97 % of the curves that have one well inside the sizes, in 2 % of those without."""
    generator, sizes = np.random.default_rng(9), curves.SIZES[:10]
    without = fit(sizes, curves.noisy(falling(generator, 100, sizes), generator, 0.01), "rectified")
    assert np.mean([each is not None for each in without.transition]) <= 0.05
    truth = curves.random_rectified(generator, 100)
    clean = np.stack([curves.rectified(curves.SIZES, *row) for row in truth])
    found = fit(curves.SIZES, curves.noisy(clean, generator, 0.01), "rectified").transition
    seen = [each for each in found if each is not None]
    assert len(seen) >= 95
    assert all(200 < each.low < each.size < each.high < curves.SIZES[-1] for each in seen)


def test_a_transition_is_placed_within_the_sizes_or_not_at_all() -> None:
    losses = curves.rectified(curves.SIZES, 90.0, 30.0, 0.4, 0.5)  # D* is 4930
    losses = curves.noisy(losses, np.random.default_rng(0), 0.002)
    whole = fit(curves.SIZES, losses, "rectified")
    assert curves.SIZES[0] < whole.transition.low < whole.transition.size < whole.transition.high
    assert fit(curves.SIZES[6:], losses[6:], "rectified").transition is None
    assert fit(curves.SIZES[:4], losses[:4], "rectified").transition is None, "without a width"


def by_hand(sizes: np.ndarray, losses: np.ndarray, law: str, cuts: range) -> float:
    """Return the median |ln error| of forecasts from the first k sizes."""
    errors = []
    for k in cuts:
        forecast = np.asarray(fit(sizes[:k], losses[..., :k], law).predict(sizes[k:]))
        errors.append(np.abs(np.log(forecast) - np.log(losses[..., k:])).ravel())
    return float(np.median(np.concatenate(errors)))


def test_without_a_law_the_one_that_forecasts_best() -> None:
    generator, sizes = np.random.default_rng(4), curves.SIZES[:12]
    rows = curves.random_rectified(generator, 4)
    bent = curves.noisy(np.stack([curves.rectified(sizes, *r) for r in rows]), generator, 0.003)
    straight = 30 * sizes**-0.2
    line, law = fit(sizes, straight), fit(sizes, bent)
    assert (line.law, law.law) == ("ats", "rectified")
    assert isinstance(line.predict(1e6), float) and np.shape(law.predict(1e6)) == (4,)
    for found, losses in ((line, straight), (law, bent)):
        assert set(found.backtest) == {"ats", "power", "rectified"}
        assert found.backtest[found.law] <= min(found.backtest.values()) + 1e-9
        for name in {"ats", found.law}:
            expected = by_hand(sizes, losses, name, range(6, 12))
            assert found.backtest[name] == pytest.approx(expected, abs=1e-6)
        named = fit(sizes, losses, found.law)
        np.testing.assert_allclose(found.predict(1e6), named.predict(1e6))
        assert named.backtest == {}


def test_with_few_sizes_a_line() -> None:
    sizes, losses = [100, 200, 400, 800, 1600], [3.0, 2.5, 2.1, 1.8, 1.6]
    for count in (2, 5):
        found = fit(sizes[:count], losses[:count])
        assert found.law == "ats" and found.backtest == {}
    assert fit([0, *sizes], [9.0, *losses]).predict(3200) == fit(sizes, losses).predict(3200)
    assert set(fit([*sizes, 3200], [*losses, 1.5]).backtest) == {"ats", "power", "rectified"}


def test_without_a_law_zero_and_weights_are_for_those_that_read_them() -> None:
    generator = np.random.default_rng(0)
    losses = curves.noisy(curves.rectified(curves.WITH_ZERO, 90, 30, 0.4, 0.5), generator, 0.002)
    found = fit(curves.WITH_ZERO, losses)
    assert found.law == "rectified" and "power" in found.backtest
    zero = fit(curves.WITH_ZERO, losses, "rectified")
    assert found.predict(1e7) == pytest.approx(zero.predict(1e7))
    spoiled, weights = losses.copy(), np.ones(15)
    spoiled[[3, 13]], weights[[3, 13]] = np.nan, 0.0
    kept = fit(curves.WITH_ZERO, spoiled, weights=weights)
    assert set(kept.backtest) == {"power", "rectified"}
    assert kept.predict(1e7) == pytest.approx(found.predict(1e7), rel=0.02)


def test_without_a_law_a_measured_kernel_is_judged_too() -> None:
    kernel, losses = curves.with_kernel()
    found = fit(curves.SIZES, losses, **kernel | {"theta": [kernel["theta"]] * 14})
    assert found.law == "lensllm" and "t" in found.params
    assert found.backtest["lensllm"] < 1e-5 < found.backtest["rectified"]


def test_shapes() -> None:
    many = curves.noisy(
        np.stack([curves.rectified(curves.SIZES, 90.0, 30.0, 0.4, 0.5)] * 3),
        np.random.default_rng(0),
        0.01,
    )
    one, three = (fit(curves.SIZES, losses, "rectified") for losses in (many[0], many))
    assert isinstance(one.predict(1e6), float) and isinstance(one.interval(1e6)[0], float)
    assert np.shape(one.predict([1e6, 2e6])) == (2,) == np.shape(one.interval([1e6, 2e6])[1])
    assert np.shape(three.predict(1e6)) == (3,) and np.shape(three.predict([1e6, 2e6])) == (3, 2)
    np.testing.assert_allclose(three.predict(1e6)[0], one.predict(1e6), rtol=1e-6)
    assert isinstance(one.transition.size, float)
    assert [type(each) for each in three.transition] == [Transition] * 3
    assert fit(curves.SIZES, many[0], "power").transition is None
    assert fit(curves.SIZES, many, "power").transition == [None] * 3


BAD = [
    ({"losses": [3.0, 2.0, -1.0, 1.0, 0.9]}, "size 400 is -1; expected a positive"),
    ({"losses": [3.0, 2.0, 1.0]}, r"shape \[5\] and losses \[3\]"),
    ({"sizes": [100, 200, 200, 400, 800]}, "sizes must increase strictly .*; 200 does not"),
    ({"sizes": [-1, 200, 300, 400, 800]}, "; -1 does not"),
    ({"sizes": [100, 200, 400], "losses": [3.0, 2.0, 1.5]}, "4 free parameters and there are 3"),
    ({"sizes": [100, 200, np.nan, 400, 800]}, "; nan does not"),
    ({"law": "cubic"}, "unknown law 'cubic'"),
    ({"sizes": [0, 200, 300, 400, 800], "law": "power"}, "no value at size 0"),
    ({"fixed": {"gamma": 1.0}}, "no parameter 'gamma'"),
    ({"fixed": {"B": -1.0}}, "B is to lie in"),
    ({"bounds": {"beta": (2.0, 1.0)}}, "the lower first"),
    ({"theta": torch.eye(2)}, "a measured F needs theta, .* there are theta and 1 c"),
    ({"law": "rectified", "lr": 0.1}, "has no kernel"),
    ({"weights": [1, 1, 1]}, "weights has shape"),
    ({"law": "ats", "gamma": 2}, "gamma is 2"),
    ({"law": "ats", "tau": 0.0}, "tau is 0.0"),
    ({"law": None, "fixed": {"E": 0.5}}, "fixed and bounds are for one law; name it"),
    ({"law": "ats", "weights": [1, 1, 1, 1, 2]}, "the ats law takes no weights"),
    ({"law": "ats", "fixed": {"slope": -0.5}}, "fixed and bounds are for one law"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_input_is_one_sentence(change: dict, words: str) -> None:
    given_ = {"sizes": [100, 200, 400, 800, 1600], "losses": [3.0, 2.5, 2.0, 1.5, 1.2]} | change
    with pytest.raises(ValueError, match=words):
        fit(**({"law": "lensllm"} | given_))


@pytest.mark.parametrize("law", ["power", "ats"])
def test_a_law_without_a_value_at_0_has_no_interval_there(law: str) -> None:
    fitted = fit(
        curves.SIZES, curves.noisy(curves.SIZES**-0.3, np.random.default_rng(0), 0.01), law
    )
    for question in (fitted.predict, fitted.interval):
        with pytest.raises(ValueError, match="no value at size 0"):
            question(0.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: f.predict(-1.0), "from 0 up"),
        (
            lambda f: fit(curves.SIZES, curves.SIZES**-0.3, "ats").interval(1e6, 1.5),
            "between 0 and 1",
        ),
        (lambda f: f.interval(1e6), "nothing tells the noise"),
    ],
)
def test_bad_questions(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call(fit([100, 200, 400, 800], [3.0, 2.5, 2.1, 1.8], "rectified"))
