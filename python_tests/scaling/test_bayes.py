"""The hierarchical Bayes: against sums written out curve by curve, and honest on new curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from jachess_ext.scaling import Selection, fit, log_rmse, select
from jachess_ext.scaling.bayes import forecast, hierarchy
from jachess_ext.scaling.bayes.posterior import Posterior, _Model, posterior
from jachess_ext.scaling.bayes.residuals import Kriging
from jachess_ext.scaling.bayes.shapes import Shapes
from python_tests.scaling import tables

SIZES = 200.0 * 2.0 ** np.arange(6)
TARGET = 51200.0


def covariance(s: float, t: float, k: float, jump: float, j: np.ndarray) -> np.ndarray:
    """Entry by entry from the definition."""
    result = np.zeros((len(j), len(j)))
    for row, first in enumerate(j):
        for column, second in enumerate(j):
            a, b = min(first, second), max(first, second)
            result[row, column] = t**2 * a + k**2 * a**2 * (3 * b - a) / 6
            if row == column and row < len(j) - 1:
                result[row, column] += s**2
            if first >= jump and second >= jump:
                result[row, column] += 0.1**2
    return result


def flat_constant(j: np.ndarray, which: int) -> tuple[np.ndarray, float]:
    """Covariance `which` of the grid, and its prior probability."""
    places = [np.inf, *j[1:-1]]
    grid = [
        (s, t, k)
        for s in (0.003, 0.008, 0.02)
        for t in (0.0, 0.006, 0.02)
        for k in (0.005, 0.01, 0.02)
    ]
    triple, place = divmod(which, len(places))
    probability = 0.01 if place else 1 - 0.01 * (len(places) - 1)
    return covariance(*grid[triple], places[place], j), probability


@pytest.mark.parametrize("which", [0, 7, 53, 161])
def test_evidence_and_prediction_against_a_wide_constant(which: int) -> None:
    """A free constant is the limit of a wide Gaussian one, whose algebra scipy and numpy know."""
    j = np.log2(np.append(SIZES, TARGET) / SIZES[0])
    full, probability = flat_constant(j, which)
    wide = 100.0  # against variances below 1
    full = full + wide
    kriging = Kriging.at(SIZES, TARGET)
    generator = np.random.default_rng(which)
    r = 0.05 * generator.standard_normal(6).cumsum()
    normal = multivariate_normal(np.zeros(6), full[:-1, :-1])
    ours = kriging.log_weight[which] - 0.5 * r @ kriging.precision[which] @ r
    constant = -0.5 * (6 * np.log(2 * np.pi) + np.log(wide)) + np.log(probability)
    assert ours - np.log(probability) + constant == pytest.approx(
        normal.logpdf(r) + np.log(probability), abs=1e-3
    )
    gain = np.linalg.solve(full[:-1, :-1], full[:-1, -1])
    assert kriging.weights[which] @ r == pytest.approx(gain @ r, abs=1e-4)
    ahead = 0.01 * 3 * 0.1**2
    variance = full[-1, -1] - gain @ full[:-1, -1] + ahead
    assert kriging.variance[which] == pytest.approx(variance, abs=1e-5)


def test_there_is_nothing_more_in_the_grid() -> None:
    kriging = Kriging.at(SIZES, TARGET)
    assert len(kriging.variance) == 27 * 6
    np.testing.assert_allclose(kriging.weights.sum(-1), 1.0)


def test_shapes_are_rectified_laws() -> None:
    shapes = Shapes.at(SIZES, TARGET)
    for place in (3, 700, 1500):
        transition, beta = np.exp(shapes.theta[place, :2])
        share = shapes.theta[place, 2]
        d = np.append(SIZES, TARGET)
        falling = 1 / (1 + (d / transition) ** beta)
        floor = share / (1 - share) * falling[-2]
        loss = falling + floor
        assert floor / loss[-2] == pytest.approx(share)
        np.testing.assert_allclose(shapes.measured[place], np.log(loss[:-1]))
        assert shapes.target[place] == pytest.approx(np.log(loss[-1]))


def test_mixture_against_a_sum_over_every_component() -> None:
    shapes, kriging = Shapes.at(SIZES, TARGET), Kriging.at(SIZES, TARGET)
    keep = np.arange(0, len(shapes.target), 97)
    shapes = Shapes(shapes.theta[keep], shapes.measured[keep], shapes.target[keep])
    generator = np.random.default_rng(0)
    y = np.log(3.0) - 0.05 * np.arange(6) + 0.01 * generator.standard_normal((2, 6))
    log_prior = np.log(generator.dirichlet(np.ones(len(keep)), 2))
    model = _Model(y, shapes, kriging)
    model.evidence()
    found = model.predict(log_prior)
    for row in range(2):
        weight, mean, variance = [], [], []
        for k in range(len(kriging.variance)):
            for s in range(len(keep)):
                r = y[row] - shapes.measured[s]
                logs = kriging.log_weight[k] - 0.5 * r @ kriging.precision[k] @ r
                weight.append(np.exp(logs + log_prior[row, s] - 30))
                mean.append(shapes.target[s] + kriging.weights[k] @ r)
                variance.append(kriging.variance[k])
        p = np.array(weight) / np.sum(weight)
        expected = p @ np.array(mean)
        spread = p @ (np.array(variance) + (np.array(mean) - expected) ** 2)
        assert found.mean[row] == pytest.approx(expected, rel=1e-9)
        assert found.variance[row] == pytest.approx(spread, rel=1e-7)


def test_shared_prior_finds_the_population() -> None:
    """Curves that tell their shape exactly: the prior's mean and spread are theirs, shrunk by 5."""
    theta = Shapes.at(SIZES, TARGET).theta
    generator = np.random.default_rng(0)
    chosen = generator.choice(np.flatnonzero(theta[:, 1] > np.log(0.5)), 200)
    log_evidence = np.full((200, len(theta)), -1e4)
    log_evidence[np.arange(200), chosen] = 0.0
    x = np.stack([np.ones(200), np.linspace(-1, 1, 200)], -1)
    shapes = np.repeat(theta[None], 200, axis=0)
    logs = hierarchy.shared_prior(log_evidence, shapes, x)
    np.testing.assert_allclose(np.exp(logs).sum(-1), 1.0)
    mean = np.exp(logs) @ theta
    assert mean[:, 1].mean() == pytest.approx(theta[chosen, 1].mean(), abs=0.1)
    assert np.exp(logs[0])[theta[:, 1] < np.log(0.3)].sum() < 0.2  # the vague start has 0.5


