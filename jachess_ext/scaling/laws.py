"""Scaling laws L(D): their bounded parameters, ln L with its gradient, and starts of a fit.

Curves are rows; everything is computed in double precision.  `fit` passes losses and sizes in units
of each curve (`fitted.Scale`), so that the bounds of parameters are relative to the curve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from .predictive import Array

if TYPE_CHECKING:
    from torch import Tensor

    from ..ntk import Spectrum

Exponents = tuple[Array | float, Array | float]
"""(a, b): the unit of a parameter is (unit of losses)^a · (unit of sizes)^b."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a law with its bounds.

    The fit uses a coordinate: ln(value) if `is_log` (for positive values of unknown magnitude),
    else the value itself.

    Attributes:
        name: key in `FittedLaw.params`.
        low, high: bounds of the value.
        is_log: whether the coordinate is the logarithm.
    """

    name: str
    low: float
    high: float
    is_log: bool = True

    def coordinate(self, value: Array | float) -> Array | float:
        """Return the coordinate of a value; the logarithm of 0 is −inf, of negative values NaN."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(value) if self.is_log else value

    def value(self, coordinate: Array) -> Array:
        """Return the value at a coordinate."""
        return np.exp(coordinate) if self.is_log else coordinate


def log_sizes(sizes: Array) -> Array:
    """Return ln D, and 0 in place of −inf where D = 0; laws must not use this 0."""
    return np.log(np.where(sizes > 0, sizes, 1.0))


class Law(ABC):
    """A law L(D) with p parameters."""

    name: str
    parameters: tuple[Parameter, ...]
    held_by_stage: tuple[tuple[str, ...], ...] = ((),)
    """Names of the parameters that are held at their initial value, for each stage of the fit."""
    formula: str
    reads_zero = False
    """Whether the law is defined at D = 0 (the loss before fine-tuning)."""
    sizes_are_examples = False
    """Whether the law holds only for sizes in training examples, and in no other unit."""

    @abstractmethod
    def log_loss(self, u: Array, sizes: Array, needs_gradient: bool = True) -> tuple[Array, Array]:
        """Return ln L, [n, m], and its gradient with respect to the coordinates, [n, m, p].

        Args:
            u: coordinates, [n, p].
            sizes: numbers of training examples D ≥ 0, [n, m]; 0 is the model before fine-tuning.
            needs_gradient: whether to compute the gradient; if not, it is an empty array.
        """

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        """Return k starts of the fit of each curve, [n, k, p], in coordinates.

        They are a grid of all parameters except B, which is fitted to the losses.

        Args:
            sizes: D, [n, m].
            log_losses: ln L, [n, m].
            weights: weights of the losses, [n, m]; 0 leaves one out.
        """
        raise NotImplementedError(f"the {self.name} law is not fitted from a grid of starts")

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        """Return the exponents of the unit of each parameter that has a unit, by name.

        Args:
            values: values of the parameters, by name; NaN where unknown, which makes the exponents
                that depend on it NaN.
        """
        return {}

    def canonical(self, u: Array, low: Array, high: Array) -> Array:
        """Return canonical coordinates, [n, p], if several coordinates of the law give one curve.

        Args:
            u: coordinates, [n, p].
            low, high: their bounds, [n, p].
        """
        return u

    def log_transition(self, u: Array) -> tuple[Array, Array] | None:
        """Return ln D*, [n], and its gradient, [n, p], at u, [n, p]; None without a transition."""
        return None


def weighted_mean(values: Array, weights: Array) -> Array:
    """Return the weighted mean over the last axis."""
    return (values * weights).sum(-1) / weights.sum(-1)


def lowest_loss(log_losses: Array, weights: Array) -> Array:
    """Return the lowest loss with positive weight of each curve, [n]."""
    return np.exp(np.where(weights > 0, log_losses, np.inf).min(-1))


def grid(*axes: tuple[float, ...]) -> Array:
    """Return all combinations of the axes, [k, number of axes]."""
    return np.array([*product(*axes)])


