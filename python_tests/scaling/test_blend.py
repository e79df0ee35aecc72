"""The hierarchical model: against sums written out curve by curve, and honest on new curves."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import Polynomial
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.special import expit, logsumexp, softmax
from scipy.stats import invgamma, multivariate_normal, norm
from scipy.stats import t as student

from jachess_ext.scaling import LossTable, blend, select
from jachess_ext.scaling.blend import (
    NOISE_PATTERNS,
    Kriging,
    Posterior,
    Process,
    Shapes,
    backtests,
    forecasts,
    posteriors,
    residual_squares,
)
from python_tests.scaling import tables

SIZES = 200.0 * 2.0 ** np.arange(6)
TARGET = 51200.0
AWAY = np.log2(np.append(SIZES, TARGET) / SIZES[-1])
TRANSITIONS, EXPONENTS = np.arange(-9, 9.1, 1.5), np.geomspace(0.06, 1.6, 8)
FLOORS = [0, 0.18, 0.36, 0.54, 0.72, 0.9]
SPREAD = np.diag([16.0, 0.25, 0.09])
SCALES = 0.002 * 150 ** (np.arange(12) / 11)


def covariance(
    s: float, t: float, k: float, away: np.ndarray = AWAY, points: int = 6
) -> np.ndarray:
    """Entry by entry: walks that begin at the last size and go both ways."""
    result = np.zeros((len(away), len(away)))
    for row, first in enumerate(away):
        for column, second in enumerate(away):
            result[row, column] = k**2 * first * second
            if first * second > 0:
                a, b = sorted((abs(first), abs(second)))
                result[row, column] += t**2 * a + k**2 * a**2 * (3 * b - a) / 6
            if row == column and row < points:
                result[row, column] += s**2
    return result


@pytest.mark.parametrize("which", range(0, len(NOISE_PATTERNS), 3))
def test_evidence_and_prediction_against_a_wide_constant(which: int) -> None:
    """A free constant is the limit of a wide Gaussian one, whose algebra scipy and numpy know."""
    wide = 1e6  # against variances below 100
    full = covariance(*NOISE_PATTERNS[which]) + wide
    kriging = Kriging.patterns(SIZES, np.array([TARGET]))
    r = np.random.default_rng(which).standard_normal(6).cumsum()
    normal = multivariate_normal(np.zeros(6), full[:-1, :-1])
    ours = kriging.log_weight[which] - 0.5 * r @ kriging.precision[which] @ r
    constant = -0.5 * (6 * np.log(2 * np.pi) + np.log(wide))
    assert ours + constant == pytest.approx(normal.logpdf(r), abs=1e-3)
    gain = np.linalg.solve(full[:-1, :-1], full[:-1, -1])
    assert kriging.weights[which, 0] @ r == pytest.approx(gain @ r, abs=1e-3)
    variance = full[-1, -1] - gain @ full[:-1, -1]
    assert kriging.variance[which, 0] == pytest.approx(variance, rel=1e-3)


def test_the_walk_is_one_simulated() -> None:
    """The covariance of a drifting slope, from walks in steps of a hundredth of a doubling."""
    generator = np.random.default_rng(0)
    step, draws = 0.01, 4000
    slope = generator.standard_normal((draws, 1))
    sides = []
    for count in (500, 300):  # five doublings back, three ahead
        walk = np.cumsum(generator.standard_normal((draws, count)) * np.sqrt(step), -1)
        sides.append(np.cumsum(walk * step, -1)[:, 99::100])
    back, ahead = sides
    values = np.concatenate([back[:, ::-1], np.zeros((draws, 1)), ahead[:, -1:]], -1)
    values += slope * AWAY
    expected = covariance(0.0, 0.0, 1.0)
    error = np.sqrt((expected**2 + np.outer(*[np.diag(expected)] * 2)) / draws)
    assert (np.abs(values.T @ values / draws - expected) <= 4 * error + 0.05 * abs(expected)).all()


def few_shapes() -> Shapes:
    shapes = Shapes.grid(SIZES, np.array([TARGET]))
    keep = np.arange(0, len(shapes.theta), 61)
    return Shapes(shapes.theta[keep], shapes.measured[keep], shapes.targets[:, keep])


def test_marginal_against_an_integral_over_scales() -> None:
    shapes, kriging = few_shapes(), Kriging.patterns(SIZES, np.array([TARGET]))
    y = np.log(3.0) - 0.05 * np.arange(6) + 0.01 * np.random.default_rng(0).standard_normal((2, 6))
    (squares,) = residual_squares(y, shapes, kriging)
    scale, a = 0.013, blend.GAMMA_SHAPE
    found = blend.log_marginal_likelihood(squares, kriging.log_weight, 6, scale)
    prior = invgamma(a, scale=a * scale**2)

    def evidence(k: int, i: int, s: int) -> float:
        r = y[i] - shapes.measured[s]
        q = r @ kriging.precision[k] @ r
        assert squares[k, i, s] == pytest.approx(q, rel=1e-6)

        def density(log_v: float) -> float:
            v = np.exp(log_v)
            return v * prior.pdf(v) * np.exp(-2.5 * log_v - q / (2 * v) - 20)

        total = quad(density, -20, 8, limit=400, points=[-12, -9, -6, -3])[0]
        return np.log(total) + 20 + kriging.log_weight[k]

    places = [(0, 0, 0), (4, 1, 5), (8, 0, 9)]
    ours = [found[place] for place in places]
    theirs = [evidence(*place) for place in places]
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=1e-6)


def plain_posteriors(y: np.ndarray, targets: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The model as it is written down: a curve, a pattern and a step at a time."""
    theta = np.array([(t, b, f) for t in TRANSITIONS for b in np.log(EXPONENTS) for f in FLOORS])
    d, models, points = np.append(SIZES, targets), len(y), len(SIZES)
    h = 1 / (1 + (d / d[5] / np.exp(theta[:, :1])) ** np.exp(theta[:, 1:2]))
    g = np.log((1 - theta[:, 2:]) * h / h[:, 5:6] + theta[:, 2:])  # of L / L(D_n)
    a, power = 2.0, 2.0 + (points - 1) / 2
    q, log_norm, ahead = np.empty((9, models, len(g))), np.empty(9), []
    for k, pattern in enumerate(NOISE_PATTERNS):
        full = covariance(*pattern, np.log2(d / d[5]), points)
        measured, cross = full[:points, :points], full[:points, points:]
        one = np.ones(points)
        flat = one @ np.linalg.solve(measured, one)
        log_norm[k] = -0.5 * np.log(np.linalg.det(measured) * flat)
        gain = np.linalg.solve(measured, cross)
        short = 1 - one @ gain
        variance = np.diag(full)[points:] - (cross * gain).sum(0) + short**2 / flat
        for i in range(models):
            r = y[i] - g[:, :points]
            constant = r @ np.linalg.solve(measured, one) / flat
            r -= constant[:, None]
            q[k, i] = (r * np.linalg.solve(measured, r.T).T).sum(-1)
            ahead.append((g[:, points:] + constant[:, None] + r @ gain, variance))
    start = np.array([0.0, np.log(0.4), 0.4])
    vague = multivariate_normal(start, SPREAD).logpdf(theta)

    def evidence(scale: float) -> np.ndarray:
        b = a * scale**2
        return a * np.log(b) + log_norm[:, None, None] - power * np.log(b + q / 2)

    logs = np.array([logsumexp(evidence(s) + vague, (0, 2)).sum() for s in SCALES])
    scale = np.exp(softmax(logs) @ np.log(SCALES))
    of_pattern = logsumexp(evidence(scale) + vague, 2)
    share = np.full(9, 1 / 9)
    for _ in range(12):
        counts = softmax(of_pattern + np.log(share)[:, None], 0).sum(1)
        share = (counts + 5 / 9) / (models + 5)
    logs = evidence(scale) + np.log(share)[:, None, None]
    of_shape = logsumexp(logs, 0)
    level = y[:, -5:].mean(1)
    x = np.stack([np.ones(models), level - level.mean()], 1)
    last = np.exp(y[:, -1])
    features = [theta * [1, 1, of / np.median(last)] for of in last]
    c, spread = np.stack([start, np.zeros(3)]), SPREAD
    for _ in range(13):
        normal = [multivariate_normal(m, spread) for m in x @ c]
        prior = np.stack([n.logpdf(f) for n, f in zip(normal, features, strict=True)])
        weights = softmax(of_shape + prior, 1)
        means = np.stack([w @ f for w, f in zip(weights, features, strict=True)])
        c = np.linalg.solve(x.T @ x + 10 * np.eye(2), x.T @ means + [10 * start, np.zeros(3)])
        off = [f - m for f, m in zip(features, x @ c, strict=True)]
        scatter = sum(np.cov(o.T, aweights=w, ddof=0) for o, w in zip(off, weights, strict=True))
        scatter += sum(np.outer(w @ o, w @ o) for o, w in zip(off, weights, strict=True))
        spread = (10 * SPREAD + scatter) / (10 + models)
    results = []
    for i in range(models):
        w = softmax(logs[:, i] + prior[i])[..., None]
        values = np.stack([ahead[k * models + i][0] for k in range(9)])
        mean = (w * values).sum((0, 1))
        squares = (a * scale**2 + q[:, i, :, None] / 2) / (power - 1)
        widths = squares * np.stack([ahead[k * models + i][1] for k in range(9)])[:, None]
        results.append((mean, (w * (widths + (values - mean) ** 2)).sum((0, 1))))
    return tuple(np.moveaxis(np.array(results), 0, -1))


