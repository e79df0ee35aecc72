"""The grid of rectified shapes: the mean forecast of ln L by a hierarchical model of all curves.

ln L of a curve is a shape of the rectified law, from a fixed grid of parameters, plus a residual:
noise with a drifting level and slope.  The scale of the noise, the frequencies of its patterns and
the prior of the shapes are estimated from the curves of all candidates, and the forecast is the
mean of a mixture over shapes and patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from .predictive import Array

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
        theta: (ln D_c/D_n, ln β, ε) of each shape, [s, 3].  D_c is relative to the largest size, so
            that neither the unit of sizes nor an added smaller size changes the grid or its prior.
        measured: g at the measured sizes, [s, m].
        targets: g at the targets, [t, s].
    """

    theta: Array
    measured: Array
    targets: Array

    @classmethod
    def grid(cls, sizes: Array, targets: Array) -> Shapes:
        """Return the grid of shapes.

        Args:
            sizes: positive, the largest last, [m].
            targets: [t].
        """
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

    They are functions of the doublings from the largest size, u = log₂(D / D_n), with
    a = min(|u|, |u'|) and b = max(|u|, |u'|):

    - white noise: 1 where u = u' is a measured size, else 0;
    - random walk of the level: a;
    - random walk of the slope: a² (3b − a) / 6;
    - random slope: u u'.

    The walks start at D_n in both directions, with covariance 0 between the two sides, so that an
    added smaller size changes nothing at the other sizes.

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

    It predicts t targets from m measured values, under each of k noise patterns of scale 1.

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
        simple_weights = cross @ inverse
        missing = 1 - simple_weights.sum(-1, keepdims=True)
        variance = (missing**2 / total - (cross * simple_weights).sum(-1, keepdims=True))[..., 0]
        variance += np.diagonal(covariance, 0, 1, 2)[:, m:]
        precision = inverse - column_sums.swapaxes(1, 2) * column_sums / total
        return cls(precision, -log_norm, simple_weights + missing * column_sums / total, variance)


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

    Its product with ε is the floor E = ε L(D_n) in a unit common to all curves.  The prior is on
    the floor as a loss, not as a fraction of each model's loss, as all models have the same test
    set, which causes most of the irreducible loss.

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
    """Return ln p(y_i | shape, pattern), [k, n, s], up to a constant.

    The scale of each curve's noise is integrated out.  Its square has an inverse gamma distribution
    with shape parameter a and rate b = a S², so that the Gaussian evidence is
    b^a / (b + Q/2)^(a + (m−1)/2).

    Args:
        squares: Q = rᵀ P r of every residual r, [k, n, s].
        log_weight: log weights of the patterns, [k].
        m: number of sizes, m.
        scale: scale of the table, S.
    """
    b = GAMMA_SHAPE * scale**2
    power = GAMMA_SHAPE + (m - 1) / 2
    return GAMMA_SHAPE * np.log(b) + log_weight[:, None, None] - power * np.log(b + squares / 2)