def central_gradient(function: Callable[[Array], Array], u: Array, step: float) -> Array:
    """Return the gradient, [n, p], of a function [n, p] -> [n] at u by central differences."""
    offsets = step * np.eye(u.shape[1])
    return np.stack([function(u + one) - function(u - one) for one in offsets], -1) / (2 * step)


# Bounds are in units of the curve, whose largest size and lowest loss are 1 (`fitted.Scale`).  So
# they do not depend on the units of a table, and allow falls over many orders of magnitude.
_SCALE = Parameter("B", 1e-8, 1e16)
_EXPONENT = Parameter("beta", 0.01, 3.0)
_RATE = Parameter("beta", 0.01, 1.0)
"""Even the fast rates of learning theory are not faster than 1/D.  Without this bound, curves that
hardly fall would be fitted by a fall of D⁻³ right after their last size."""
_FLOOR = Parameter("E", 0.0, 1e6, is_log=False)
_FLOORS = (0.0, 0.4, 0.8)
_MARGIN = np.log(8.0)


class Rectified(Law):
    """The rectified law L = B / (D_l + D^β) + E (Lin et al. 2024, Eq. 4).

    The curve is flat up to about D* = D_l^(1/β), where the terms of the denominator are equal, then
    a power law, then E.  Coordinates: ln B, ln D_l, ln β, E.  With k = B / (D_l + D^β), s = k / L,

        ∂ln L/∂ln B = s,   ∂ln L/∂ln D_l = −s D_l / (D_l + D^β),
        ∂ln L/∂ln β = −s D^β β ln D / (D_l + D^β),   ∂ln L/∂E = 1 / L.
    """

    name = "rectified"
    formula = "L = B / (D_l + D^beta) + E"
    reads_zero = True

    def __init__(self, shift: Parameter | None = None) -> None:
        """Set the parameters; `shift` replaces D_l by a parameter of another name and bounds."""
        self.parameters = (_SCALE, shift or Parameter("D_l", 1e-13, 1e16), _RATE, _FLOOR)

    def log_loss(self, u: Array, sizes: Array, needs_gradient: bool = True) -> tuple[Array, Array]:
        beta, logs = np.exp(u[:, 2:3]), log_sizes(sizes)
        power = np.where(sizes > 0, np.exp(beta * logs), 0.0)
        shift, shift_slope = self._shift(u, sizes)
        denom = shift + power
        excess = np.exp(u[:, 0])[:, None] / denom
        loss = excess + u[:, 3:]
        if not needs_gradient:
            return np.log(loss), np.empty(0)
        fraction = excess / loss
        slope = power * beta * logs
        columns = (fraction, -fraction * shift_slope / denom, -fraction * slope / denom, 1 / loss)
        return np.log(loss), np.stack(columns, -1)

    def _shift(self, u: Array, sizes: Array) -> tuple[Array, Array]:
        """Return D_l, the term beside D^β, and dD_l / d(its coordinate), [n, 1] or [n, m] each."""
        shift = np.exp(u[:, 1])[:, None]
        return shift, shift

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        beta, shift = values["beta"], self.parameters[1].name
        return {"B": (1.0, beta), shift: (0.0, beta), "E": (1.0, 0.0)}

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        # The curve bends at D* = D_l^(1/β), so that the grid is one of β, ln D*, from an eighth of
        # the smallest size to eight times the largest, and E.
        positions = (0.0, 0.25, 0.5, 0.75, 1.0)
        beta, position, fraction = grid((0.1, 0.2, 0.35, 0.6, 1.0), positions, _FLOORS).T
        counted = np.where((weights > 0) & (sizes > 0), log_sizes(sizes), np.nan)
        first, last = np.nanmin(counted, -1) - _MARGIN, np.nanmax(counted, -1) + _MARGIN
        transition = first[:, None] + position * (last - first)[:, None]
        result = np.empty((*transition.shape, 4))
        bounds = self.parameters[1]
        result[..., 1] = np.clip(beta * transition, np.log(bounds.low), np.log(bounds.high))
        result[..., 2] = np.log(beta)
        result[..., 3] = fraction * lowest_loss(log_losses, weights)[:, None]
        result[..., 0] = _fit_log_scale(result, sizes, log_losses, weights)
        return result

    def log_transition(self, u: Array) -> tuple[Array, Array]:
        inverse = np.exp(-u[:, 2])
        log_size, zeros = u[:, 1] * inverse, np.zeros(len(u))
        return log_size, np.stack([zeros, inverse, -log_size, zeros], -1)


