"""The method "blend" of `select`: a hierarchical model of rectified shapes, and the last losses.

ln L of a curve is a shape of the rectified law, from a fixed grid of parameters, plus a residual:
noise with a drifting level and slope.  The scale of the noise, the frequencies of its patterns and
the prior of the shapes are estimated from the curves of all candidates.  The prediction is a
mixture over shapes and patterns, shrunk slightly towards the mean fall for curves of large
variance.  The score shrinks the differences between the forecasts towards those between the last
losses, as far as that would have helped at the table's smaller sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .._io import require
from .predictive import Array, Student, idiosyncratic_deviation

# The grid of shapes, relative to the largest size and its loss: ln of the transition, from −9 to 9,
# so that a curve may be in the power law everywhere or nowhere; ln β; and the floor E, up to 0.9.
_LOG_TRANSITIONS = np.linspace(-9.0, 9.0, 13)
_LOG_EXPONENTS = np.linspace(np.log(0.06), np.log(1.6), 8)
_FLOORS = np.arange(6) * 0.18


@dataclass(frozen=True)
class Shapes:
    """Values of g(D) = ln L(D) − ln L(D_n) for each of s shapes; D_n is the largest measured size.

    With h(D) = 1 / (1 + (D/D_c)^β), ε = E / L(D_n) and q = ε / (1 − ε), ln L of the rectified law
    without its scale is ln(h(D) + q h(D_n)).

    Attributes:
        theta: (ln D_c/D_n, ln β, ε) of each shape, [s, 3].  It is relative to the largest size, so
            that neither the unit of sizes nor another smaller size changes the grid or its prior.
        measured: g at the measured sizes, [s, m].
        targets: g at the targets, [t, s].
    """

    theta: Array
    measured: Array
    targets: Array

    @classmethod
    def grid(cls, sizes: Array, targets: Array) -> Shapes:
        """Return the grid of shapes at sizes, [m] (positive, the largest last), and targets [t]."""
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
"""Patterns of the residual: standard deviations of white noise σ, level drift τ and slope drift κ,
in units of the curve's scale.  κ is never 0, as no curve follows the rectified law forever."""


def covariances(sizes: Array, targets: Array) -> tuple[Array, Array, Array, Array]:
    """Return the covariances of the components of a residual at the sizes and targets.

    They are functions of the doublings from the largest size, u = log₂(D / D_n): white noise,
    1[u = u'], at the sizes only; a random walk of the level, a; a random walk of the slope,
    a² (3b − a) / 6, where a = min(|u|, |u'|) and b = max(|u|, |u'|); and a random slope, u u'.  The
    walks start at D_n in both directions, with covariance 0 between the two sides, so that adding a
    smaller size changes nothing at the other sizes.

    Args:
        sizes: positive, the largest last, [m].
        targets: [t].

    Returns:
        White noise, level walk, slope walk ("bend") and random slope ("line"), [m + t, m + t] each.
    """
    u = np.log2(np.append(sizes, targets) / sizes[-1])
    line, distance = np.multiply.outer(u, u), np.abs(u)
    a, b = np.minimum.outer(distance, distance), np.maximum.outer(distance, distance)
    white = np.diag(np.arange(len(u)) < len(sizes)).astype(float)
    return white, np.where(line > 0, a, 0.0), np.where(line > 0, a**2 * (3 * b - a) / 6, 0.0), line


