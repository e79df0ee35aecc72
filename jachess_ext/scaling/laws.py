"""Scaling laws L(D): bounded parameters, ln L with its gradient, points to start a fit from.

Curves are rows; everything is computed in double precision.  `fit` gives a law losses and sizes
in units of each curve's own (`Law.units`), so bounds are relative to the curve.
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
"""Exponents of the units of losses and sizes in the unit of a parameter."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a law and the interval it is kept in.

    It is fitted as a coordinate: ln(value) where `log` is set (positive, of unknown order), else
    the value itself.

    Attributes:
        name: as it appears in `FittedLaw.params`.
        low, high: bounds of the value.
        log: whether its coordinate is the logarithm.
    """

    name: str
    low: float
    high: float
    log: bool = True

    def coordinate(self, value: Array | float) -> Array | float:
        """Return the coordinate of a value; −inf for ln 0, NaN for the logarithm of less."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(value) if self.log else value

    def value(self, coordinate: Array) -> Array:
        """Return the value at a coordinate."""
        return np.exp(coordinate) if self.log else coordinate


def log_sizes(sizes: Array) -> Array:
    """Return ln D, and 0 where D = 0 (where a law must not read it)."""
    return np.log(np.where(sizes > 0, sizes, 1.0))


class Law(ABC):
    """A law L(D) with its parameters."""

    name: str
    parameters: tuple[Parameter, ...]
    stages: tuple[tuple[str, ...], ...] = ((),)
    """Parameters held at their starting value in each stage of the fit, one stage after another."""
    formula: str
    reads_zero = False
    """Whether D = 0 (the loss before fine-tuning) is a point of the law."""
    sizes_are_examples = False
    """Whether the law holds only for sizes in training examples, and in no other unit."""

    @abstractmethod
    def log_loss(self, u: Array, sizes: Array, gradient: bool = True) -> tuple[Array, Array]:
        """Return ln L, [n, m], and its gradient in the coordinates, [n, m, p].

        Args:
            u: coordinates, [n, p].
            sizes: training examples D ≥ 0, [n, m]; 0 is the model before fine-tuning.
            gradient: False leaves the gradient out (an empty array).
        """

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        """Return starts for the fit, [n, k, p]: a grid of parameters with B fitted to the losses.

        Args:
            sizes: D, [n, m].
            log_losses: [n, m].
            weights: 0 where a loss does not count, [n, m].
        """
        raise NotImplementedError(f"the {self.name} law is not fitted from a grid of starts")

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        """Return the unit of each parameter that has one.

        Args:
            values: of the parameters, by name; NaN where unknown, and then in what depends on it.
        """
        return {}

    def canonical(self, u: Array, low: Array, high: Array) -> Array:
        """Return the canonical coordinates of the curve of u, where several give the same curve."""
        return u

    def log_transition(self, u: Array) -> tuple[Array, Array] | None:
        """Return ln D* ([n]) with its gradient ([n, p]); None where the law has no transition."""
        return None


def weighted_mean(values: Array, weights: Array) -> Array:
    """Return the mean over the last axis."""
    return (values * weights).sum(-1) / weights.sum(-1)


def lowest_loss(log_losses: Array, weights: Array) -> Array:
    """Return the lowest loss of weight above 0 of each curve, [n]."""
    return np.exp(np.where(weights > 0, log_losses, np.inf).min(-1))


def grid(*axes: tuple[float, ...]) -> Array:
    """Return all combinations of the axes, [k, number of axes]."""
    return np.array([*product(*axes)])


def central_gradient(function: Callable[[Array], Array], u: Array, step: float) -> Array:
    """Return the gradient, [n, p], of a function of coordinates [n, p] -> [n] by differences."""
    steps = step * np.eye(u.shape[1])
    return np.stack([function(u + one) - function(u - one) for one in steps], -1) / (2 * step)