def _fit_log_scale(u: Array, sizes: Array, log_losses: Array, weights: Array) -> Array:
    """Fit ln B, [n, k], given the other coordinates u, [n, k, 4], of the rectified law.

    It is the weighted mean of ln(L − E) + ln(D_l + D^β) over the sizes.
    """
    size_powers = np.exp(u[..., 2:3]) * log_sizes(sizes)[:, None, :]
    power = np.where(sizes[:, None, :] > 0, np.exp(size_powers), 0.0)
    excess = np.log(np.exp(log_losses)[:, None, :] - u[..., 3:4])
    return weighted_mean(excess + np.log(np.exp(u[..., 1:2]) + power), weights[:, None, :])


class FreeLens(Rectified):
    """LensLLM's law L = B / (F + D^β) + E (Eq. 10) with a fitted number F, for curves without a
    measured kernel.

    It is `Rectified` with D_l renamed to F.
    """

    name = "lensllm"
    formula = "L = B / (F + D^beta) + E"

    def __init__(self) -> None:
        super().__init__(replace(Rectified().parameters[1], name="F"))


_LARGEST_STRETCH = 1e4  # largest factor of the measured training times
_FARTHEST = 60.0  # largest |ln D*| of the bisection
_HALVINGS = 50  # of the bisection
_STEP = 1e-4  # step of the central difference for the transition's gradient