@dataclass(frozen=True)
class Kriging:
    """Best linear unbiased prediction (ordinary kriging) with an unknown constant mean.

    The covariances are those of k noise patterns, at scale 1, between m measured values and t
    targets.

    Attributes:
        precision: P = K⁻¹ − K⁻¹ 1 1ᵀ K⁻¹ / (1ᵀ K⁻¹ 1), [k, m, m], for the measured covariance K.
        log_weight: − ½ ln det K − ½ ln 1ᵀ K⁻¹ 1, [k].
        weights: weights of the measured values in the predictions, [k, t, m].
        variance: variance of the errors of the predictions, [k, t].
    """

    precision: Array
    log_weight: Array
    weights: Array
    variance: Array

    @classmethod
    def patterns(cls, sizes: Array, targets: Array) -> Kriging:
        """Return the predictors for `NOISE_PATTERNS`.

        The random slope has the variance of the slope's walk over one doubling.
        """
        white, level, bend, line = covariances(sizes, targets)
        slope = bend + line
        patterns = [s**2 * white + t**2 * level + k**2 * slope for s, t, k in NOISE_PATTERNS]
        return cls.solve(np.stack(patterns), len(sizes))

    @classmethod
    def solve(cls, covariance: Array, m: int) -> Kriging:
        """Return the predictors for covariances.

        Args:
            covariance: [k, m + t, m + t], the measured values first.
            m: number of measured values.
        """
        # The constant has a flat prior, so that P annihilates constants.  The weights for a known
        # mean (`simple`) sum to 1 − `missing`; for an unbiased prediction, the estimate of the
        # constant, 1ᵀ K⁻¹ y / (1ᵀ K⁻¹ 1), gets the weight `missing`, and the variance of its error
        # is added.
        measured, cross = covariance[:, :m, :m], covariance[:, m:, :m]
        inverse = np.linalg.inv(measured)
        column_sums = inverse.sum(1, keepdims=True)
        total = column_sums.sum(-1, keepdims=True)
        log_norm = 0.5 * (np.linalg.slogdet(measured)[1] + np.log(total[:, 0, 0]))
        simple = cross @ inverse
        missing = 1 - simple.sum(-1, keepdims=True)
        variance = (missing**2 / total - (cross * simple).sum(-1, keepdims=True))[..., 0]
        variance += np.diagonal(covariance, 0, 1, 2)[:, m:]
        precision = inverse - column_sums.swapaxes(1, 2) * column_sums / total
        return cls(precision, -log_norm, simple + missing * column_sums / total, variance)


FEWEST_SIZES = 3
PRIOR_MEAN = np.array([0.0, np.log(0.4), 0.4])  # of `Shapes.theta`
PRIOR_COVARIANCE = np.diag([4.0, 0.5, 0.3]) ** 2
PRIOR_MODELS = 10.0  # number of models that this prior counts as
EM_STEPS = 12
LEVEL_POINTS = 5  # number of last sizes whose mean loss is a covariate of the shape
PATTERN_PRIOR_MODELS = 5.0  # number of models that the uniform prior of patterns counts as
TABLE_SCALES = np.geomspace(0.002, 0.3, 12)
GAMMA_SHAPE = 2.0
"""Shape of the inverse gamma distribution of the curves' squared scales around the table's."""


def floor_units(y: Array) -> Array:
    """Return the last loss of each curve divided by their median, [n].

    Multiplied by ε it is the floor E = ε L(D_n) in a unit common to all curves.  The prior is on
    the floor as a loss, not as a fraction of each model's loss: all models have the same test set,
    which causes most of the irreducible loss.

    Args:
        y: ln L, [n, m].
    """
    last = np.exp(y[:, -1])
    return last / np.median(last)


def covariates(y: Array) -> Array:
    """Return the covariates X of the shapes, [n, 2], for ln L, [n, m].

    They are 1 and the mean ln L of the last `LEVEL_POINTS` sizes, centred over the curves.
    """
    level = y[:, -LEVEL_POINTS:].mean(-1)
    return np.stack([np.ones(len(y)), level - level.mean()], -1)


def log_marginal_likelihood(squares: Array, log_weight: Array, m: int, scale: float) -> Array:
    """Return ln p(y_i | shape, pattern), [k, n, s], up to a constant, scales integrated out.

    A curve's squared scale has an inverse gamma distribution with shape a and rate b = a s²; the
    Gaussian evidence then is b^a / (b + Q/2)^(a + (m−1)/2).

    Args:
        squares: Q = rᵀ P r of every residual r, [k, n, s].
        log_weight: log weights of the patterns, [k].
        m: number of sizes, m.
        scale: scale of the table, s.
    """
    b = GAMMA_SHAPE * scale**2
    power = GAMMA_SHAPE + (m - 1) / 2
    return GAMMA_SHAPE * np.log(b) + log_weight[:, None, None] - power * np.log(b + squares / 2)