def test_floors_are_shared_as_losses() -> None:
    """Two models of one floor and other losses: equal third features, E / median L(D_n)."""
    theta = np.array([[1.0, 2.0, 0.6], [3.0, 4.0, 0.3]])
    y = np.log([[9.0, 2.0], [9.0, 4.0], [9.0, 3.0]])
    found = hierarchy.features(theta, y)
    assert found[0, 0, 2] == pytest.approx(0.6 * 2 / 3)
    assert found[1, 1, 2] == pytest.approx(found[0, 0, 2])
    np.testing.assert_array_equal(found[:, :, :2], np.repeat(theta[None, :, :2], 3, axis=0))


def test_forecast_blends_and_widens() -> None:
    table, _ = tables.population(3, models=6)
    d, losses = table.trained[:7], table.trained_losses[:, :7]
    found = forecast(d, losses, 102400.0)
    mixture = posterior(np.log(losses), d, 102400.0)
    line = fit(d, losses, "ats", tau=1.0).predict(102400.0)
    location = (mixture.mean + np.log(line)) / 2
    np.testing.assert_allclose(found.location, location, rtol=1e-12)
    spread = mixture.variance + (mixture.mean - location) ** 2
    np.testing.assert_allclose(found.scale, np.sqrt(spread), rtol=1e-12)
    assert np.isinf(found.dof).all()


def test_a_common_factor_changes_nothing_but_itself() -> None:
    table, _ = tables.population(0, models=8)
    losses = table.trained_losses[:, :7]
    one = forecast(table.trained[:7], losses, 204800.0)
    ten = forecast(table.trained[:7], 10 * losses, 204800.0)
    np.testing.assert_allclose(ten.location, one.location + np.log(10), atol=1e-9)
    np.testing.assert_allclose(ten.scale, one.scale, rtol=1e-9)


@given(factor=st.floats(1e-2, 1e9))
@settings(max_examples=5, deadline=None)
def test_the_unit_of_sizes_does_not_matter(factor: float) -> None:
    table, _ = tables.population(0, models=4)
    d, losses = table.trained[:5], table.trained_losses[:, :5]
    one, other = forecast(d, losses, 51200.0), forecast(factor * d, losses, factor * 51200.0)
    np.testing.assert_allclose(other.location, one.location, atol=1e-8)
    np.testing.assert_allclose(other.scale, one.scale, rtol=1e-6)