# In units of the curve: its largest size and its lowest loss are 1 (`fitting.Scale`).  So bounds do
# not change with the unit of a table, and leave room for falls over many orders of magnitude.
_SCALE = Parameter("B", 1e-8, 1e16)
_EXPONENT = Parameter("beta", 0.01, 3.0)
_RATE = Parameter("beta", 0.01, 1.0)
"""No excess loss falls faster than 1/D in learning theory's fast rates.  Without this bound curves
that hardly fall are fitted by a fall of D⁻³ right after their last size."""
_FLOOR = Parameter("E", 0.0, 1e6, log=False)
_FLOORS = (0.0, 0.4, 0.8)
_MARGIN = np.log(8.0)


class Rectified(Law):
    """L = B / (D_l + D^β) + E (Lin et al. 2024, Eq. 4).

    Flat up to about D* = D_l^(1/β), where the two terms of the denominator balance, then a power
    law, then E.  Coordinates: ln B, ln D_l, ln β, E.  With k = B / (D_l + D^β) and s = k / L,

        ∂ln L/∂ln B = s,   ∂ln L/∂ln D_l = −s D_l / (D_l + D^β),
        ∂ln L/∂ln β = −s D^β β ln D / (D_l + D^β),   ∂ln L/∂E = 1 / L.
    """

    name = "rectified"
    formula = "L = B / (D_l + D^beta) + E"
    reads_zero = True

    def __init__(self, shift: Parameter | None = None) -> None:
        """`shift` stands in for D_l: its name and bounds."""
        self.parameters = (_SCALE, shift or Parameter("D_l", 1e-13, 1e16), _RATE, _FLOOR)

    def log_loss(self, u: Array, sizes: Array, gradient: bool = True) -> tuple[Array, Array]:
        beta, logs = np.exp(u[:, 2:3]), log_sizes(sizes)
        power = np.where(sizes > 0, np.exp(beta * logs), 0.0)
        shift, shift_slope = self._shift(u, sizes)
        below = shift + power
        excess = np.exp(u[:, 0])[:, None] / below
        loss = excess + u[:, 3:]
        if not gradient:
            return np.log(loss), np.empty(0)
        fraction = excess / loss
        slope = power * beta * logs
        columns = (fraction, -fraction * shift_slope / below, -fraction * slope / below, 1 / loss)
        return np.log(loss), np.stack(columns, -1)

    def _shift(self, u: Array, sizes: Array) -> tuple[Array, Array]:
        """Return D_l and its derivative in its coordinate, [n, 1] or [n, m]."""
        shift = np.exp(u[:, 1])[:, None]
        return shift, shift

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        beta, shift = values["beta"], self.parameters[1].name
        return {"B": (1.0, beta), shift: (0.0, beta), "E": (1.0, 0.0)}

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        # D_l alone does not say where the curve bends: that is D* = D_l^(1/β).  The grid is one of
        # β and ln D*, from an eighth of the smallest size to eight times the largest.
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
        result[..., 0] = _scale_for(result, sizes, log_losses, weights)
        return result

    def log_transition(self, u: Array) -> tuple[Array, Array]:
        inverse = np.exp(-u[:, 2])
        value, nought = u[:, 1] * inverse, np.zeros(len(u))
        return value, np.stack([nought, inverse, -value, nought], -1)


def _scale_for(u: Array, sizes: Array, log_losses: Array, weights: Array) -> Array:
    """Return ln B as the mean of ln(L − E) + ln(D_l + D^β), [n, k], exact for exact β, D_l, E."""
    raised = np.exp(u[..., 2:3]) * log_sizes(sizes)[:, None, :]
    power = np.where(sizes[:, None, :] > 0, np.exp(raised), 0.0)
    excess = np.log(np.exp(log_losses)[:, None, :] - u[..., 3:4])
    return weighted_mean(excess + np.log(np.exp(u[..., 1:2]) + power), weights[:, None, :])


class FreeLens(Rectified):
    """LensLLM's law L = B / (F(Θ, t) + D^β) + E (Eq. 10) with F a free number.

    For curves without a measured kernel: the rectified law, with F for D_l.
    """

    name = "lensllm"
    formula = "L = B / (F + D^beta) + E"

    def __init__(self) -> None:
        super().__init__(replace(Rectified().parameters[1], name="F"))


_LARGEST_STRETCH = 1e4  # of the measured training times
_FARTHEST = 60.0  # ln D* is looked for up to here
_HALVINGS = 50
_SMALL = 1e-4  # step of the transition's gradient