class MeasuredLens(Rectified):
    """LensLLM's law with F(Θ, t) from a measured kernel, for a single curve.

    Coordinates: ln B, ln t, ln β, E, where the factor t multiplies all recorded training times; it
    is held at 1 in the first stage.  ∂ln L/∂ln t = −s (∂F/∂ln t) / (F + D^β); the other derivatives
    are as in `Rectified`.  F has no unit, and D^β is added to it, so that D has to be in training
    examples.

    Between the recorded sizes ln t is interpolated linearly in ln D, and extrapolated beyond them;
    Θ and r are those of the nearest recorded size.

    Args:
        sizes: D, ascending, [m].
        theta: kernel Θ or its spectrum, one for all sizes or a sequence of m.
        residual: r, one for all sizes or a sequence of m.
        times: training time t of every size, [m].
        lr: learning rate η of Eq. 9.

    Raises:
        ValueError: `theta`, `residual` or `times` has another length than `sizes`, or a time at a
            size above 0 is not positive.
    """

    name = "lensllm"
    formula = "L = B / (F(Θ, t) + D^beta) + E"
    sizes_are_examples = True
    held_by_stage = (("t",), ())

    def __init__(
        self,
        sizes: Array,
        theta: Tensor | Spectrum | Sequence[Tensor | Spectrum],
        residual: Tensor | Sequence[Tensor],
        times: Sequence[float] | Array,
        lr: float,
    ) -> None:
        from ..ntk import Spectrum  # needs torch, which no other law does

        kernels = theta if isinstance(theta, Sequence) else [theta] * len(sizes)
        residuals = residual if isinstance(residual, Sequence) else [residual] * len(sizes)
        times = np.asarray(times, dtype=np.float64)
        for name, entries in (("theta", kernels), ("residual", residuals), ("t", times)):
            if len(entries) != len(sizes):
                raise ValueError(f"{name} holds {len(entries)} entries for {len(sizes)} sizes")
        if not (np.isfinite(times) & ((times > 0) | (sizes == 0)) & (times >= 0)).all():
            raise ValueError("t holds a time that is not positive (0 is that of size 0 only)")
        spectra = {id(k): k if isinstance(k, Spectrum) else Spectrum.of(k) for k in kernels}
        self._modes = [
            tuple(part.cpu().numpy() for part in spectra[id(k)].modes(r.detach(), lr))
            for k, r in zip(kernels, residuals, strict=True)
        ]
        self._sizes, self._times = sizes, times
        super().__init__(Parameter("t", 1 / _LARGEST_STRETCH, _LARGEST_STRETCH))

    def time(self, size: float) -> float:
        """Return the training time at a size, interpolated or extrapolated; 0 at size 0."""
        if size == 0:
            return 0.0
        is_trained = self._sizes > 0
        x, y = np.log(self._sizes[is_trained]), np.log(self._times[is_trained])
        log_size = float(np.log(size))
        segment = int(np.clip(np.searchsorted(x, log_size) - 1, 0, max(len(x) - 2, 0)))
        slopes = np.diff(y) / np.diff(x) if len(x) > 1 else [1.0]  # time in proportion to size
        return float(np.exp(y[segment] + slopes[segment] * (log_size - x[segment])))

    def kernel_loss(self, size: float, log_stretch: Array) -> tuple[Array, Array]:
        """Return F and ∂F/∂ln t, [n] each, at a size, with its time multiplied by e^`log_stretch`.

        F = Σ_i e^{−2ηλ_i t} (q_iᵀ r)², so ∂F/∂ln t = −Σ_i 2ηλ_i t e^{−2ηλ_i t} (q_iᵀ r)².
        """
        nearest = int(np.argmin(np.abs(self._sizes - size)))
        rates, energies = self._modes[nearest]
        decay = rates * (self.time(size) * np.exp(log_stretch))[:, None]
        terms = np.exp(-decay) * energies
        return terms.sum(-1), -(decay * terms).sum(-1)

    def _shift(self, u: Array, sizes: Array) -> tuple[Array, Array]:
        """Return F, the term beside D^β, and ∂F/∂ln t, [n, m] each.

        All rows of `sizes`, [n, m], are equal.
        """
        pairs = [self.kernel_loss(float(size), u[:, 1]) for size in sizes[0]]
        return np.stack([f for f, _ in pairs], -1), np.stack([slope for _, slope in pairs], -1)

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        return {"B": (1.0, 0.0), "E": (1.0, 0.0)}

    def log_transition(self, u: Array) -> tuple[Array, Array]:
        """Return ln D* where F(Θ, t) = D^β, and its gradient.

        There is one such size, as F falls with D and D^β rises.
        """
        return self._bisect(u), central_gradient(self._bisect, u, _STEP)

    def _bisect(self, u: Array) -> Array:
        """Return ln D*, [1], at coordinates u, [1, p], by bisection."""
        low, high = -_FARTHEST, _FARTHEST
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            with np.errstate(over="ignore", divide="ignore"):
                log_kernel = np.log(self.kernel_loss(float(np.exp(middle)), u[:, 1])[0][0])
            is_below = log_kernel > np.exp(u[0, 2]) * middle
            low, high = (middle, high) if is_below else (low, middle)
        return np.array([(low + high) / 2])

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        # β and E are those of the free law, and ln t is 0.  B is fitted with F at its mean over the
        # sizes.  Starts of the free law that differ only in F become equal.
        starts = FreeLens().candidates(sizes, log_losses, weights)
        starts[..., 1] = 0.0
        with_kernel = starts.copy()
        kernel = self._shift(np.zeros((1, 4)), sizes)[0].mean()
        with_kernel[..., 1] = np.log(max(float(kernel), 1e-13))
        starts[..., 0] = _fit_log_scale(with_kernel, sizes, log_losses, weights)
        return np.unique(starts, axis=1)