def table_scale(blocks: Iterable[Array], log_weight: Array, m: int, prior: Array) -> float:
    """Return the scale of the table, around which the scales of the curves are distributed.

    It is the geometric mean of the posterior on the grid `TABLE_SCALES`.

    Args:
        blocks: Q for each block of curves, [k, n, s] each; see `residual_squares`.
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
    """Estimate the frequencies of the noise patterns, [k], by expectation maximisation.

    The prior, equal frequencies, counts as `PATTERN_PRIOR_MODELS` models.

    Args:
        log_evidence: ln p(y_i | pattern), [k, n].
    """
    num_patterns, count = log_evidence.shape
    frequency = np.full(num_patterns, 1 / num_patterns)
    for _ in range(EM_STEPS):
        counts = softmax((log_evidence + np.log(frequency)[:, None]).T).sum(0)
        frequency = (counts + PATTERN_PRIOR_MODELS / num_patterns) / (count + PATTERN_PRIOR_MODELS)
    return frequency


def shared_prior(log_evidence: Array, theta: Array, floors: Array, x: Array) -> Array:
    """Return ln p(shape) for every curve, [n, s], up to a constant.

    The prior of (ln D_c/D_n, ln β, ε times the floor unit) is N(X_i C, S), where C and S are
    estimated by expectation maximisation.  They have a vague prior that counts as `PRIOR_MODELS`
    count: C⁰ = (`PRIOR_MEAN`; 0), S⁰ = `PRIOR_COVARIANCE`.

    Args:
        log_evidence: ln p(y_i | shape), [n, s].
        theta: (ln D_c/D_n, ln β, ε) of the shapes, [s, 3].
        floors: floor units of the curves, see `floor_units`, [n].
        x: covariates X of the curves, [n, 2].
    """
    start, count = np.stack([PRIOR_MEAN, np.zeros(3)]), len(x)
    normal = x.T @ x + PRIOR_MODELS * np.eye(x.shape[1])
    # A deviation from the mean is linear in z = (1, θ), D_i z, so that its square zᵀ D_iᵀ S⁻¹ D_i z
    # is linear in the products of the elements of z.  This needs two matrix products a step, and no
    # array [n, s, 3].  `linear` is D_i, [n, 3, 4].
    z = np.insert(theta, 0, 1.0, axis=1)
    products = (z[:, :, None] * z[:, None]).reshape(-1, 16)
    linear = np.repeat(np.eye(3, 4, 1)[None], count, axis=0)
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
        prior = log_normal((PRIOR_MODELS * PRIOR_COVARIANCE + scatter) / (PRIOR_MODELS + count))
    return prior


def softmax(logs: Array) -> Array:
    """Return the softmax over the last axis."""
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_sum(logs: Array, axis: int) -> Array:
    """Return ln Σ exp(logs) over an axis."""
    largest = logs.max(axis, keepdims=True)
    return np.squeeze(largest + np.log(np.exp(logs - largest).sum(axis, keepdims=True)), axis)


def posterior_means(y: Array, sizes: Array, targets: Array) -> Array:
    """Return the posterior mean of ln L of n curves at the targets, [t, n].

    The model is y_i = c_i + g_shape + s_i r, with a flat prior on c_i, r Gaussian (`Kriging`) and
    s_i distributed around the table's scale.  The priors of shapes and noise patterns are estimated
    from all candidates, and both are marginalised.

    Args:
        y: ln L, [n, m].
        sizes: positive, ascending, [m].
        targets: [t].
    """
    shapes, kriging = Shapes.grid(sizes, targets), Kriging.patterns(sizes, targets)
    weak_prior = -0.5 * ((shapes.theta - PRIOR_MEAN) ** 2 / np.diag(PRIOR_COVARIANCE)).sum(-1)
    squares = partial(residual_squares, y, shapes, kriging)
    scale = table_scale(squares(), kriging.log_weight, len(sizes), weak_prior)
    marginal = partial(log_marginal_likelihood, m=len(sizes), scale=scale)
    pattern_evidence = [log_sum(marginal(q, kriging.log_weight) + weak_prior, 2) for q in squares()]
    weight = kriging.log_weight + np.log(pattern_frequencies(np.concatenate(pattern_evidence, 1)))
    shape_evidence = np.concatenate([log_sum(marginal(q, weight), 0) for q in squares()])
    prior = shared_prior(shape_evidence, shapes.theta, floor_units(y), covariates(y))
    priors = np.split(prior, range(_BLOCK, len(y), _BLOCK))
    joint = (marginal(q, weight) + p for q, p in zip(squares(), priors, strict=True))
    return mixture_means(y, shapes, kriging, joint)


_BLOCK = 8
"""Number of curves processed at a time, so that an array [k, 8, s] fits into a processor's cache,
and memory does not grow by [k, s] with every curve."""


def residual_squares(y: Array, shapes: Shapes, kriging: Kriging) -> Iterator[Array]:
    """Yield Q = rᵀ P r of the residuals r = y_i − g_shape, [k, _BLOCK, s] for each block of curves.

    The last value is subtracted from y and from g, to avoid cancellation; P annihilates constants.
    """
    curve, shape, precision = y - y[:, -1:], shapes.measured, kriging.precision
    shape_square = ((shape @ precision) * shape).sum(-1)[:, None]
    for block in np.split(curve, range(_BLOCK, len(y), _BLOCK)):
        projected = block @ precision
        curve_square = (projected * block).sum(-1, keepdims=True)
        yield np.maximum(curve_square + shape_square - 2 * (projected @ shape.T), 0.0)


def mixture_means(y: Array, shapes: Shapes, kriging: Kriging, blocks: Iterable[Array]) -> Array:
    """Return the mean of ln L over shapes and patterns, at each target, [t, n].

    A component's mean is g(D) plus the residual that kriging predicts.

    Args:
        y: ln L, [n, m].
        shapes: shapes at the sizes and targets.
        kriging: predictors of the residual at the targets.
        blocks: log weights of the components for each block of curves, [k, n, s] each.
    """
    shape_means = shapes.targets - kriging.weights @ shapes.measured.T
    kriged = kriging.weights @ (y - y[:, -1:]).T
    residuals = np.split(kriged, range(_BLOCK, len(y), _BLOCK), axis=2)
    means = []
    for logs, residual in zip(blocks, residuals, strict=True):
        weights = np.exp(logs - logs.max((0, 2), keepdims=True))
        weights /= weights.sum((0, 2), keepdims=True)
        products = weights.sum(2)[:, None] * residual + shape_means @ weights.swapaxes(1, 2)
        means.append(products.sum(0))
    return y[:, -1] + np.concatenate(means, 1)