class MeasuredLens(Rectified):
    """LensLLM's law with F(Θ, t) from a measured kernel; the times may be stretched by one factor.

    Coordinates: ln B, ln t, ln β, E, where t multiplies the recorded training times; it is held at
    1 in the first stage.  ∂ln L/∂ln t = −s (∂F/∂ln t) / (F + D^β), the others as in `Rectified`.
    F has no unit of its own, and D^β is added to it, so that D has to be in training examples.

    Between and beyond the recorded sizes the time is a straight line in ln t over ln D (its ends
    continue), and Θ and r are those of the nearest recorded size.

    Args:
        sizes: D, ascending, [m].
        theta, residual: Θ and r for all sizes, or a sequence with one a size.
        times: t of every size, [m].
        lr: η of Eq. 9.

    Raises:
        ValueError: a sequence of another length than `sizes`; a time that is not positive.
    """

    name = "lensllm"
    formula = "L = B / (F(Θ, t) + D^beta) + E"
    sizes_are_examples = True
    stages = (("t",), ())

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
        """Return the training time at a size, recorded or continued; 0 at size 0."""
        if size == 0:
            return 0.0
        trained = self._sizes > 0
        x, y = np.log(self._sizes[trained]), np.log(self._times[trained])
        at = float(np.log(size))
        piece = int(np.clip(np.searchsorted(x, at) - 1, 0, max(len(x) - 2, 0)))
        slopes = np.diff(y) / np.diff(x) if len(x) > 1 else [1.0]  # in proportion to the data
        return float(np.exp(y[piece] + slopes[piece] * (at - x[piece])))

    def kernel_loss(self, size: float, log_stretch: Array) -> tuple[Array, Array]:
        """Return F at a size with its time multiplied by e^`log_stretch`, and ∂F/∂ln t, [n] each.

        F = Σ_i e^{−2ηλ_i t} (q_iᵀ r)², so ∂F/∂ln t = −Σ_i 2ηλ_i t e^{−2ηλ_i t} (q_iᵀ r)².
        """
        nearest = int(np.argmin(np.abs(self._sizes - size)))
        rates, energies = self._modes[nearest]
        decay = rates * (self.time(size) * np.exp(log_stretch))[:, None]
        left = np.exp(-decay) * energies
        return left.sum(-1), -(decay * left).sum(-1)

    def _shift(self, u: Array, sizes: Array) -> tuple[Array, Array]:
        """Return F and ∂F/∂ln t, [n, m]; every row of the sizes is the same curve."""
        pairs = [self.kernel_loss(float(size), u[:, 1]) for size in sizes[0]]
        return np.stack([f for f, _ in pairs], -1), np.stack([s for _, s in pairs], -1)

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        return {"B": (1.0, 0.0), "E": (1.0, 0.0)}

    def log_transition(self, u: Array) -> tuple[Array, Array]:
        """Return where F(Θ, t) = D^β: F falls with D and D^β grows, so that they meet once."""
        return self._log_meeting(u), central_gradient(self._log_meeting, u, _SMALL)

    def _log_meeting(self, u: Array) -> Array:
        """Return ln D* of the one curve by bisection, [1]."""
        low, high = -_FARTHEST, _FARTHEST
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            with np.errstate(over="ignore", divide="ignore"):
                kernel = np.log(self.kernel_loss(float(np.exp(middle)), u[:, 1])[0][0])
            before = kernel > np.exp(u[0, 2]) * middle
            low, high = (middle, high) if before else (low, middle)
        return np.array([(low + high) / 2])

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        # β, E and B as if F were free; F itself starts at its mean over the measured times, and the
        # starts that differ in D_l alone become one.
        free = FreeLens().candidates(sizes, log_losses, weights)
        free[..., 1] = 0.0
        shift = free.copy()
        start = self._shift(np.zeros((1, 4)), sizes)[0].mean()
        shift[..., 1] = np.log(max(float(start), 1e-13))
        free[..., 0] = _scale_for(shift, sizes, log_losses, weights)
        return np.unique(free, axis=1)