def table_scale(blocks: Iterable[Array], log_weight: Array, m: int, prior: Array) -> float:
    """Return the scale of the table, around which the scales of the curves are distributed.

    It is the geometric mean of the posterior on the grid `TABLE_SCALES`.

    Args:
        blocks: Q of blocks of curves, [k, n, s] each; see `residual_squares`.
        log_weight: log weights of the patterns, [k].
        m: number of sizes.
        prior: ln p(shape), [s].
    """
    log_evidence = np.zeros(len(TABLE_SCALES))
    for squares in blocks:
        for index, scale in enumerate(TABLE_SCALES):
            log_joint = log_marginal_likelihood(squares, log_weight, m, scale) + prior
            log_evidence[index] += log_sum(log_sum(log_joint, 2), 0).sum()
    return float(np.exp(softmax(log_evidence) @ np.log(TABLE_SCALES)))


def pattern_frequencies(log_evidence: Array) -> Array:
    """Estimate the frequencies of the noise patterns, [k], by EM.

    The uniform prior counts as `PATTERN_PRIOR_MODELS` models.

    Args:
        log_evidence: ln p(y_i | pattern), [k, n].
    """
    num_patterns, models = log_evidence.shape
    frequency = np.full(num_patterns, 1 / num_patterns)
    for _ in range(EM_STEPS):
        counts = softmax((log_evidence + np.log(frequency)[:, None]).T).sum(0)
        frequency = (counts + PATTERN_PRIOR_MODELS / num_patterns) / (models + PATTERN_PRIOR_MODELS)
    return frequency


def shared_prior(log_evidence: Array, theta: Array, floors: Array, x: Array) -> Array:
    """Return ln p(shape) for every curve, [n, s], up to a constant, estimated by EM.

    The prior of (ln D_c/D_n, ln β, ε times the floor unit) is N(X_i C, S).  C and S have a vague
    prior that counts as `PRIOR_MODELS` models: C⁰ = (`PRIOR_MEAN`; 0), S⁰ = `PRIOR_COVARIANCE`.

    Args:
        log_evidence: ln p(y_i | shape), [n, s].
        theta: (ln D_c/D_n, ln β, ε) of the shapes, [s, 3].
        floors: floor units of the curves, see `floor_units`, [n].
        x: covariates X of the curves, [n, 2].
    """
    start, models = np.stack([PRIOR_MEAN, np.zeros(3)]), len(x)
    normal = x.T @ x + PRIOR_MODELS * np.eye(x.shape[1])
    # A deviation from the mean is linear in z = (1, θ), D_i z, so that its square zᵀ D_iᵀ S⁻¹ D_i z
    # is linear in the products of the elements of z.  This needs two matrix products a step, and no
    # array [n, s, 3].  `linear` is D_i, [n, 3, 4].
    z = np.insert(theta, 0, 1.0, axis=1)
    products = (z[:, :, None] * z[:, None]).reshape(-1, 16)
    linear = np.repeat(np.eye(3, 4, 1)[None], models, axis=0)
    linear[:, 2, 3], linear[:, :, 0] = floors, -x @ start

    def log_normal(covariance: Array) -> Array:
        squares = linear.swapaxes(1, 2) @ np.linalg.inv(covariance) @ linear
        return -0.5 * squares.reshape(-1, 16) @ products.T

    prior = log_normal(PRIOR_COVARIANCE)
    for _ in range(EM_STEPS):
        # Expectation: posterior moments of each curve's shape.  Maximisation: the regression of the
        # posterior means on X, and the scatter of the posteriors around it (that of their means
        # alone would shrink S towards 0 from step to step).
        moments = (softmax(log_evidence + prior) @ products).reshape(-1, 4, 4)
        mean = (linear[:, :, 1:] @ moments[:, 1:, :1])[..., 0]
        coefficients = np.linalg.solve(normal, x.T @ mean + PRIOR_MODELS * start)
        linear[:, :, 0] = -x @ coefficients
        scatter = (linear @ moments @ linear.swapaxes(1, 2)).sum(0)
        prior = log_normal((PRIOR_MODELS * PRIOR_COVARIANCE + scatter) / (PRIOR_MODELS + models))
    return prior


def softmax(logs: Array) -> Array:
    """Return the softmax over the last axis."""
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_sum(logs: Array, axis: int) -> Array:
    """Return ln Σ exp(logs) over an axis."""
    largest = logs.max(axis, keepdims=True)
    return np.squeeze(largest + np.log(np.exp(logs - largest).sum(axis, keepdims=True)), axis)


