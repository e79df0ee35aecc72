"""The method "blend" of `select`: a hierarchical model of rectified shapes, and today's losses.

A loss curve is a rectified shape from a fixed grid of parameters and what that leaves over: noise
with a drifting level and slope.  What the candidates share (noise, its patterns, a prior of shapes)
is learnt from all their curves.  The prediction is a mixture over shapes and patterns; doubtful
curves are drawn a little towards the mean fall.  The choice is made between forecasts whose
differences are drawn towards those of the last losses, as far as that would have helped at the
table's smaller sizes.
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
    def at(cls, sizes: Array, targets: Array) -> Shapes:
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
"""White noise σ, level drift τ and slope drift κ in units of a curve's own scale.  The slope always
drifts: that a curve follows the rectified law over all further doublings is not believed."""


def covariances(sizes: Array, targets: Array) -> tuple[Array, Array, Array, Array]:
    """Return those of a curve's parts over doublings, u = log₂(D / D_n), [m + t, m + t] each.

    Level and slope walk away from D_n in both directions, so that a smaller subset more changes
    nothing for the others.  With a = min(|u|, |u'|), b = max(|u|, |u'|), for u and u' on one side
    of 0, and 0 on two sides: white noise 1[u = u'], which targets have none of; a level's walk, a;
    a slope's walk, a bend of a² (3b − a) / 6; and, on both sides, u u', a line's deviation.
    """
    u = np.log2(np.append(sizes, targets) / sizes[-1])
    line, away = np.multiply.outer(u, u), np.abs(u)
    a, b = np.minimum.outer(away, away), np.maximum.outer(away, away)
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
    def at(cls, sizes: Array, targets: Array) -> Kriging:
        """Return the predictors for `NOISE_PATTERNS`; a line's deviation is worth a doubling's bend."""
        white, level, bend, line = covariances(sizes, targets)
        slope = bend + line
        patterns = [s**2 * white + t**2 * level + k**2 * slope for s, t, k in NOISE_PATTERNS]
        return cls.of(np.stack(patterns), len(sizes))

    @classmethod
    def of(cls, covariance: Array, points: int) -> Kriging:
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

    Times ε it is what curves share of their floors: E = ε L(D_n) is shared as a loss, not as a
    share of each model's own loss, since the test set is the same for all, and so is most of what
    cannot be learnt of it.
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
    """Return the scale around which those of the curves lie: its posterior mean on a grid.

    Args:
        blocks: Q of some curves after others, [k, n, s] each; see `residual_squares`.
        log_weight, points: as in `log_marginal_likelihood`.
        prior: ln p(shape), [s].
    """
    logs = np.zeros(len(TABLE_SCALES))
    for squares in blocks:
        for place, scale in enumerate(TABLE_SCALES):
            evidence = log_marginal_likelihood(squares, log_weight, points, scale) + prior
            logs[place] += log_sum(log_sum(evidence, 2), 0).sum()
    return float(np.exp(normalised(logs) @ np.log(TABLE_SCALES)))


def pattern_frequencies(log_evidence: Array) -> Array:
    """Return how often each pattern of noise occurs, [k]: EM from equal shares worth 5 models.

    Args:
        log_evidence: ln p(y_i | pattern), [k, n].
    """
    patterns, models = log_evidence.shape
    share = np.full(patterns, 1 / patterns)
    for _ in range(EM_STEPS):
        counts = normalised((log_evidence + np.log(share)[:, None]).T).sum(0)
        share = (counts + PATTERN_PRIOR_MODELS / patterns) / (models + PATTERN_PRIOR_MODELS)
    return share


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
    away = np.repeat(np.eye(3, 4, 1)[None], models, axis=0)
    away[:, 2, 3], away[:, :, 0] = floors, -x @ start

    def log_normal(spread: Array) -> Array:
        squares = away.swapaxes(1, 2) @ np.linalg.inv(spread) @ away
        return -0.5 * squares.reshape(-1, 16) @ products.T

    prior = log_normal(PRIOR_COVARIANCE)
    for _ in range(EM_STEPS):
        # Expectation: where on the grid each curve is.  Maximisation: the regression of these means
        # on X, and the scatter of the whole posteriors around it, not of their means alone, which
        # would shrink S towards 0 from step to step.
        moments = (normalised(log_evidence + prior) @ products).reshape(-1, 4, 4)
        mean = (away[:, :, 1:] @ moments[:, 1:, :1])[..., 0]
        coefficients = np.linalg.solve(normal, x.T @ mean + PRIOR_MODELS * start)
        away[:, :, 0] = -x @ coefficients
        scatter = (away @ moments @ away.swapaxes(1, 2)).sum(0)
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


_LAST, _WORTH_OF_LAST = 0.9, 2.0
"""Before any backtest: how far the differences between candidates are drawn towards those of their
last losses, and how many backtests that is worth.  Chosen on development halves of the tables that
judge `select` (FLAN, LCDB, LLM fine-tuning; see the docs)."""

_ROUNDING = 1e-18  # of a mean square error in ln L: less tells nothing

_TO_MEAN = 0.1
"""How far a forecast of average variance is drawn to the mean fall; the others in proportion to
their variance.  From the development halves, as are the next."""

_DOF, _SCALE, _OWN = 3.0, 0.6, 0.75
"""Of Student's t: the scale is _SCALE times a curve's standard deviation to the power _OWN, times
their geometric mean over the curves to the power 0.1.  Widths are known less well than the model
says, and grow less than its own.  From the log score of forecasts on the development halves."""


@dataclass(frozen=True)
class Posterior:
    """Mean and variance of ln L at a target for every curve, [n]."""

    mean: Array
    variance: Array


def posteriors(y: Array, sizes: Array, targets: Array) -> list[Posterior]:
    """Predict ln L at each of the targets from ln L at the sizes.

    y_i = c_i + g_shape + s_i r with a flat prior on c_i, r Gaussian (`Kriging`) and s_i around a
    scale that the candidates share.  Shapes and patterns of noise are a priori as the candidates
    share them, and summed over.

    Args:
        y: [n, m].
        sizes: positive, ascending, [m].
        targets: one or more, above the last size, [t].
    """
    shapes, kriging = Shapes.at(sizes, targets), Kriging.at(sizes, targets)
    vague = -0.5 * ((shapes.theta - PRIOR_MEAN) ** 2 / np.diag(PRIOR_COVARIANCE)).sum(-1)
    squares = partial(residual_squares, y, shapes, kriging)
    scale = table_scale(squares(), kriging.log_weight, len(sizes), vague)
    marginal = partial(log_marginal_likelihood, points=len(sizes), scale=scale)
    of_patterns = [log_sum(marginal(q, kriging.log_weight) + vague, 2) for q in squares()]
    weight = kriging.log_weight + np.log(pattern_frequencies(np.concatenate(of_patterns, 1)))
    of_shapes = np.concatenate([log_sum(marginal(q, weight), 0) for q in squares()])
    prior = shared_prior(of_shapes, shapes.theta, floor_units(y), covariates(y))
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
    of_shape = ((shape @ precision) * shape).sum(-1)[:, None]
    for part in np.split(curve, range(_BLOCK, len(y), _BLOCK)):
        seen = part @ precision
        of_curve = (seen * part).sum(-1, keepdims=True)
        yield np.maximum(of_curve + of_shape - 2 * (seen @ shape.T), 0.0)


def mixture_moments(
    y: Array, shapes: Shapes, kriging: Kriging, blocks: Iterable[tuple[Array, Array]], scale: float
) -> list[Posterior]:
    """Return the first two moments of a mixture, for each target.

    A component is Student's t around g(D) + the kriged residual; its variance is that of the
    pattern times the mean of the curve's squared scale given the shape, (b + Q/2) / (A − 1).

    Args:
        y: [n, m].
        shapes, kriging: at the targets.
        blocks: Q and the log weights of some curves after others, [k, n, s] each.
        scale: that of the table.
    """
    of_shape = shapes.targets - kriging.weights @ shapes.measured.T
    rows = np.concatenate([np.ones_like(of_shape[:, :1]), of_shape, of_shape**2], 1)
    sums = []
    for squares, logs in blocks:
        weights = np.exp(logs - logs.max((0, 2), keepdims=True))
        square = (weights * squares).sum(2)[:, None]
        sums.append(np.concatenate([rows @ weights.swapaxes(1, 2), square], 1))
    moments = np.concatenate(sums, -1)
    moments /= moments[:, 0].sum(0)
    weight, square = moments[:, :1], moments[:, -1:]
    first, second = np.split(moments[:, 1:-1], 2, axis=1)
    square = (GAMMA_SHAPE * scale**2 * weight + square / 2) / (
        GAMMA_SHAPE + (y.shape[1] - 1) / 2 - 1
    )
    data = kriging.weights @ (y - y[:, -1:]).T
    mean = (weight * data + first).sum(0)
    data -= mean
    spread = square * kriging.variance[..., None] + (weight * data + 2 * first) * data + second
    return list(map(Posterior, mean + y[:, -1], spread.sum(0)))


@dataclass(frozen=True)
class Process:
    """A Gaussian process of ln L over doublings, whose numbers are this table's own.

    A curve is a free constant, a line whose slope at the largest size D_n is normal around one
    that all curves share, a slope that walks away from it, and noise.  It knows no shape and no
    other table, so that it is sure where the curves of this one are alike and smooth.

    Attributes:
        slope: the mean of ln L's change in a doubling at D_n.
        deviations: of a curve's slope from it, of the slope's walk over one doubling, and of the
            noise, [3].
    """

    slope: float
    deviations: Array

    @classmethod
    def fit(cls, y: Array, sizes: Array) -> Process:
        """Return the most probable numbers for ln L [n, m] at sizes [m].

        The slope is N(−.1, .15²), and ln of the deviations N(ln (.06, .02, .02), 1): wide beside
        what even three sizes tell.
        """
        white, _, bend, line = covariances(sizes, sizes[:0])
        parts, u = np.stack([line, bend, white]), np.log2(sizes / sizes[-1])
        away = y - y[:, -1:] + 0.1 * u  # from the prior's line; kriging sees no constant
        scatter, total = away.T @ away, away.sum(0)

        def minus_log(logs: Array) -> tuple[float, Array, float]:
            covariance = np.exp(2 * logs)[:, None, None] * parts
            model = Kriging.of(covariance.sum(0, keepdims=True), len(sizes))
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
        """Return the means of ln L at targets, [t, n], and a curve's deviation there, [t]."""
        white, _, bend, line = covariances(sizes, targets)
        parts = np.stack([line, bend, white])
        kriging = Kriging.of(np.tensordot(self.deviations**2, parts, 1)[None], len(sizes))
        away = y - y[:, -1:] - self.slope * np.log2(sizes / sizes[-1])
        ahead = self.slope * np.log2(targets / sizes[-1])[:, None]
        return y[:, -1] + ahead + kriging.weights[0] @ away.T, np.sqrt(kriging.variance[0])


_DEVIATIONS = np.log([0.06, 0.02, 0.02])


@dataclass(frozen=True)
class Backtest:
    """What the first sizes of a table said of a later one.

    Attributes:
        sizes: how many of the table's first sizes were read.
        last, truth: ln L at the last of them, and at the later size, [n].
        posterior: the blend's forecast of the later size.
        mean, deviation: the process's, [n], and one number.
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
        seen, at, later = y[:, :count], sizes[:count], sizes[count:]
        means, deviations = Process.fit(seen, at).predict(seen, at, later)
        columns = zip(y[:, count:].T, posteriors(seen, at, later), means, deviations, strict=True)
        results += [Backtest(count, seen[:, -1], *column) for column in columns]
    return results


def last_loss_weight(tests: Iterable[Backtest]) -> float:
    """Return how far differences between candidates are drawn to their last losses', 0 to 1.

    With f, l and t the predicted, the last and the true ln L of a backtest, each less its mean over
    the candidates, w = Σ (t − f)ᵀ(l − f) / s over Σ (l − f)ᵀ(l − f) / s minimises
    Σ |t − (1 − w) f − w l|² / s, where s, the mean square of both errors, gives backtests near and
    far one weight.  A prior stands for further backtests; without any it is all there is.
    """
    agreement, spread = _WORTH_OF_LAST * _LAST, _WORTH_OF_LAST
    for test in tests:
        forecast, last, truth = map(_centred, (test.posterior.mean, test.last, test.truth))
        error, gap = truth - forecast, last - forecast
        squares = np.mean((truth - last) ** 2 + error**2)
        if squares > _ROUNDING:
            agreement += float(error @ gap / squares)
            spread += float(gap @ gap / squares)
    return float(np.clip(agreement / spread, 0.0, 1.0))


_PRIOR_ODDS, _EVIDENCE, _MOST_EVIDENCE = -3.0, 4.0, 1.0
"""Of the process against the blend: ln odds before any backtest, their growth with each number of
sizes that backtests began from, and nats a candidate that one backtest counts for at most.  From
the development halves."""


def trust_in_process(tests: Sequence[Backtest], share: float) -> float:
    """Return the probability that a table is one that the process describes, 0 to 1.

    Evidence is how much denser than the blend it said the differences between candidates in the
    backtests: its Gaussian against that of what is chosen by, with the width that P(best) has.

    Args:
        tests: the table's backtests.
        share: how far the blend's differences are drawn to the last losses'.
    """
    gains = []
    for test in tests:
        posterior, truth = test.posterior, _centred(test.truth)
        fall = test.last - posterior.mean
        choice = _centred(posterior.mean + share * _centred(fall))
        width = idiosyncratic_deviation(student_scale(posterior.variance), fall)
        blend = ((truth - choice) / width) ** 2 / 2 + np.log(width)
        process = ((truth - _centred(test.mean)) / test.deviation) ** 2 / 2
        gains.append(np.mean(blend - process) - np.log(test.deviation))
    gain = np.clip(gains, -_MOST_EVIDENCE, _MOST_EVIDENCE).mean() if gains else 0.0
    odds = _PRIOR_ODDS + _EVIDENCE * gain * len({test.sizes for test in tests})
    return float(1 / (1 + np.exp(-odds)))


def _centred(values: Array) -> Array:
    return values - values.mean()


def student_scale(variance: Array) -> Array:
    """Return the scale of a forecast's Student's t for a posterior's variance, [n]."""
    width = np.sqrt(variance)
    return _SCALE * width**_OWN * np.exp(0.1 * np.log(width).mean())


@dataclass(frozen=True)
class BlendForecast:
    """What is forecast of n curves at a target.

    Attributes:
        predictive: the distribution of ln L, Student's t (`_DOF`, `_SCALE`) around the posterior's
            mean, drawn to the mean fall where it is doubtful (`_TO_MEAN`).
        choice: what to choose by, [n]: that mean with its differences between the candidates drawn
            towards those of the last losses by `last_loss_weight`, and then towards those of the
            process's forecasts by the trust in it.
        fall: how far each curve alone would fall from its last loss, [n].
        deviation: of ln L by the process, [n].
        trust: the probability that the process describes this table, [n].
    """

    predictive: Student
    choice: Array
    fall: Array
    deviation: Array
    trust: Array


def forecasts(sizes: Array, losses: Array, targets: Sequence[float]) -> list[BlendForecast]:
    """Predict ln L at targets.

    Args:
        sizes: positive, ascending, [m].
        losses: [n, m].
        targets: above the last size.

    Raises:
        ValueError: fewer than three sizes, or a target that is not above them.
    """
    if len(sizes) < FEWEST_SIZES:
        text = f"blend needs {FEWEST_SIZES} sizes above 0 or more to see a curve bend"
        raise ValueError(f"{text}; there are {len(sizes)}")
    if not min(targets) > sizes[-1]:
        raise ValueError(f"the target {min(targets):g} is not above the last size, {sizes[-1]:g}")
    y, at = np.log(losses), np.array(targets)
    tests, results = backtests(y, sizes), []
    share = last_loss_weight(tests)
    trust = trust_in_process(tests, share)
    means, deviations = Process.fit(y, sizes).predict(y, sizes, at)
    for moments, mean, deviation in zip(posteriors(y, sizes, at), means, deviations, strict=True):
        # Of forecasts that fall further than the candidates' mean, more are too low than too high:
        # each moves back by a part of the difference.  The part grows with the variance, so that a
        # curve that is sure of its fall keeps it.
        fall = y[:, -1] - moments.mean
        further = _centred(fall)
        doubt = np.minimum(_TO_MEAN * moments.variance / moments.variance.mean(), 1)
        dof = np.full(len(y), _DOF)
        predictive = Student(moments.mean + doubt * further, student_scale(moments.variance), dof)
        choice = moments.mean + share * further
        choice += trust * (_centred(mean) - _centred(choice))
        widths = np.full(len(y), deviation), np.full(len(y), trust)
        results.append(BlendForecast(predictive, choice, fall, *widths))
    return results


def forecast_ahead(
    sizes: Array, losses: Array, row: int, further: tuple[float, float], target: float
) -> BlendForecast:
    """Predict ln L at the target of one curve that was seen at a larger size than all others.

    It is forecast with the others from the sizes they have, and moved by what its further loss was
    higher or lower than so forecast: the error is taken to be a random walk over doublings, of
    which that part is known then.

    Args:
        sizes: of all curves, positive, ascending, [m].
        losses: [n, m].
        row: the curve.
        further: the larger size, and its loss there.
        target: above that size.

    Returns:
        As `forecasts` for the target, of that curve alone.
    """
    size, loss = further
    near, far = forecasts(sizes, losses, [size, target])
    left = np.sqrt(np.log(target / size) / np.log(target / sizes[-1]))
    measured, only, student = np.log(loss), np.array([row]), far.predictive.rows(np.array([row]))
    location = student.location + measured - near.predictive.location[only]
    return BlendForecast(
        predictive=Student(location, student.scale * left, student.dof),
        choice=far.choice[only] + measured - near.choice[only],
        fall=far.fall[only],
        deviation=far.deviation[only],
        trust=far.trust[only],
    )