class Power(Law):
    """The power law L = (B / D^β + E)^α for D > 0 (LensLLM, Eq. 2).

    Coordinates: ln B, ln β, E, ln α.  With k = B / D^β and s = k / (k + E),

        ∂ln L/∂ln B = α s,  ∂ln L/∂ln β = −α s β ln D,  ∂ln L/∂E = α / (k + E),
        ∂ln L/∂ln α = ln L.
    """

    name = "power"
    formula = "L = (B / D^beta + E)^alpha"
    parameters = (_SCALE, _EXPONENT, _FLOOR, Parameter("alpha", 0.1, 10.0))

    def log_loss(self, u: Array, sizes: Array, needs_gradient: bool = True) -> tuple[Array, Array]:
        logs = log_sizes(sizes)
        beta, alpha = np.exp(u[:, 1:2]), np.exp(u[:, 3:4])
        excess = np.exp(u[:, :1] - beta * logs)
        base = excess + u[:, 2:3]
        log_loss = alpha * np.log(base)
        if not needs_gradient:
            return log_loss, np.empty(0)
        fraction = alpha * excess / base
        return log_loss, np.stack((fraction, -fraction * beta * logs, alpha / base, log_loss), -1)

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        root = 1 / values["alpha"]
        return {"B": (root, values["beta"]), "E": (root, 0.0)}

    def canonical(self, u: Array, low: Array, high: Array) -> Array:
        """Set α to 1, or as near as the bounds allow, where E = 0; the curve stays the same."""
        # For E = 0, L = (B / D^β)^α = B^α D^(−αβ) depends on B^α and αβ only: the fit may stop
        # anywhere on a ridge, and parameters of two curves could not be compared.  `step` is added
        # to ln β and subtracted from ln α, and ln B is multiplied by e^step.
        step = np.clip(u[:, 3], u[:, 3] - high[:, 3], u[:, 3] - low[:, 3])
        step = np.clip(step, low[:, 1] - u[:, 1], high[:, 1] - u[:, 1])
        step = np.where(u[:, 2] == 0, step, 0.0)
        shifted = u + np.stack([np.zeros_like(step), step, np.zeros_like(step), -step], -1)
        shifted[:, 0] *= np.exp(step)
        is_inside = (shifted[:, 0] >= low[:, 0]) & (shifted[:, 0] <= high[:, 0])
        return np.where(is_inside[:, None], shifted, u)

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        # α β is the slope of ln L over ln D: the grid combines every α with every slope.
        slope, fraction, alpha = grid((0.05, 0.1, 0.2, 0.4, 0.8), _FLOORS, (0.12, 0.35, 1.0, 3.0)).T
        beta = np.clip(slope / alpha, 0.01, 3.0)
        floor = fraction * lowest_loss(log_losses, weights)[:, None] ** (1 / alpha)
        result = np.empty((*floor.shape, 4))
        result[..., 1], result[..., 2], result[..., 3] = np.log(beta), floor, np.log(alpha)
        base = np.exp(log_losses[:, None, :] / alpha[:, None]) - floor[..., None]
        log_scales = np.log(base) + beta[:, None] * log_sizes(sizes)[:, None, :]
        result[..., 0] = weighted_mean(log_scales, weights[:, None, :])
        return result


class StraightLine(Law):
    """The line ln L = intercept + slope · ln D, fitted to the points that AtS accepts, see `fit`.

    It has no transition: at the point that AtS rejects, a curve may also bend towards its floor, or
    may not have left its pre-power phase.
    """

    name = "ats"
    formula = "ln L = intercept + slope · ln D"
    parameters = tuple(Parameter(x, -np.inf, np.inf, is_log=False) for x in ("intercept", "slope"))

    def log_loss(self, u: Array, sizes: Array, needs_gradient: bool = True) -> tuple[Array, Array]:
        logs = log_sizes(sizes)
        return u[:, :1] + u[:, 1:] * logs, np.stack([np.ones_like(logs), logs], -1)


LAWS: dict[str, type[Law]] = {"lensllm": FreeLens, "rectified": Rectified, "power": Power}
"""Name -> class of the laws that are fitted by least squares to a curve alone."""