_PRIOR_LAST_WEIGHT, _PRIOR_BACKTESTS = 0.9, 2.0
"""Prior of `last_loss_weight`, and the number of backtests that it counts as.  Chosen on the
development halves of the benchmark tables of `select` (FLAN, LCDB, LLM fine-tuning; see the
docs)."""

_LEAST_ERROR = 1e-18  # mean square error in ln L below which a backtest is left out

_MEAN_FALL_WEIGHT = 0.1
"""Shrinkage towards the mean fall of a forecast with average variance; that of other forecasts is
in proportion to their variance.  Chosen on the development halves, as are the next constants."""

_DOF, _SCALE, _POWER, _MEAN_POWER = 3.0, 0.6, 0.75, 0.1
"""The predictive Student's t has _DOF degrees of freedom and scale
_SCALE · σ^_POWER · (geometric mean of σ)^_MEAN_POWER, for standard deviations σ of the posteriors.
Chosen by log score; the errors differ less between curves than σ does."""


@dataclass(frozen=True)
class Posterior:
    """Posterior mean and variance of ln L at a target for every curve, [n] each."""

    mean: Array
    variance: Array


def posteriors(y: Array, sizes: Array, targets: Array) -> list[Posterior]:
    """Predict ln L at each of the targets from ln L at the sizes.

    The model is y_i = c_i + g_shape + s_i r, with a flat prior on c_i, r Gaussian (`Kriging`) and
    s_i distributed around the table's scale.  The priors of shapes and noise patterns are estimated
    from all candidates, and both are marginalised.

    Args:
        y: ln L, [n, m].
        sizes: positive, ascending, [m].
        targets: one or more, above the last size, [t].

    Returns:
        The posterior at each target.
    """
    shapes, kriging = Shapes.grid(sizes, targets), Kriging.patterns(sizes, targets)
    vague = -0.5 * ((shapes.theta - PRIOR_MEAN) ** 2 / np.diag(PRIOR_COVARIANCE)).sum(-1)
    squares = partial(residual_squares, y, shapes, kriging)
    scale = table_scale(squares(), kriging.log_weight, len(sizes), vague)
    marginal = partial(log_marginal_likelihood, m=len(sizes), scale=scale)
    pattern_evidence = [log_sum(marginal(q, kriging.log_weight) + vague, 2) for q in squares()]
    weight = kriging.log_weight + np.log(pattern_frequencies(np.concatenate(pattern_evidence, 1)))
    shape_evidence = np.concatenate([log_sum(marginal(q, weight), 0) for q in squares()])
    prior = shared_prior(shape_evidence, shapes.theta, floor_units(y), covariates(y))
    priors = np.split(prior, range(_BLOCK, len(y), _BLOCK))
    joint = ((q, marginal(q, weight) + p) for q, p in zip(squares(), priors, strict=True))
    return mixture_moments(y, shapes, kriging, joint, scale)


_BLOCK = 8
"""Number of curves processed at a time, so that an array [k, 8, s] fits into a processor's cache,
and memory does not grow by [k, s] with every curve."""


