"""The method "blend" of `select`: a hierarchical model of rectified shapes, and the last losses.

ln L of a curve is a rectified shape from a fixed grid of parameters plus a residual: noise with a
drifting level and slope.  The scale of the noise, the frequencies of its patterns and the prior of
shapes are estimated from the curves of all candidates.  The prediction is a mixture over shapes and
patterns; curves of large variance are shrunk a little towards the mean fall.  The score shrinks the
differences between the forecasts towards those between the last losses, as far as that would have
helped at the table's smaller sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .._io import require
from .predictive import Array, Student, idiosyncratic_deviation

# Relative to the largest size and its loss: a transition from e⁻⁹ to e⁹ of that size, so that a
# curve may be all power law or not yet in it; β; and a floor E of up to nine tenths of that loss.
_LOG_TRANSITIONS = np.linspace(-9.0, 9.0, 13)
_LOG_EXPONENTS = np.linspace(np.log(0.06), np.log(1.6), 8)
_FLOORS = np.arange(6) * 0.18


@dataclass(frozen=True)
class Shapes:
    """ln L of every shape of the grid, less that at the largest size measured, D_n.

    With h(D) = 1 / (1 + (D/D_c)^β), ε = E / L(D_n) and q = ε / (1 − ε), ln L of the rectified law
    less its scale is ln(h(D) + q h(D_n)).

    Attributes:
        theta: (ln D_c/D_n, ln β, ε), [s, 3].  Relative to the largest size, neither the unit of
            sizes nor a smaller subset more or less moves the grid or its prior.
        measured: at the sizes, [s, m].
        targets: at the targets, [t, s].
    """

    theta: Array
    measured: Array
    targets: Array

    @classmethod
    def grid(cls, sizes: Array, targets: Array) -> Shapes:
        """Return the grid at sizes [m] (positive, the largest last) and at targets [t]."""
        axes = np.meshgrid(_LOG_TRANSITIONS, _LOG_EXPONENTS, _FLOORS, indexing="ij")
        theta = np.stack([axis.ravel() for axis in axes], -1)
        logs = np.log(np.append(sizes, targets) / sizes[-1])
        h = 1 / (1 + np.exp(np.exp(theta[:, 1:2]) * (logs - theta[:, :1])))
        q, last = theta[:, 2] / (1 - theta[:, 2]), len(sizes) - 1
        g = np.log(h + (q * h[:, last])[:, None])
        g -= g[:, last : last + 1]
        return cls(theta, g[:, : last + 1], g[:, last + 1 :].T)


NOISE_PATTERNS = (
    (1.0, 0.0, 0.3),
    (1.0, 0.3, 0.5),
    (1.0, 1.0, 0.5),
    (1.0, 0.0, 1.0),
    (0.3, 1.0, 0.5),
    (0.3, 0.0, 1.0),
    (0.3, 1.0, 1.0),
    (0.3, 0.3, 2.0),
    (1.0, 1.0, 2.0),
)
"""White noise σ, level drift τ and slope drift κ in units of the curve's scale.  κ is never 0: no
curve is taken to follow the rectified law over all further doublings."""


def covariances(sizes: Array, targets: Array) -> tuple[Array, Array, Array, Array]:
    """Return the covariances of a curve's residual components, [m + t, m + t] each.

    Over doublings from the largest size, u = log₂(D / D_n): white noise, 1[u = u'], which targets
    have none of; a random walk of the level, a; a random walk of the slope, a² (3b − a) / 6, where
    a = min(|u|, |u'|) and b = max(|u|, |u'|); and a random slope, u u'.  The walks start at D_n and
    go both ways, with covariance 0 between the two sides, so that another smaller subset changes
    nothing for the other sizes.

    Returns:
        White noise, level, slope ("bend") and random slope ("line").
    """
    u = np.log2(np.append(sizes, targets) / sizes[-1])
    line, distance = np.multiply.outer(u, u), np.abs(u)
    a, b = np.minimum.outer(distance, distance), np.maximum.outer(distance, distance)
    white = np.diag(np.arange(len(u)) < len(sizes)).astype(float)
    return white, np.where(line > 0, a, 0.0), np.where(line > 0, a**2 * (3 * b - a) / 6, 0.0), line


@dataclass(frozen=True)
class Kriging:
    """Gaussian prediction under k patterns at scale 1, with a free constant.

    Attributes:
        precision: P = K⁻¹ − K⁻¹ 1 1ᵀ K⁻¹ / (1ᵀ K⁻¹ 1), [k, m, m].
        log_weight: − ½ ln det K − ½ ln 1ᵀ K⁻¹ 1, [k].
        weights: best linear unbiased weights of the measured values for the targets, [k, t, m].
        variance: of the prediction at the targets, [k, t].
    """

    precision: Array
    log_weight: Array
    weights: Array
    variance: Array

    @classmethod
    def patterns(cls, sizes: Array, targets: Array) -> Kriging:
        """Return the predictors for `NOISE_PATTERNS`; a line weighs as a doubling's bend does."""
        white, level, bend, line = covariances(sizes, targets)
        slope = bend + line
        patterns = [s**2 * white + t**2 * level + k**2 * slope for s, t, k in NOISE_PATTERNS]
        return cls.solve(np.stack(patterns), len(sizes))

    @classmethod
    def solve(cls, covariance: Array, points: int) -> Kriging:
        """Return the predictors of covariances [k, m + t, m + t] whose first `points` are seen."""
        # Ordinary kriging.  The constant has a flat prior, so that P leaves out what is constant in
        # the residuals.  The weights of a known mean (`simple`) sum to 1 − `missing`; for an
        # unbiased prediction that share goes to the constant's own estimate,
        # 1ᵀ K⁻¹ y / (1ᵀ K⁻¹ 1), whose error is the last term of the variance.
        measured, cross = covariance[:, :points, :points], covariance[:, points:, :points]
        inverse = np.linalg.inv(measured)
        ones = inverse.sum(1, keepdims=True)
        total = ones.sum(-1, keepdims=True)
        log_norm = 0.5 * (np.linalg.slogdet(measured)[1] + np.log(total[:, 0, 0]))
        simple = cross @ inverse
        missing = 1 - simple.sum(-1, keepdims=True)
        variance = (missing**2 / total - (cross * simple).sum(-1, keepdims=True))[..., 0]
        variance += np.diagonal(covariance, 0, 1, 2)[:, points:]
        precision = inverse - ones.swapaxes(1, 2) * ones / total
        return cls(precision, -log_norm, simple + missing * ones / total, variance)


FEWEST_SIZES = 3
PRIOR_MEAN = np.array([0.0, np.log(0.4), 0.4])
PRIOR_COVARIANCE = np.diag([4.0, 0.5, 0.3]) ** 2
PRIOR_MODELS = 10.0  # models
EM_STEPS = 12
LEVEL_POINTS = 5
PATTERN_PRIOR_MODELS = 5.0  # models
TABLE_SCALES = np.geomspace(0.002, 0.3, 12)
GAMMA_SHAPE = 2.0
"""Of the inverse gamma distribution of a curve's squared scale around the table's."""


def floor_units(y: Array) -> Array:
    """Return L(D_n) over its median, [n], of ln L, [n, m].

    Times ε it is the floor E = ε L(D_n) in a unit common to all curves.  The prior is of the floor
    as a loss, not as a fraction of each model's loss, since all models have one test set, and most
    of the loss that no training removes is the test set's.
    """
    last = np.exp(y[:, -1])
    return last / np.median(last)


def covariates(y: Array) -> Array:
    """Return X, [n, 2]: 1 and the centred mean of the last five ln L."""
    level = y[:, -LEVEL_POINTS:].mean(-1)
    return np.stack([np.ones(len(y)), level - level.mean()], -1)


def log_marginal_likelihood(squares: Array, log_weight: Array, points: int, scale: float) -> Array:
    """Return ln p(y_i | shape, pattern) up to a constant, the curve's own scale integrated out.

    A curve's squared scale is inverse gamma with shape a and mean-like value s²; the Gaussian
    evidence then becomes b^a / (b + Q/2)^(a + (m−1)/2) with b = a s².

    Args:
        squares: Q = rᵀ P r of every residual r, [k, n, s].
        log_weight: of the patterns, [k].
        points: m.
        scale: s, that of the table.
    """
    b = GAMMA_SHAPE * scale**2
    power = GAMMA_SHAPE + (points - 1) / 2
    return GAMMA_SHAPE * np.log(b) + log_weight[:, None, None] - power * np.log(b + squares / 2)


def table_scale(blocks: Iterable[Array], log_weight: Array, points: int, prior: Array) -> float:
    """Return the table's scale, the centre of the curves' scales: exp of its mean ln on a grid.

    Args:
        blocks: Q of blocks of curves, [k, n, s] each; see `residual_squares`.
        log_weight, points: as in `log_marginal_likelihood`.
        prior: ln p(shape), [s].
    """
    log_evidence = np.zeros(len(TABLE_SCALES))
    for squares in blocks:
        for index, scale in enumerate(TABLE_SCALES):
            evidence = log_marginal_likelihood(squares, log_weight, points, scale) + prior
            log_evidence[index] += log_sum(log_sum(evidence, 2), 0).sum()
    return float(np.exp(normalised(log_evidence) @ np.log(TABLE_SCALES)))


def pattern_frequencies(log_evidence: Array) -> Array:
    """Return the frequencies of the noise patterns, [k]: EM with a uniform prior worth 5 models.

    Args:
        log_evidence: ln p(y_i | pattern), [k, n].
    """
    patterns, models = log_evidence.shape
    frequency = np.full(patterns, 1 / patterns)
    for _ in range(EM_STEPS):
        counts = normalised((log_evidence + np.log(frequency)[:, None]).T).sum(0)
        frequency = (counts + PATTERN_PRIOR_MODELS / patterns) / (models + PATTERN_PRIOR_MODELS)
    return frequency


def shared_prior(log_evidence: Array, theta: Array, floors: Array, x: Array) -> Array:
    """Return ln p(shape) for every curve, [n, s], up to a constant: N(X_i C, S), by EM.

    The distribution is of (ln D_c/D_n, ln β, ε times the curve's floor unit).  C and S start at,
    and are pulled to, vague values worth ten models:
    C⁰ = (ln D_n, ln .4, .4; 0), S⁰ = diag(4², .5², .3²).

    Args:
        log_evidence: ln p(y_i | shape), [n, s].
        theta: (ln D_c/D_n, ln β, ε), [s, 3].
        floors: see `floor_units`, [n].
        x: [n, 2].
    """
    start, models = np.stack([PRIOR_MEAN, np.zeros(3)]), len(x)
    normal = x.T @ x + PRIOR_MODELS * np.eye(x.shape[1])
    # A deviation from the mean is linear in z = (1, θ), D_i z, and so its square zᵀ D_iᵀ S⁻¹ D_i z
    # in the products of z: two matrix products a step, and no array [n, s, 3].
    z = np.insert(theta, 0, 1.0, axis=1)
    products = (z[:, :, None] * z[:, None]).reshape(-1, 16)
    linear = np.repeat(np.eye(3, 4, 1)[None], models, axis=0)
    linear[:, 2, 3], linear[:, :, 0] = floors, -x @ start

    def log_normal(spread: Array) -> Array:
        squares = linear.swapaxes(1, 2) @ np.linalg.inv(spread) @ linear
        return -0.5 * squares.reshape(-1, 16) @ products.T

    prior = log_normal(PRIOR_COVARIANCE)
    for _ in range(EM_STEPS):
        # Expectation: where on the grid each curve is.  Maximisation: the regression of these means
        # on X, and the scatter of the whole posteriors around it, not of their means alone, which
        # would shrink S towards 0 from step to step.
        moments = (normalised(log_evidence + prior) @ products).reshape(-1, 4, 4)
        mean = (linear[:, :, 1:] @ moments[:, 1:, :1])[..., 0]
        coefficients = np.linalg.solve(normal, x.T @ mean + PRIOR_MODELS * start)
        linear[:, :, 0] = -x @ coefficients
        scatter = (linear @ moments @ linear.swapaxes(1, 2)).sum(0)
        prior = log_normal((PRIOR_MODELS * PRIOR_COVARIANCE + scatter) / (PRIOR_MODELS + models))
    return prior


def normalised(logs: Array) -> Array:
    """Return exp of logs, scaled to sum 1 over the last axis."""
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_sum(logs: Array, axis: int) -> Array:
    """Return ln Σ exp over an axis."""
    top = logs.max(axis, keepdims=True)
    return np.squeeze(top + np.log(np.exp(logs - top).sum(axis, keepdims=True)), axis)


_PRIOR_LAST_WEIGHT, _PRIOR_BACKTESTS = 0.9, 2.0
"""Prior of `last_loss_weight`, and the number of backtests that it counts as.  Chosen on
development halves of the tables that judge `select` (FLAN, LCDB, LLM fine-tuning; see the docs)."""

_LEAST_ERROR = 1e-18  # mean square error in ln L below which a backtest does not count

_MEAN_FALL_WEIGHT = 0.1
"""Shrinkage of a forecast of average variance towards the mean fall; of the others in proportion to
their variance.  From the development halves, as are the next."""

_DOF, _SCALE, _POWER, _MEAN_POWER = 3.0, 0.6, 0.75, 0.1
"""Of Student's t: its scale is _SCALE · σ^_POWER · (geometric mean of σ)^_MEAN_POWER with σ the
posterior's standard deviations.  From the log score of forecasts on the development
halves, where errors differ less between curves than σ does."""


@dataclass(frozen=True)
class Posterior:
    """Mean and variance of ln L at a target for every curve, [n]."""

    mean: Array
    variance: Array


def posteriors(y: Array, sizes: Array, targets: Array) -> list[Posterior]:
    """Predict ln L at each of the targets from ln L at the sizes.

    y_i = c_i + g_shape + s_i r with a flat prior on c_i, r Gaussian (`Kriging`) and s_i around the
    table's scale.  The priors of shapes and noise patterns are estimated from all candidates, and
    both are summed over.

    Args:
        y: [n, m].
        sizes: positive, ascending, [m].
        targets: one or more, above the last size, [t].
    """
    shapes, kriging = Shapes.grid(sizes, targets), Kriging.patterns(sizes, targets)
    vague = -0.5 * ((shapes.theta - PRIOR_MEAN) ** 2 / np.diag(PRIOR_COVARIANCE)).sum(-1)
    squares = partial(residual_squares, y, shapes, kriging)
    scale = table_scale(squares(), kriging.log_weight, len(sizes), vague)
    marginal = partial(log_marginal_likelihood, points=len(sizes), scale=scale)
    pattern_evidence = [log_sum(marginal(q, kriging.log_weight) + vague, 2) for q in squares()]
    weight = kriging.log_weight + np.log(pattern_frequencies(np.concatenate(pattern_evidence, 1)))
    shape_evidence = np.concatenate([log_sum(marginal(q, weight), 0) for q in squares()])
    prior = shared_prior(shape_evidence, shapes.theta, floor_units(y), covariates(y))
    priors = np.split(prior, range(_BLOCK, len(y), _BLOCK))
    logs = ((q, marginal(q, weight) + p) for q, p in zip(squares(), priors, strict=True))
    return mixture_moments(y, shapes, kriging, logs, scale)


_BLOCK = 8
"""Curves at a time, so that an array [k, 8, s] stays in a processor's cache, and memory does not
grow by [k, s] with every curve."""


def residual_squares(y: Array, shapes: Shapes, kriging: Kriging) -> Iterator[Array]:
    """Yield Q = rᵀ P r for r = y_i − g_shape, [k, n, s], of every _BLOCK curves.

    Both are taken relative to the last size, which P does not see, so that the differences of large
    numbers stay exact.
    """
    curve, shape, precision = y - y[:, -1:], shapes.measured, kriging.precision
    shape_square = ((shape @ precision) * shape).sum(-1)[:, None]
    for block in np.split(curve, range(_BLOCK, len(y), _BLOCK)):
        projected = block @ precision
        curve_square = (projected * block).sum(-1, keepdims=True)
        yield np.maximum(curve_square + shape_square - 2 * (projected @ shape.T), 0.0)


def mixture_moments(
    y: Array, shapes: Shapes, kriging: Kriging, blocks: Iterable[tuple[Array, Array]], scale: float
) -> list[Posterior]:
    """Return mean and variance of each curve's mixture over shapes and patterns, for each target.

    A component is Student's t around g(D) + the kriged residual; its variance is that of the
    pattern times the mean of the curve's squared scale given the shape, (b + Q/2) / (A − 1).

    Args:
        y: [n, m].
        shapes, kriging: at the targets.
        blocks: Q and log weights of blocks of curves, [k, n, s] each.
        scale: that of the table.
    """
    shape_means = shapes.targets - kriging.weights @ shapes.measured.T
    rows = np.concatenate([np.ones_like(shape_means[:, :1]), shape_means, shape_means**2], 1)
    sums = []
    for squares, logs in blocks:
        weights = np.exp(logs - logs.max((0, 2), keepdims=True))
        square = (weights * squares).sum(2)[:, None]
        sums.append(np.concatenate([rows @ weights.swapaxes(1, 2), square], 1))
    moments = np.concatenate(sums, -1)
    moments /= moments[:, 0].sum(0)
    weight, square = moments[:, :1], moments[:, -1:]
    first, second = np.split(moments[:, 1:-1], 2, axis=1)
    power = GAMMA_SHAPE + (y.shape[1] - 1) / 2
    square = (GAMMA_SHAPE * scale**2 * weight + square / 2) / (power - 1)
    data = kriging.weights @ (y - y[:, -1:]).T
    mean = (weight * data + first).sum(0)
    data -= mean
    spread = square * kriging.variance[..., None] + (weight * data + 2 * first) * data + second
    return list(map(Posterior, mean + y[:, -1], spread.sum(0)))


@dataclass(frozen=True)
class Process:
    """A Gaussian process of ln L over doublings, with hyperparameters fitted to one table.

    A curve is a free constant, a line whose slope at the largest size D_n is normal around the mean
    slope of all curves, a random walk of the slope, and noise.  It assumes no shape of curves and
    no prior from other tables, so that its variance is small where the curves of this table are
    alike and smooth.

    Attributes:
        slope: mean change of ln L in a doubling at D_n.
        deviations: standard deviations of the curves' slopes at D_n, of the slope's walk over one
            doubling, and of the noise, [3].
    """

    slope: float
    deviations: Array

    @classmethod
    def fit(cls, y: Array, sizes: Array) -> Process:
        """Return the maximum a posteriori process for ln L [n, m] at sizes [m].

        The priors, N(−.1, .15²) of the slope and N(ln (.06, .02, .02), 1) of ln of the deviations,
        are wide compared to the likelihood of even three sizes.
        """
        white, _, bend, line = covariances(sizes, sizes[:0])
        components, u = np.stack([line, bend, white]), np.log2(sizes / sizes[-1])
        residual = y - y[:, -1:] + 0.1 * u  # from the prior's line; kriging sees no constant
        scatter, total = residual.T @ residual, residual.sum(0)

        def minus_log(logs: Array) -> tuple[float, Array, float]:
            covariance = np.exp(2 * logs)[:, None, None] * components
            model = Kriging.solve(covariance.sum(0, keepdims=True), len(sizes))
            precision = model.precision[0]
            weight = len(y) * (u @ precision @ u) + 0.15**-2
            slope = u @ precision @ total / weight  # the most probable for these deviations
            cross = np.outer(total - len(y) * slope / 2 * u, slope * u)
            squares = scatter - cross - cross.T
            prior = (slope / 0.15) ** 2 + ((logs - _DEVIATIONS) ** 2).sum()
            value = ((precision * squares).sum() + prior) / 2 - len(y) * model.log_weight[0]
            curvature = len(y) * precision - precision @ squares @ precision
            gradient = (covariance * curvature).sum((1, 2)) + logs - _DEVIATIONS
            return float(value), gradient, float(slope)

        minimum = require("scipy.optimize").minimize(
            lambda logs: minus_log(logs)[:2],
            _DEVIATIONS,
            method="L-BFGS-B",
            jac=True,
            bounds=[(-7, 1), (-8, 0), (-8, 0)],
            options={"ftol": 1e-15, "gtol": 1e-9},
        )
        return cls(minus_log(minimum.x)[2] - 0.1, np.exp(minimum.x))

    def predict(self, y: Array, sizes: Array, targets: Array) -> tuple[Array, Array]:
        """Return the means of ln L at targets, [t, n], and its standard deviation there, [t]."""
        white, _, bend, line = covariances(sizes, targets)
        components = np.stack([line, bend, white])
        kriging = Kriging.solve(np.tensordot(self.deviations**2, components, 1)[None], len(sizes))
        residual = y - y[:, -1:] - self.slope * np.log2(sizes / sizes[-1])
        ahead = self.slope * np.log2(targets / sizes[-1])[:, None]
        return y[:, -1] + ahead + kriging.weights[0] @ residual.T, np.sqrt(kriging.variance[0])


_DEVIATIONS = np.log([0.06, 0.02, 0.02])


@dataclass(frozen=True)
class Backtest:
    """Forecasts of a later size of a table from its first sizes, and the truth.

    Attributes:
        sizes: number of first sizes that were read.
        last, truth: ln L at the last of them, and at the later size, [n].
        posterior: the blend's forecast of the later size.
        mean: the process's, [n].
        deviation: the process's standard deviation.
    """

    sizes: int
    last: Array
    truth: Array
    posterior: Posterior
    mean: Array
    deviation: float


def backtests(y: Array, sizes: Array) -> list[Backtest]:
    """Forecast every later size from the first k sizes, three or more: y [n, m], sizes [m]."""
    results = []
    for count in range(FEWEST_SIZES, len(sizes)):
        early, early_sizes, later = y[:, :count], sizes[:count], sizes[count:]
        means, deviations = Process.fit(early, early_sizes).predict(early, early_sizes, later)
        blend = posteriors(early, early_sizes, later)
        columns = zip(y[:, count:].T, blend, means, deviations, strict=True)
        results += [Backtest(count, early[:, -1], *column) for column in columns]
    return results


def last_loss_weight(tests: Iterable[Backtest]) -> float:
    """Return the weight of the last losses in the differences between candidates, 0 to 1.

    With f, l and t the predicted, the last and the true ln L of a backtest, each less its mean over
    the candidates, w = Σ (t − f)ᵀ(l − f) / s over Σ (l − f)ᵀ(l − f) / s minimises
    Σ |t − (1 − w) f − w l|² / s, where s, the mean square of both errors, gives backtests near and
    far the same weight.  The prior counts as `_PRIOR_BACKTESTS` more backtests.
    """
    agreement, spread = _PRIOR_BACKTESTS * _PRIOR_LAST_WEIGHT, _PRIOR_BACKTESTS
    for test in tests:
        forecast, last, truth = map(_centred, (test.posterior.mean, test.last, test.truth))
        error, gap = truth - forecast, last - forecast
        squares = np.mean((truth - last) ** 2 + error**2)
        if squares > _LEAST_ERROR:
            agreement += float(error @ gap / squares)
            spread += float(gap @ gap / squares)
    return float(np.clip(agreement / spread, 0.0, 1.0))


_PRIOR_ODDS, _EVIDENCE, _MOST_EVIDENCE = -3.0, 4.0, 1.0
"""Of the process against the blend: prior ln odds, their growth per nat of evidence and number of
first sizes that backtests have, and the nats per candidate that a backtest counts for at most.
From the development halves."""


def trust_in_process(tests: Sequence[Backtest], weight: float) -> float:
    """Return the posterior probability that the process describes a table, 0 to 1.

    The evidence is the log density of the true differences between candidates in the backtests by
    the process's Gaussian, less that by a Gaussian around the blend's scores with the idiosyncratic
    deviation.

    Args:
        tests: the table's backtests.
        weight: of the last losses in the blend's scores.
    """
    gains = []
    for test in tests:
        posterior, truth = test.posterior, _centred(test.truth)
        fall = test.last - posterior.mean
        choice = _centred(posterior.mean + weight * _centred(fall))
        deviation = idiosyncratic_deviation(student_scale(posterior.variance), fall)
        blend = ((truth - choice) / deviation) ** 2 / 2 + np.log(deviation)
        process = ((truth - _centred(test.mean)) / test.deviation) ** 2 / 2
        gains.append(np.mean(blend - process) - np.log(test.deviation))
    gain = np.clip(gains, -_MOST_EVIDENCE, _MOST_EVIDENCE).mean() if gains else 0.0
    odds = _PRIOR_ODDS + _EVIDENCE * gain * len({test.sizes for test in tests})
    return float(1 / (1 + np.exp(-odds)))


def _centred(values: Array) -> Array:
    return values - values.mean()


def student_scale(variance: Array) -> Array:
    """Return the scale of Student's t of the forecasts for the posterior's variance, [n]."""
    deviation = np.sqrt(variance)
    return _SCALE * deviation**_POWER * np.exp(_MEAN_POWER * np.log(deviation).mean())


@dataclass(frozen=True)
class BlendForecast:
    """The forecasts of n curves at a target.

    Attributes:
        predictive: the distribution of ln L, Student's t (`_DOF`, `_SCALE`) around the posterior's
            mean, shrunk to the mean fall where its variance is large (`_MEAN_FALL_WEIGHT`).
        choice: ln of the score, [n]: the posterior's mean with its differences between the
            candidates shrunk towards those of the last losses by `last_loss_weight`, and then
            towards those of the process's means by the trust in it.
        fall: of ln L from each curve's last loss to the posterior's mean, [n].
        deviation: standard deviation of ln L by the process, [n].
        trust: the probability that the process describes this table, [n].
    """

    predictive: Student
    choice: Array
    fall: Array
    deviation: Array
    trust: Array


def forecasts(sizes: Array, losses: Array, targets: Sequence[float]) -> list[BlendForecast]:
    """Forecast ln L at targets.

    Args:
        sizes: `FEWEST_SIZES` or more, positive, ascending, [m].
        losses: [n, m].
        targets: above the last size.
    """
    y, ahead = np.log(losses), np.array(targets)
    tests, results = backtests(y, sizes), []
    weight = last_loss_weight(tests)
    trust = trust_in_process(tests, weight)
    means, deviations = Process.fit(y, sizes).predict(y, sizes, ahead)
    blend = posteriors(y, sizes, ahead)
    for moments, mean, deviation in zip(blend, means, deviations, strict=True):
        # Of forecasts that fall more than the candidates' mean, more are too low than too high:
        # each is shrunk towards the mean fall, in proportion to its variance, so that a curve that
        # is sure of its fall keeps it.
        fall = y[:, -1] - moments.mean
        excess = _centred(fall)
        pull = np.minimum(_MEAN_FALL_WEIGHT * moments.variance / moments.variance.mean(), 1)
        dof = np.full(len(y), _DOF)
        predictive = Student(moments.mean + pull * excess, student_scale(moments.variance), dof)
        choice = moments.mean + weight * excess
        choice += trust * (_centred(mean) - _centred(choice))
        process = np.full(len(y), deviation), np.full(len(y), trust)
        results.append(BlendForecast(predictive, choice, fall, *process))
    return results


def forecast_ahead(
    sizes: Array, losses: Array, row: int, last: tuple[float, float], target: float
) -> BlendForecast:
    """Forecast ln L at the target of one curve that was run on a larger size than all others.

    It is forecast with the others from their sizes, and moved by the error of that forecast at its
    last size: the error is taken to be a random walk over doublings, known up to there.

    Args:
        sizes: of all curves, positive, ascending, [m].
        losses: [n, m].
        row: the curve.
        last: the larger size, and its loss there.
        target: above that size.

    Returns:
        As `forecasts` for the target, of that curve alone.
    """
    size, loss = last
    near, far = forecasts(sizes, losses, [size, target])
    remaining = np.sqrt(np.log(target / size) / np.log(target / sizes[-1]))
    measured, only, student = np.log(loss), np.array([row]), far.predictive.rows(np.array([row]))
    location = student.location + measured - near.predictive.location[only]
    return BlendForecast(
        predictive=Student(location, student.scale * remaining, student.dof),
        choice=far.choice[only] + measured - near.choice[only],
        fall=far.fall[only],
        deviation=far.deviation[only],
        trust=far.trust[only],
    )