@pytest.mark.parametrize("models", [1, 11])  # of blocks of 8 curves
def test_posteriors_against_the_model_written_down(models: int) -> None:
    table, _ = tables.population(3, models=models)
    y, targets = np.log(table.trained_losses[:, :6]), [12800.0, 51200.0, 1638400.0]
    np.testing.assert_array_equal(table.trained[:6], SIZES)
    mean, variance = plain_posteriors(y, targets)
    ours = posteriors(y, SIZES, np.array(targets))
    np.testing.assert_allclose([of.mean for of in ours], mean, rtol=1e-9)
    np.testing.assert_allclose([of.variance for of in ours], variance, rtol=1e-9)


def test_memory_grows_by_the_row() -> None:
    """300 curves more need a few arrays [300, s] of memory, and none [k, 300, s]."""
    peaks = []
    for models in (100, 400):
        y = np.log(np.random.default_rng(0).lognormal(0.0, 0.1, (models, 6)))
        tracemalloc.start()
        posteriors(y, SIZES, np.array([TARGET, 2 * TARGET]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 300 * 624 * 8 * 5


def share_by_least_squares(y: np.ndarray, sizes: np.ndarray) -> float:
    """The share of the last losses as a weighted regression, the prior as two rows more."""
    rows = [(1.0, 0.9)] * 2  # (regressor, response)
    for known in range(3, len(sizes)):
        for later in range(known, len(sizes)):
            (seen,) = posteriors(y[:, :known], sizes[:known], [sizes[later]])
            ahead, now, truth = seen.mean, y[:, known - 1], y[:, later]
            models = len(y)
            middle = np.eye(models) - 1 / models
            error, gap = middle @ (truth - ahead), middle @ (now - ahead)
            scale = np.sqrt((error @ error + (error - gap) @ (error - gap)) / models)
            rows += zip(gap / scale, error / scale, strict=True)
    regressor, response = np.array(rows).T
    return float(np.clip(np.linalg.lstsq(regressor[:, None], response, rcond=None)[0][0], 0, 1))


def trust_by_densities(y: np.ndarray, sizes: np.ndarray, share: float) -> float:
    """The trust in the process, by scipy's densities of the differences in each backtest."""
    gains, starts = [], len(sizes) - 3
    for count in range(3, len(sizes)):
        process = Process.fit(y[:, :count], sizes[:count])
        for later in range(count, len(sizes)):
            at = np.array([sizes[later]])
            (ours,) = posteriors(y[:, :count], sizes[:count], at)
            (mean,), (deviation,) = process.predict(y[:, :count], sizes[:count], at)
            truth, last = y[:, later] - y[:, later].mean(), y[:, count - 1] - y[:, count - 1].mean()
            choice = (1 - share) * (ours.mean - ours.mean.mean()) + share * last
            deviations = np.sqrt(ours.variance)
            scales = 0.6 * deviations**0.75 * np.prod(deviations) ** (0.1 / len(y))
            falls = y[:, count - 1] - ours.mean
            width = np.sqrt((0.55 * np.median(scales)) ** 2 + 1.3**2 * np.var(falls))
            gain = norm.logpdf(truth, mean - mean.mean(), deviation)
            gain -= norm.logpdf(truth, choice, width)
            gains.append(max(-1.0, min(1.0, gain.mean())))
    return float(expit(-3 + 4 * starts * np.mean(gains)))


def test_differences_are_drawn_to_the_last_losses_as_backtests_say() -> None:
    table, _ = tables.population(4, models=6)
    d, y = table.trained[:7], np.log(table.trained_losses[:, :7])
    found = select(table, d[-1], 102400.0)
    (alone,) = posteriors(y, d, [102400.0])
    share = share_by_least_squares(y, d)
    assert 0.02 < share < 0.98
    trust = trust_by_densities(y, d, share)
    assert 0.001 < trust < 0.999
    (mean,), (deviation,) = Process.fit(y, d).predict(y, d, np.array([102400.0]))
    choice = np.log(found.scores)
    assert choice.mean() == pytest.approx(alone.mean.mean())
    pull = (1 - share) * np.diff(alone.mean) + share * np.diff(y[:, -1])
    pull = (1 - trust) * pull + trust * np.diff(mean)
    np.testing.assert_allclose(np.diff(choice), pull, rtol=1e-6)
    fall = y[:, -1] - alone.mean
    forecast = np.log(found.predicted_losses)
    doubt = 0.1 * 6 * alone.variance / alone.variance.sum()
    assert doubt.max() > 2 * doubt.min()
    np.testing.assert_allclose(forecast, y[:, -1] - fall - doubt * (fall.mean() - fall), rtol=1e-9)
    deviation = np.sqrt(alone.variance)
    scale = 0.6 * deviation**0.75 * np.prod(deviation) ** (0.1 / 6)
    for level in (0.5, 0.9):
        width = student.ppf((1 + level) / 2, 3) * scale
        low, high = found.interval_ends(level)
        np.testing.assert_allclose(np.log(low), forecast - width, rtol=1e-9)
        np.testing.assert_allclose(np.log(high), forecast + width, rtol=1e-9)
    own = np.hypot(0.55 * np.median(scale), 1.3 * np.std(fall))
    random = np.random.default_rng(0)
    width = np.where(random.random((200_000, 1)) < trust, deviation, own)
    draws = choice + width * random.standard_normal((200_000, 6))
    shares = 0.9 * np.bincount(draws.argmin(1), minlength=6) / 200_000 + 0.1 / 6
    np.testing.assert_allclose(found.best_probabilities, shares, atol=0.005)


def test_without_backtests_nine_tenths_are_the_last_losses() -> None:
    """Two curves about to cross, seen at three sizes: the flat one is ahead, and stays so."""
    d = 200.0 * 2.0 ** np.arange(7)
    steep, flat = 2.0 * (d / d[-1]) ** -0.10, 1.96 * (d / d[-1]) ** -0.09
    table = LossTable(("steep", "flat", "far"), d, np.stack([steep, flat, 1.5 * flat]), None)
    few = replace(table, sizes=d[-3:], losses=table.losses[:, -3:])
    assert blend.last_loss_weight(backtests(np.log(few.losses), few.sizes)) == 0.9
    assert select(few, d[-1], 102400.0).ranking == ["flat", "steep", "far"]
    whole = select(table, d[-1], 102400.0)
    assert (
        blend.last_loss_weight(backtests(np.log(table.losses), d)) < 0.5
    )  # straight lines have been foreseen
    assert whole.names[whole.best_probabilities.argmax()] == whole.ranking[0]


def test_equal_curves_leave_the_prior() -> None:
    y = np.log(np.full((3, 5), 2.0))
    assert blend.last_loss_weight(backtests(y, SIZES[:5])) == 0.9


def test_a_doubtful_forecast_goes_no_further_than_the_mean_fall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One variance of 12 curves far above the others' is 12 times the mean: a weight of 1.2."""
    variance = np.full(12, 1e-9)
    variance[4] = 1.0
    mean = np.linspace(-2.0, -1.0, 12)
    found = [Posterior(mean, variance)]
    monkeypatch.setattr(blend, "posteriors", lambda *_: found)
    monkeypatch.setattr(blend, "backtests", lambda *_: [])
    monkeypatch.setattr(blend, "last_loss_weight", lambda *_: 0.0)
    monkeypatch.setattr(blend, "trust_in_process", lambda *_: 0.0)
    losses = np.exp(np.random.default_rng(0).normal(0.0, 0.2, (12, 6)))
    (blend_forecast,) = forecasts(SIZES, losses, [TARGET])
    predictive, choice, fall = blend_forecast.predictive, blend_forecast.choice, blend_forecast.fall
    last = np.log(losses[:, -1])
    assert predictive.location[4] == pytest.approx(last[4] - (last - mean).mean(), rel=1e-12)
    np.testing.assert_allclose(np.delete(predictive.location - mean, 4), 0, atol=1e-6)
    np.testing.assert_array_equal(choice, mean)
    np.testing.assert_array_equal(fall, last - mean)


def test_a_smaller_subset_that_fits_moves_little() -> None:
    """Curves on the grid's own shapes: their first subset tells nothing that the others do not."""
    shapes = Shapes.grid(SIZES, np.array([TARGET]))
    y = shapes.measured[[200, 250, 330, 400]] + 1.0
    whole, less = posteriors(y, SIZES, [TARGET])[0], posteriors(y[:, 1:], SIZES[1:], [TARGET])[0]
    np.testing.assert_allclose(less.mean, whole.mean, atol=0.25 * np.sqrt(less.variance).max())


def test_a_common_factor_changes_nothing_but_itself() -> None:
    table, _ = tables.population(0, models=8)
    losses = table.trained_losses[:, :7]
    (one,) = forecasts(table.trained[:7], losses, [204800.0])
    (ten,) = forecasts(table.trained[:7], 10 * losses, [204800.0])
    location = one.predictive.location + np.log(10)
    np.testing.assert_allclose(ten.predictive.location, location, atol=1e-9)
    np.testing.assert_allclose(ten.predictive.scale, one.predictive.scale, rtol=1e-9)
    np.testing.assert_allclose(ten.choice, one.choice + np.log(10), atol=1e-6)
    np.testing.assert_allclose(ten.deviation, one.deviation, rtol=1e-6)


# The process ------------------------------------------------------------------------------------


def plain_covariance(u: np.ndarray, line: float, bend: float, noise: float) -> np.ndarray:
    """Of the process at doublings u from the largest size, an entry at a time, without a level."""
    result = np.zeros((len(u), len(u)))
    for i, one in enumerate(u):
        for j, two in enumerate(u):
            result[i, j] = line**2 * one * two + noise**2 * (i == j)
            if one * two > 0:  # the slope's walk, integrated twice: ∫ (|one| − v)(|two| − v) dv
                least, most = sorted((abs(one), abs(two)))
                walk = Polynomial([least * most, -least - most, 1.0]).integ()
                result[i, j] += bend**2 * walk(least)
    return result


def plain_density(logs: np.ndarray, slope: float, y: np.ndarray, u: np.ndarray) -> float:
    """ln of the posterior density of the process's numbers, by scipy, up to a constant.

    A free constant is left out by the differences from a curve's mean, in an orthonormal basis.
    """
    basis = np.linalg.svd(np.ones((1, len(u))))[2][1:]
    covariance = basis @ plain_covariance(u, *np.exp(logs)) @ basis.T
    differences = (y - slope * u) @ basis.T
    of_curves = multivariate_normal.logpdf(differences, np.zeros(len(basis)), covariance).sum()
    prior = norm.logpdf(logs, np.log([0.06, 0.02, 0.02]), 1).sum() + norm.logpdf(slope, -0.1, 0.15)
    return float(of_curves + prior)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_process_has_the_most_probable_numbers(seed: int) -> None:
    table, _ = tables.population(seed, models=3 + 2 * seed)
    d, y = table.trained[:6], np.log(table.trained_losses[:, :6])
    u = np.log2(d / d[-1])
    process = Process.fit(y, d)
    ours = plain_density(np.log(process.deviations), process.slope, y, u)

    def objective(numbers: np.ndarray) -> float:
        return -plain_density(numbers[:3], numbers[3], y, u)

    start = np.array([-3.0, -4.0, -4.0, -0.1])
    best = minimize(objective, start, method="Nelder-Mead", options={"maxiter": 4000})
    assert ours > -best.fun - 1e-3
    for place, step in enumerate((0.01, 0.01, 0.01, 1e-4)):  # no step to either side is better
        for sign in (-1, 1):
            moved = np.append(np.log(process.deviations), process.slope)
            moved[place] += sign * step
            assert -objective(moved) < ours + 1e-7


def test_the_process_predicts_as_a_normal_distribution_does() -> None:
    """Conditional moments of (y, targets), the level's variance a million."""
    table, _ = tables.population(1, models=5)
    d, y, targets = table.trained[:6], np.log(table.trained_losses[:, :6]), np.array([2e4, 3e5])
    process = Process(-0.07, np.array([0.05, 0.015, 0.01]))
    u = np.log2(np.append(d, targets) / d[-1])
    noise = np.diag(np.append(np.zeros(6), np.full(2, 0.01**2)))  # the targets have none
    covariance = plain_covariance(u, *process.deviations) - noise + 1e6
    weights = np.linalg.solve(covariance[:6, :6], covariance[:6, 6:])
    away = y - y[:, -1:] + 0.07 * u[:6]
    mean = (y[:, -1:] - 0.07 * u[6:] + away @ weights).T
    variance = np.diag(covariance[6:, 6:] - covariance[6:, :6] @ weights)
    ours, deviation = process.predict(y, d, targets)
    np.testing.assert_allclose(ours, mean, rtol=1e-5)
    np.testing.assert_allclose(deviation**2, variance, rtol=1e-4)


def test_the_process_is_trusted_where_it_foresaw_the_later_sizes() -> None:
    """Curves of the process itself, and curves of noise that walks by no such law."""
    random, d = np.random.default_rng(0), 200.0 * 2.0 ** np.arange(9)
    u = np.log2(d / d[-1])
    smooth = 0.5 + np.outer(random.normal(-0.1, 0.03, 12), u) + random.normal(0, 0.002, (12, 9))
    steps = random.standard_t(1.5, (12, 9)) * 0.05
    for y, least, most in ((smooth, 0.9, 1.0), (np.cumsum(steps, 1), 0.0, 0.2)):
        tests = backtests(y, d)
        assert least <= blend.trust_in_process(tests, blend.last_loss_weight(tests)) <= most
    assert blend.trust_in_process([], 0.9) == pytest.approx(1 / (1 + np.exp(3)))


@given(factor=st.floats(1e-2, 1e9))
@settings(max_examples=2, deadline=None)
def test_the_unit_of_sizes_does_not_matter(factor: float) -> None:
    table, _ = tables.population(0, models=4)
    d, losses = table.trained[:5], table.trained_losses[:, :5]
    (one,) = forecasts(d, losses, [51200.0])
    (other,) = forecasts(factor * d, losses, [factor * 51200.0])
    np.testing.assert_allclose(other.predictive.location, one.predictive.location, atol=1e-8)
    np.testing.assert_allclose(other.predictive.scale, one.predictive.scale, rtol=1e-6)
    np.testing.assert_allclose(other.choice, one.choice, atol=1e-6)


def test_the_order_of_models_does_not_matter() -> None:
    table, _ = tables.population(1, models=7)
    order = np.random.default_rng(0).permutation(7)
    losses = table.trained_losses[:, :6]
    one = posteriors(np.log(losses), table.trained[:6], [51200.0])[0]
    other = posteriors(np.log(losses[order]), table.trained[:6], [51200.0])[0]
    np.testing.assert_allclose(other.mean, one.mean[order], rtol=1e-9)


def test_posterior_covers_curves_of_the_model() -> None:
    """350 curves drawn from the model; tolerance: 3 points and one standard error of the share."""
    generator = np.random.default_rng(4)
    shapes = Shapes.grid(SIZES, np.array([TARGET]))
    away = (shapes.theta - [0.0, np.log(0.5), 0.3]) / [1.5, 0.3, 0.2]
    weight = np.exp(-0.5 * (away**2).sum(-1))
    shape = generator.choice(len(weight), 350, p=weight / weight.sum())
    own = np.sqrt(invgamma(2.0, scale=2.0 * 0.01**2).rvs(350, random_state=generator))
    y = np.empty((350, 7))
    for row in range(350):
        full = covariance(*NOISE_PATTERNS[int(generator.integers(len(NOISE_PATTERNS)))])
        y[row] = own[row] * generator.multivariate_normal(np.zeros(7), full)
    y += np.append(shapes.measured, shapes.targets.T, -1)[shape] + 1.0
    posterior = posteriors(y[:, :-1], SIZES, [TARGET])[0]
    distance = np.abs(y[:, -1] - posterior.mean) / np.sqrt(posterior.variance)
    for level in (0.8, 0.9):
        inside = np.mean(distance < norm.ppf((1 + level) / 2))
        error = np.sqrt(level * (1 - level) / 350)
        assert inside == pytest.approx(level, abs=0.03 + error)