def residual_squares(y: Array, shapes: Shapes, kriging: Kriging) -> Iterator[Array]:
    """Yield Q = rᵀ P r of the residuals r = y_i − g_shape, [k, _BLOCK, s] for each block of curves.

    y and g are taken relative to their value at the last size, a constant that P annihilates, to
    avoid cancellation.
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
    """Return the mean and variance of ln L over shapes and patterns, at each target.

    A component of the mixture is Student's t around g(D) + the kriged residual; its variance is
    that of the pattern times the mean of the curve's squared scale given the shape,
    (b + Q/2) / (a + (m−1)/2 − 1).

    Args:
        y: ln L, [n, m].
        shapes: shapes at the sizes and targets.
        kriging: predictors of the residual at the targets.
        blocks: Q, and log weights of the components, of blocks of curves, [k, n, s] each.
        scale: scale of the table.
    """
    shape_means = shapes.targets - kriging.weights @ shapes.measured.T
    rows = np.concatenate([np.ones_like(shape_means[:, :1]), shape_means, shape_means**2], 1)
    sums = []
    for squares, log_weights in blocks:
        weights = np.exp(log_weights - log_weights.max((0, 2), keepdims=True))
        square = (weights * squares).sum(2)[:, None]
        sums.append(np.concatenate([rows @ weights.swapaxes(1, 2), square], 1))
    moments = np.concatenate(sums, -1)
    moments /= moments[:, 0].sum(0)
    weight, square = moments[:, :1], moments[:, -1:]
    first, second = np.split(moments[:, 1:-1], 2, axis=1)
    power = GAMMA_SHAPE + (y.shape[1] - 1) / 2
    square = (GAMMA_SHAPE * scale**2 * weight + square / 2) / (power - 1)
    kriged = kriging.weights @ (y - y[:, -1:]).T
    mean = (weight * kriged + first).sum(0)
    kriged -= mean
    variance = square * kriging.variance[..., None] + (weight * kriged + 2 * first) * kriged
    variance += second
    return list(map(Posterior, mean + y[:, -1], variance.sum(0)))


@dataclass(frozen=True)
class Process:
    """A Gaussian process of ln L over doublings, with hyperparameters fitted to one table.

    A curve is the sum of an unknown constant, a line whose slope at the largest size D_n is normal
    around the mean slope of all curves, a random walk of the slope, and noise.  It assumes no shape
    of the curves and nothing from other tables, so that its variance is small if the curves of the
    table are similar and smooth.

    Attributes:
        slope: mean change of ln L per doubling at D_n.
        deviations: standard deviations of the curves' slopes at D_n, of the slope's walk over one
            doubling, and of the noise, [3].
    """

    slope: float
    deviations: Array

    @classmethod
    def fit(cls, y: Array, sizes: Array) -> Process:
        """Return the maximum a posteriori process for ln L, [n, m], at sizes, [m].

        The priors are N(−.1, .15²) for the slope and N(ln (.06, .02, .02), 1) for ln of the
        deviations, wide compared to the likelihood of even three sizes.
        """
        white, _, bend, line = covariances(sizes, sizes[:0])
        components, u = np.stack([line, bend, white]), np.log2(sizes / sizes[-1])
        residual = y - y[:, -1:] + 0.1 * u  # from the line of the prior; constants have no effect
        scatter, total = residual.T @ residual, residual.sum(0)

        def negative_log_posterior(logs: Array) -> tuple[float, Array, float]:
            covariance = np.exp(2 * logs)[:, None, None] * components
            model = Kriging.solve(covariance.sum(0, keepdims=True), len(sizes))
            precision = model.precision[0]
            weight = len(y) * (u @ precision @ u) + 0.15**-2
            slope = u @ precision @ total / weight  # the most probable for these deviations
            cross = np.outer(total - len(y) * slope / 2 * u, slope * u)
            squares = scatter - cross - cross.T
            prior = (slope / 0.15) ** 2 + ((logs - _DEVIATIONS) ** 2).sum()
            objective = ((precision * squares).sum() + prior) / 2 - len(y) * model.log_weight[0]
            curvature = len(y) * precision - precision @ squares @ precision
            gradient = (covariance * curvature).sum((1, 2)) + logs - _DEVIATIONS
            return float(objective), gradient, float(slope)

        minimum = require("scipy.optimize").minimize(
            lambda logs: negative_log_posterior(logs)[:2],
            _DEVIATIONS,
            method="L-BFGS-B",
            jac=True,
            bounds=[(-7, 1), (-8, 0), (-8, 0)],
            options={"ftol": 1e-15, "gtol": 1e-9},
        )
        return cls(negative_log_posterior(minimum.x)[2] - 0.1, np.exp(minimum.x))

    def predict(self, y: Array, sizes: Array, targets: Array) -> tuple[Array, Array]:
        """Return the means of ln L at the targets, [t, n], and its standard deviations, [t].

        Args:
            y: ln L, [n, m].
            sizes: [m].
            targets: [t].
        """
        white, _, bend, line = covariances(sizes, targets)
        components = np.stack([line, bend, white])
        kriging = Kriging.solve(np.tensordot(self.deviations**2, components, 1)[None], len(sizes))
        residual = y - y[:, -1:] - self.slope * np.log2(sizes / sizes[-1])
        change = self.slope * np.log2(targets / sizes[-1])[:, None]
        return y[:, -1] + change + kriging.weights[0] @ residual.T, np.sqrt(kriging.variance[0])


_DEVIATIONS = np.log([0.06, 0.02, 0.02])  # prior mean of ln `Process.deviations`


@dataclass(frozen=True)
class Backtest:
    """Forecasts at a size of a table from its first sizes, and the true ln L there.

    Attributes:
        num_sizes: number of first sizes used.
        last: ln L at the last size used, [n].
        truth: ln L at the forecast size, [n].
        posterior: forecast of the hierarchical model.
        mean: forecast of the Gaussian process, [n].
        deviation: standard deviation of the Gaussian process.
    """

    num_sizes: int
    last: Array
    truth: Array
    posterior: Posterior
    mean: Array
    deviation: float


def backtests(y: Array, sizes: Array) -> list[Backtest]:
    """Forecast all later sizes from the first k sizes, for each k from `FEWEST_SIZES`.

    Args:
        y: ln L, [n, m].
        sizes: [m].
    """
    results = []
    for count in range(FEWEST_SIZES, len(sizes)):
        early, early_sizes, later = y[:, :count], sizes[:count], sizes[count:]
        means, deviations = Process.fit(early, early_sizes).predict(early, early_sizes, later)
        blend = posteriors(early, early_sizes, later)
        columns = zip(y[:, count:].T, blend, means, deviations, strict=True)
        results += [Backtest(count, early[:, -1], *column) for column in columns]
    return results


def last_loss_weight(tests: Iterable[Backtest]) -> float:
    """Return the weight of the last losses in the differences between candidates, from 0 to 1.

    Let f, l and t be the forecast, last and true ln L of a backtest, each centred over the
    candidates.  The weight w = [Σ (t − f)ᵀ(l − f) / s] / [Σ (l − f)ᵀ(l − f) / s] minimises
    Σ |t − (1 − w) f − w l|² / s over the backtests, where s is the mean square of t − f and t − l
    together, so that all backtests have similar weight.  The prior counts as `_PRIOR_BACKTESTS`
    more backtests.
    """
    numerator, denominator = _PRIOR_BACKTESTS * _PRIOR_LAST_WEIGHT, _PRIOR_BACKTESTS
    for test in tests:
        forecast, last, truth = map(_centre, (test.posterior.mean, test.last, test.truth))
        error, gap = truth - forecast, last - forecast
        squares = np.mean((truth - last) ** 2 + error**2)
        if squares > _LEAST_ERROR:
            numerator += float(error @ gap / squares)
            denominator += float(gap @ gap / squares)
    return float(np.clip(numerator / denominator, 0.0, 1.0))


_PRIOR_ODDS, _EVIDENCE, _MOST_EVIDENCE = -3.0, 4.0, 1.0
"""Constants of `trust_in_process`: prior log odds of the process against the hierarchical model;
their growth per nat of mean evidence, times the number of different first sizes of the backtests;
and the largest |evidence| of a backtest, in nats per candidate.  Chosen on the development
halves."""


def trust_in_process(tests: Sequence[Backtest], weight: float) -> float:
    """Return the posterior probability that the Gaussian process describes a table, from 0 to 1.

    The evidence is the log density of the true differences between candidates in the backtests
    under the process, minus that under a Gaussian around the scores of the hierarchical model with
    the idiosyncratic deviation.

    Args:
        tests: backtests of the table.
        weight: weight of the last losses in the scores, see `last_loss_weight`.
    """
    gains = []
    for test in tests:
        posterior, truth = test.posterior, _centre(test.truth)
        fall = test.last - posterior.mean
        score = _centre(posterior.mean + weight * _centre(fall))
        deviation = idiosyncratic_deviation(student_scale(posterior.variance), fall)
        blend_loss = ((truth - score) / deviation) ** 2 / 2 + np.log(deviation)
        process_loss = ((truth - _centre(test.mean)) / test.deviation) ** 2 / 2
        gains.append(np.mean(blend_loss - process_loss) - np.log(test.deviation))
    gain = np.clip(gains, -_MOST_EVIDENCE, _MOST_EVIDENCE).mean() if gains else 0.0
    odds = _PRIOR_ODDS + _EVIDENCE * gain * len({test.num_sizes for test in tests})
    return float(1 / (1 + np.exp(-odds)))


def _centre(values: Array) -> Array:
    """Return the values minus their mean."""
    return values - values.mean()


def student_scale(variance: Array) -> Array:
    """Return the scales of the predictive Student's t, [n], for posterior variances, [n]."""
    deviation = np.sqrt(variance)
    return _SCALE * deviation**_POWER * np.exp(_MEAN_POWER * np.log(deviation).mean())