def test_the_order_of_models_does_not_matter() -> None:
    table, _ = tables.population(1, models=7)
    order = np.random.default_rng(0).permutation(7)
    losses = table.trained_losses[:, :6]
    one = posterior(np.log(losses), table.trained[:6], 51200.0)
    other = posterior(np.log(losses[order]), table.trained[:6], 51200.0)
    np.testing.assert_allclose(other.mean, one.mean[order], rtol=1e-9)


def test_many_models_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = tables.population(2, models=5)
    y = np.log(table.trained_losses[:, :6])
    whole = posterior(y, table.trained[:6], 51200.0)
    monkeypatch.setattr("jachess_ext.scaling.bayes.posterior._CELLS", 50_000)
    parts = posterior(y, table.trained[:6], 51200.0)
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-10)
    np.testing.assert_allclose(parts.variance, whole.variance, rtol=1e-8)


def test_better_than_ats_on_curves_that_level_off() -> None:
    errors: dict[str, list[float]] = {"bayes": [], "ats": []}
    for seed in range(3):
        table, losses = tables.population(seed, noise=0.003)
        for method in ("bayes", "ats"):
            chosen = select(table, 25600, 1638400, method)
            errors[method].append(log_rmse(chosen.predicted_losses, losses[:, -1]))
    means = {name: np.mean(values) for name, values in errors.items()}
    assert means["bayes"] < means["ats"]


@pytest.fixture(scope="module")
def from_the_model() -> tuple[Posterior, np.ndarray]:
    """Posteriors of 350 curves drawn from the model itself, and their values at the target."""
    generator = np.random.default_rng(4)
    shapes = Shapes.at(SIZES, TARGET)
    away = (shapes.theta - [np.log(3e3), np.log(0.5), 0.3]) / [1.5, 0.3, 0.2]
    weight = np.exp(-0.5 * (away**2).sum(-1))
    shape = generator.choice(len(weight), 350, p=weight / weight.sum())
    j = np.log2(np.append(SIZES, TARGET) / SIZES[0])
    y = np.empty((350, 7))
    for row in range(350):
        full, _ = flat_constant(j, int(generator.integers(27)) * 6)
        y[row] = generator.multivariate_normal(np.zeros(7), full)
    y += np.append(shapes.measured, shapes.target[:, None], -1)[shape] + 1.0
    return posterior(y[:, :-1], SIZES, TARGET), y[:, -1]


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_posterior_covers_curves_of_the_model(
    level: float, from_the_model: tuple[Posterior, np.ndarray]
) -> None:
    """350 curves; tolerance: 3 points and one standard error of the share."""
    found, truth = from_the_model
    away = np.abs(truth - found.mean) / np.sqrt(found.variance)
    inside = np.mean(away < norm.ppf((1 + level) / 2))
    error = np.sqrt(level * (1 - level) / 350)
    assert inside == pytest.approx(level, abs=0.03 + error)


@pytest.fixture(scope="module")
def calibrated_on_half() -> list[tuple[Selection, np.ndarray, np.ndarray]]:
    """Selections of 40 models, half of them references; the others' rows and true losses."""
    result = []
    for seed in range(12):
        table, _ = tables.population(seed, models=40, bend=0.01)
        found = select(table, 12800, 204800, references=table.names[:20])
        result.append((found, np.arange(20, 40), table.losses_at(204800)))
    return result


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_calibrated_intervals_cover_held_out_models(
    level: float, calibrated_on_half: list[tuple[Selection, np.ndarray, np.ndarray]]
) -> None:
    """240 held-out models; tolerance: 3 points and one standard error of the share."""
    inside = []
    for found, rows, truth in calibrated_on_half:
        low, high = found.interval_ends(level)
        inside.append(((low <= truth) & (truth <= high))[rows])
    error = np.sqrt(level * (1 - level) / 240)
    assert np.mean(inside) == pytest.approx(level, abs=0.03 + error)


@pytest.mark.parametrize(
    ("sizes", "target", "words"),
    [([200.0, 400.0], 800.0, "3 sizes"), ([200.0, 400.0, 800.0], 800.0, "not above")],
)
def test_bad_input(sizes: list[float], target: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        forecast(np.array(sizes), np.ones((2, len(sizes))), target)
