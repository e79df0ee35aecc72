"""The hierarchical model: against sums written out curve by curve, and honest on new curves."""

from __future__ import annotations

import tracemalloc

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

from jachess_ext.scaling import LossTable, select, shapes
from jachess_ext.scaling.blend import (
    Process,
    forecasts,
    no_signal_probability,
    replace_spikes,
)
from jachess_ext.scaling.shapes import (
    NOISE_PATTERNS,
    Kriging,
    Shapes,
    posterior_means,
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
    grid = Shapes.grid(SIZES, np.array([TARGET]))
    keep = np.arange(0, len(grid.theta), 61)
    return Shapes(grid.theta[keep], grid.measured[keep], grid.targets[:, keep])


def test_marginal_against_an_integral_over_scales() -> None:
    few, kriging = few_shapes(), Kriging.patterns(SIZES, np.array([TARGET]))
    y = np.log(3.0) - 0.05 * np.arange(6) + 0.01 * np.random.default_rng(0).standard_normal((2, 6))
    (squares,) = residual_squares(y, few, kriging)
    scale, a = 0.013, shapes.GAMMA_SHAPE
    found = shapes.log_marginal_likelihood(squares, kriging.log_weight, 6, scale)
    prior = invgamma(a, scale=a * scale**2)

    def evidence(k: int, i: int, s: int) -> float:
        r = y[i] - few.measured[s]
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


def plain_posteriors(y: np.ndarray, targets: list[float]) -> np.ndarray:
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
        for i in range(models):
            r = y[i] - g[:, :points]
            constant = r @ np.linalg.solve(measured, one) / flat
            r -= constant[:, None]
            q[k, i] = (r * np.linalg.solve(measured, r.T).T).sum(-1)
            ahead.append(g[:, points:] + constant[:, None] + r @ gain)
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
        values = np.stack([ahead[k * models + i] for k in range(9)])
        results.append((w * values).sum((0, 1)))
    return np.stack(results, -1)


@pytest.mark.parametrize("models", [1, 11])  # of blocks of 8 curves
def test_posteriors_against_the_model_written_down(models: int) -> None:
    table, _ = tables.population(3, models=models)
    y, targets = np.log(table.trained_losses[:, :6]), [12800.0, 51200.0, 1638400.0]
    np.testing.assert_array_equal(table.trained[:6], SIZES)
    ours = posterior_means(y, SIZES, np.array(targets))
    np.testing.assert_allclose(ours, plain_posteriors(y, targets), rtol=1e-9)


def test_memory_grows_by_the_row() -> None:
    """300 curves more need a few arrays [300, s] of memory, and none [k, 300, s]."""
    peaks = []
    for models in (100, 400):
        y = np.log(np.random.default_rng(0).lognormal(0.0, 0.1, (models, 6)))
        tracemalloc.start()
        posterior_means(y, SIZES, np.array([TARGET, 2 * TARGET]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 300 * 624 * 8 * 5


FADES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


def log_error(errors: np.ndarray) -> float:
    return np.log(np.sqrt(np.mean(np.square(errors))) + 1e-4)


def plain_blend(y: np.ndarray, d: np.ndarray, target: float) -> tuple[np.ndarray, ...]:
    """The rule as it is described, a backtest at a time; process and shapes have their own tests.

    ln L before and after it is drawn to the last losses, and the errors of one and of all models.
    """
    u, m = np.log2(d), len(d)

    def start(k: int) -> tuple[np.ndarray, np.ndarray]:
        process = Process.fit(y[:, :k], d[:k])
        (one, two), _ = process.predict(y[:, :k], d[:k], d[k - 1] * np.array([2.0, 4.0]))
        return 2 * one - two, two - one

    def slope_forecast(k: int, to: float, fade: float) -> np.ndarray:
        level, slope = start(k)
        return level + slope * quad(lambda t: fade**t, 0, to - u[k - 1])[0]

    def fade_of(count: int) -> float:
        logs, pairs = np.zeros(9), [(k, j) for k in range(2, count) for j in range(k, count)]
        for i, fade in enumerate(FADES):
            errors = [np.median(abs(slope_forecast(k, u[j], fade) - y[:, j])) for k, j in pairs]
            nats = np.mean(np.log(np.array(errors) + 1e-4)) if pairs else 0.0
            logs[i] = norm.logpdf(np.log(fade), np.log(0.8), 0.5) - 2 * min(len(pairs), 6) * nats
        return float(softmax(logs) @ FADES)

    fades = {k: fade_of(k) for k in range(2, m + 1)}
    pairs = [(k, j) for k in range(2, m) for j in range(k, m)]
    lines = {(k, j): slope_forecast(k, u[j], fades[k]) for k, j in pairs}
    grids = {(k, j): posterior_means(y[:, :k], d[:k], d[j : j + 1])[0] for k, j in pairs if k >= 3}
    gains = [
        log_error(lines[pair] - y[:, pair[1]]) - log_error(grids[pair] - y[:, pair[1]])
        for pair in grids
    ]
    weight = expit(2 * min(len(gains), 6) * np.mean(gains)) if gains else 0.0

    def mix(line: np.ndarray, grid: np.ndarray | None) -> np.ndarray:
        return line if grid is None else weight * grid + (1 - weight) * line

    def drawn(forecast: np.ndarray, last: np.ndarray) -> np.ndarray:
        return forecast.mean() + (forecast - forecast.mean()) / 2 + (last - last.mean()) / 2

    doublings = np.log2(target) - u[-1]
    deviation = Process.fit(y, d).predict(y, d, np.array([target]))[1][0]
    rates = [[np.log(1.0 * deviation / doublings)] * 2]
    for k in range(2, m):
        of_start = []
        for j in range(k, m):
            error = drawn(mix(lines[k, j], grids.get((k, j))), y[:, k - 1]) - y[:, j]
            own = np.log(error.std(ddof=1) + 1e-4)
            both = np.log(abs(error.mean()) + 1e-4) + (np.euler_gamma + np.log(2)) / 2
            of_start.append((own - np.log(u[j] - u[k - 1]), both - np.log(u[j] - u[k - 1])))
        rates.append(np.mean(of_start, 0))
    grid = posterior_means(y, d, np.array([target]))[0] if gains else None
    before = mix(slope_forecast(m, np.log2(target), fades[m]), grid)
    after = drawn(before, y[:, -1])
    own, common = doublings * np.exp(np.mean(rates, 0))
    return before, after, np.hypot(own, 0.7 * np.std(y[:, -1] - after)), common


@pytest.mark.parametrize("count", [3, 4, 7])
def test_the_rule_written_down(count: int) -> None:
    table, _ = tables.population(4, models=6)
    d, y = table.trained[:count], np.log(table.trained_losses[:, :count])
    np.testing.assert_array_equal(replace_spikes(y, d), y)
    before, after, own, common = plain_blend(y, d, 102400.0)
    found = select(table, d[-1], 102400.0)
    (forecast,) = forecasts(d, np.exp(y), [102400.0])
    np.testing.assert_allclose(forecast.extrapolation, before, rtol=1e-6)
    np.testing.assert_allclose(np.log(found.predicted_losses), after, rtol=1e-6)
    np.testing.assert_allclose(forecast.deviation, own, rtol=1e-4)
    for level in (0.5, 0.9):
        width = student.ppf((1 + level) / 2, 4) * np.hypot(own, common)
        low, high = found.interval_ends(level)
        np.testing.assert_allclose(np.log(low), after - width, rtol=1e-3)
        np.testing.assert_allclose(np.log(high), after + width, rtol=1e-3)
    q = no_signal_probability(y, d)
    random = np.random.default_rng(0)
    centres = np.where(random.random((200_000, 1)) < q, after.mean(), after)
    draws = centres + own * random.standard_normal((200_000, 6))
    shares = 0.95 * np.bincount(draws.argmin(1), minlength=6) / 200_000 + 0.05 / 6
    np.testing.assert_allclose(found.best_probabilities, shares, atol=0.005)


def plain_no_signal(y: np.ndarray, d: np.ndarray) -> float:
    """The evidence by scipy's densities: the scale is integrated out with the prior ds / s."""
    n, m = y.shape
    z = y - y.mean(0)
    z = np.linalg.svd(np.ones((1, n)))[2][1:] @ z
    along = (np.log2(d) - np.log2(d[-1])) / np.log2(d[-1] / d[0])

    log_scale = np.linspace(-9, 3, 2401)

    def evidence(covariance: np.ndarray) -> float:
        unit = multivariate_normal(np.zeros(m), covariance)
        densities = unit.logpdf(z / np.exp(log_scale)[:, None, None]) - m * log_scale[:, None]
        return float(logsumexp(densities.sum(1)))

    lasting = []
    for first in range(m - 1):
        on = np.arange(m) >= first
        for s in (0.5, 1, 2, 4, 8, 16):
            for r in (0, 1, 4):
                line = np.outer(on, on) * (1 + r * np.outer(along, along))
                lasting.append(evidence(np.eye(m) + s**2 * line))
    odds = evidence(np.eye(m)) - (logsumexp(lasting) - np.log(len(lasting)))
    return float(expit(odds + np.log(0.2 / 0.8)))


def test_no_signal_is_a_ratio_of_evidences() -> None:
    random = np.random.default_rng(2)
    d = SIZES[:4]
    noise = random.normal(0, 0.1, (4, 4))
    for y in (noise, noise + random.normal(0, 0.1, (4, 1))):
        assert no_signal_probability(y, d) == pytest.approx(plain_no_signal(y, d), rel=1e-3)
    assert no_signal_probability(np.ones((3, 4)), d) == 1.0
    assert no_signal_probability(noise[:1], d) == 0.0


def test_curves_that_cross_are_a_signal() -> None:
    """All are level in the middle of the sizes, and differ in slope alone."""
    random, u = np.random.default_rng(0), np.arange(5) - 2.0
    for models in (3, 4, 10):
        y = np.outer(random.normal(0, 0.1, models), u) + random.normal(0, 0.005, (models, 5))
        assert no_signal_probability(y, SIZES[:5]) < 0.1


def test_differences_that_begin_late_are_a_signal() -> None:
    """Noise at all sizes but the last two: of ten models, none counts as without a signal."""
    random, said = np.random.default_rng(0), []
    for _ in range(20):
        late = np.outer(random.normal(0, 1, 16), [0, 0, 0, 0, 1, 1])
        said.append(no_signal_probability(random.normal(0, 0.1, (16, 6)) + late, SIZES))
    assert max(said) < 0.5


def test_a_worse_loss_does_not_raise_a_model() -> None:
    """A first run that diverged is left out, and so makes no model the best of those in a table."""
    d = SIZES[:3]
    losses = np.array(
        [[2.86, 2.55, 2.40], [2.80, 2.50, 2.35], [2.9, 2.6, 2.45], [2.83, 2.583, 2.507]]
    )
    for diverged in (3.5, 6.83, 50.0):
        worse = losses.copy()
        worse[3, 0] = diverged
        table = LossTable(("a", "b", "c", "d"), d, worse, None)
        assert select(table, d[-1], TARGET).ranking[-1] == "d"
    y = np.log(worse)
    replaced = replace_spikes(y, d)
    assert replaced[3, 0] == pytest.approx(2 * y[3, 1] - y[3, 2])
    np.testing.assert_array_equal(replaced[:3], y[:3])
    np.testing.assert_array_equal(replaced[:, 1:], y[:, 1:])


@pytest.mark.parametrize("seed", range(6))
def test_influence_of_one_cell(seed: int) -> None:
    """Doubling a first loss raises no model above all others that were ahead of it."""
    table, _ = tables.population(seed, models=8)
    d, losses = table.trained[:5], table.trained_losses[:, :5]
    before = select(LossTable(table.names, d, losses, None), d[-1], TARGET).ranking
    raised = 0
    for row, name in enumerate(table.names):
        worse = losses.copy()
        worse[row, 0] *= 2
        after = select(LossTable(table.names, d, worse, None), d[-1], TARGET).ranking
        assert after[0] != name or before[0] == name
        raised += after.index(name) < before.index(name)
    assert raised <= 1


def test_a_smaller_subset_that_fits_moves_little() -> None:
    """Curves on the grid's own shapes: their first subset tells nothing that the others do not."""
    grid, target = Shapes.grid(SIZES, np.array([TARGET])), np.array([TARGET])
    y = grid.measured[[200, 250, 330, 400]] + 1.0
    whole, less = posterior_means(y, SIZES, target), posterior_means(y[:, 1:], SIZES[1:], target)
    np.testing.assert_allclose(less, whole, atol=0.05)


def test_a_common_factor_changes_nothing_but_itself() -> None:
    table, _ = tables.population(0, models=8)
    losses = table.trained_losses[:, :7]
    (one,) = forecasts(table.trained[:7], losses, [204800.0])
    (ten,) = forecasts(table.trained[:7], 10 * losses, [204800.0])
    location = one.predictive.location + np.log(10)
    np.testing.assert_allclose(ten.predictive.location, location, atol=1e-9)
    np.testing.assert_allclose(ten.predictive.scale, one.predictive.scale, rtol=1e-6)
    np.testing.assert_allclose(ten.extrapolation, one.extrapolation + np.log(10), atol=1e-6)
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


@given(factor=st.floats(1e-2, 1e9))
@settings(max_examples=2, deadline=None)
def test_the_unit_of_sizes_does_not_matter(factor: float) -> None:
    table, _ = tables.population(0, models=4)
    d, losses = table.trained[:5], table.trained_losses[:, :5]
    (one,) = forecasts(d, losses, [51200.0])
    (other,) = forecasts(factor * d, losses, [factor * 51200.0])
    np.testing.assert_allclose(other.predictive.location, one.predictive.location, atol=1e-8)
    np.testing.assert_allclose(other.predictive.scale, one.predictive.scale, rtol=1e-6)
    np.testing.assert_allclose(other.extrapolation, one.extrapolation, atol=1e-6)


@pytest.mark.parametrize("models", [7, 330])  # the second is more than are backtested
def test_the_order_of_models_does_not_matter(models: int) -> None:
    table, _ = tables.population(1, models=models)
    order = np.random.default_rng(0).permutation(models)
    losses = table.trained_losses[:, :4]
    (one,) = forecasts(table.trained[:4], losses, [51200.0])
    (other,) = forecasts(table.trained[:4], losses[order], [51200.0])
    for field in ("extrapolation", "deviation", "no_signal"):
        np.testing.assert_allclose(getattr(other, field), getattr(one, field)[order], rtol=1e-7)