@dataclass(frozen=True)
class BlendForecast:
    """The forecasts of n curves at a target.

    Attributes:
        fall: predicted decrease of ln L from each curve's last loss to its posterior mean, [n].
        predictive: Student's t distributions of ln L (`student_scale`); their centres are the
            posterior means, and where the posterior variance is large, they are shrunk towards the
            mean `fall` of all curves (`_MEAN_FALL_WEIGHT`).
        choice: ln of the score that ranks the curves, [n]: the posterior means, whose differences
            are shrunk towards those of the last losses by `last_loss_weight`, and then towards
            those of the Gaussian process as far as `trust` says.
        deviation: standard deviation of ln L in the Gaussian process, [n].
        trust: the probability that the Gaussian process describes this table, [n].
    """

    predictive: Student
    choice: Array
    fall: Array
    deviation: Array
    trust: Array


def forecasts(sizes: Array, losses: Array, targets: Sequence[float]) -> list[BlendForecast]:
    """Forecast ln L at each of the targets.

    Args:
        sizes: `FEWEST_SIZES` or more, positive, ascending, [m].
        losses: [n, m].
        targets: sizes above the last one.
    """
    y, target_sizes = np.log(losses), np.array(targets)
    tests, results = backtests(y, sizes), []
    weight = last_loss_weight(tests)
    trust = trust_in_process(tests, weight)
    means, deviations = Process.fit(y, sizes).predict(y, sizes, target_sizes)
    moments_of_targets = posteriors(y, sizes, target_sizes)
    for moments, mean, deviation in zip(moments_of_targets, means, deviations, strict=True):
        # Forecasts that fall more than the mean over candidates are more often too low than too
        # high: each is shrunk towards the mean fall, in proportion to its variance.
        fall = y[:, -1] - moments.mean
        excess = _centre(fall)
        shrinkage = np.minimum(_MEAN_FALL_WEIGHT * moments.variance / moments.variance.mean(), 1)
        location, dof = moments.mean + shrinkage * excess, np.full(len(y), _DOF)
        predictive = Student(location, student_scale(moments.variance), dof)
        choice = moments.mean + weight * excess
        choice += trust * (_centre(mean) - _centre(choice))
        process = np.full(len(y), deviation), np.full(len(y), trust)
        results.append(BlendForecast(predictive, choice, fall, *process))
    return results


def forecast_ahead(
    sizes: Array, losses: Array, row: int, last: tuple[float, float], target: float
) -> BlendForecast:
    """Forecast ln L at the target for one curve that has a larger size than the others.

    The curve is forecast with the others from their common sizes, and corrected by the error of
    that forecast at its last size.  The error is modelled as a random walk over doublings.

    Args:
        sizes: common sizes of all curves, positive, ascending, [m].
        losses: losses at these sizes, [n, m].
        row: row of the curve.
        last: larger size of the curve, and its loss there.
        target: size of the forecast, above the larger size.

    Returns:
        The forecast of that curve alone.
    """
    last_size, log_loss = last[0], np.log(last[1])
    at_last, at_target = forecasts(sizes, losses, [last_size, target])
    remaining = np.sqrt(np.log(target / last_size) / np.log(target / sizes[-1]))
    index, student = np.array([row]), at_target.predictive.rows(np.array([row]))
    location = student.location + log_loss - at_last.predictive.location[index]
    return BlendForecast(
        predictive=Student(location, student.scale * remaining, student.dof),
        choice=at_target.choice[index] + log_loss - at_last.choice[index],
        fall=at_target.fall[index],
        deviation=at_target.deviation[index],
        trust=at_target.trust[index],
    )