class Power(Law):
    """L = (B / D^β + E)^α for D > 0 (LensLLM, Eq. 2).

    Coordinates: ln B, ln β, E, ln α.  With k = B / D^β and s = k / (k + E),

        ∂ln L/∂ln B = α s,  ∂ln L/∂ln β = −α s β ln D,  ∂ln L/∂E = α / (k + E),
        ∂ln L/∂ln α = ln L.
    """

    name = "power"
    formula = "L = (B / D^beta + E)^alpha"
    parameters = (_SCALE, _EXPONENT, _FLOOR, Parameter("alpha", 0.1, 10.0))

    def log_loss(self, u: Array, sizes: Array, gradient: bool = True) -> tuple[Array, Array]:
        logs = log_sizes(sizes)
        beta, alpha = np.exp(u[:, 1:2]), np.exp(u[:, 3:4])
        excess = np.exp(u[:, :1] - beta * logs)
        base = excess + u[:, 2:3]
        value = alpha * np.log(base)
        if not gradient:
            return value, np.empty(0)
        fraction = alpha * excess / base
        return value, np.stack((fraction, -fraction * beta * logs, alpha / base, value), -1)

    def units(self, values: Mapping[str, Array | float]) -> dict[str, Exponents]:
        root = 1 / values["alpha"]
        return {"B": (root, values["beta"]), "E": (root, 0.0)}

    def canonical(self, u: Array, low: Array, high: Array) -> Array:
        """Set α to 1, or as near as the bounds allow, where E = 0 and only B^α and αβ count."""
        # L = (B / D^β)^α = B^α D^(−αβ): the fit may stop anywhere on a ridge, and numbers of two
        # curves would not compare.  A move along it leaves α ln B and αβ as they are.
        # Steps of ln β; ln α goes the other way, ln B with α.
        step = np.clip(u[:, 3], u[:, 3] - high[:, 3], u[:, 3] - low[:, 3])
        step = np.clip(step, low[:, 1] - u[:, 1], high[:, 1] - u[:, 1])
        step = np.where(u[:, 2] == 0, step, 0.0)
        moved = u + np.stack([np.zeros_like(step), step, np.zeros_like(step), -step], -1)
        moved[:, 0] *= np.exp(step)
        inside = (moved[:, 0] >= low[:, 0]) & (moved[:, 0] <= high[:, 0])
        return np.where(inside[:, None], moved, u)

    def candidates(self, sizes: Array, log_losses: Array, weights: Array) -> Array:
        # α β is the slope in ln L: grids of both, so that every α meets every slope.
        slope, fraction, alpha = grid((0.05, 0.1, 0.2, 0.4, 0.8), _FLOORS, (0.12, 0.35, 1.0, 3.0)).T
        beta = np.clip(slope / alpha, 0.01, 3.0)
        floor = fraction * lowest_loss(log_losses, weights)[:, None] ** (1 / alpha)
        result = np.empty((*floor.shape, 4))
        result[..., 1], result[..., 2], result[..., 3] = np.log(beta), floor, np.log(alpha)
        base = np.exp(log_losses[:, None, :] / alpha[:, None]) - floor[..., None]
        lifted = np.log(base) + beta[:, None] * log_sizes(sizes)[:, None, :]
        result[..., 0] = weighted_mean(lifted, weights[:, None, :])
        return result


class StraightLine(Law):
    """ln L = intercept + slope · ln D, fitted by AtS to the points that it accepts.

    It has no transition: AtS's walk ends where a curve bends towards its floor, or before it has
    left its pre-power phase, as often as at D*.
    """

    name = "ats"
    formula = "ln L = intercept + slope · ln D"
    parameters = tuple(Parameter(x, -np.inf, np.inf, log=False) for x in ("intercept", "slope"))

    def log_loss(self, u: Array, sizes: Array, gradient: bool = True) -> tuple[Array, Array]:
        logs = log_sizes(sizes)
        return u[:, :1] + u[:, 1:] * logs, np.stack([np.ones_like(logs), logs], -1)


LAWS: dict[str, type[Law]] = {"lensllm": FreeLens, "rectified": Rectified, "power": Power}
"""The laws that are fitted by least squares and need nothing but a curve."""
