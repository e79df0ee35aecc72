"""LensLLM's law L = B / (F(Θ, t) + D^β) + E (Eq. 10), with F free or measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...ntk import Spectrum
from ..arrays import Array
from .base import Parameter, Points
from .rectified import Rectified, scale_for

_FASTEST = 1e4
"""How far the fit may stretch or shrink the measured training times."""


_FARTHEST = 60.0  # of ln D*
_HALVINGS = 50
_SMALL = 1e-4  # step of the transition's gradient


class FreeLens(Rectified):
    """F is a free number in [0, ‖r‖²], for curves without a measured kernel.

    This is the rectified law, with F for D_l and an upper bound for it.
    """

    name = "lensllm"

    def __init__(self, residual_square: float = 1e16) -> None:
        """`residual_square`: ‖r‖², the upper bound of F."""
        super().__init__(Parameter("F", min(1e-13, residual_square), residual_square))


class MeasuredKernel:
    """F(Θ, t) along one curve, from kernels and training times recorded at its sizes.

    Between and beyond the recorded sizes the time is a straight line in ln t over ln D (its ends
    continue), and Θ and r are those of the nearest recorded size.
    """

    def __init__(
        self,
        sizes: Array,
        theta: Tensor | Spectrum | Sequence[Tensor | Spectrum],
        residual: Tensor | Sequence[Tensor],
        times: Sequence[float] | Array,
        lr: float,
    ) -> None:
        """One kernel, residual and learning rate for all sizes, or sequences with one a size.

        Raises:
            ValueError: a sequence of another length than `sizes`; a time that is not positive.
        """
        kernels = theta if isinstance(theta, Sequence) else [theta] * len(sizes)
        residuals = residual if isinstance(residual, Sequence) else [residual] * len(sizes)
        times = np.asarray(times, dtype=np.float64)
        for name, given in (("theta", kernels), ("residual", residuals), ("t", times)):
            if len(given) != len(sizes):
                raise ValueError(
                    f"{name} holds {len(given)} entries for {len(sizes)} sizes; expected one a size"
                )
        if not (np.isfinite(times) & ((times > 0) | (sizes == 0)) & (times >= 0)).all():
            raise ValueError(
                "t holds a time that is not positive; expected the training time of every size "
                "(0 at size 0 only)"
            )
        spectra = {id(k): k if isinstance(k, Spectrum) else Spectrum.of(k) for k in kernels}
        self._modes = [
            tuple(part.cpu().numpy() for part in spectra[id(k)].modes(r.detach(), lr))
            for k, r in zip(kernels, residuals, strict=True)
        ]
        self._sizes, self._times = sizes, times

    def time(self, size: float) -> float:
        """Training time at a size, recorded or continued; 0 at size 0."""
        if size == 0:
            return 0.0
        trained = self._sizes > 0
        x, y = np.log(self._sizes[trained]), np.log(self._times[trained])
        at = float(np.log(size))
        if len(x) == 1:
            return float(np.exp(y[0] + at - x[0]))  # time in proportion to the data
        piece = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
        slope = (y[piece + 1] - y[piece]) / (x[piece + 1] - x[piece])
        return float(np.exp(y[piece] + slope * (at - x[piece])))

    def loss(self, size: float, log_stretch: Array) -> tuple[Array, Array]:
        """F at a size with its time multiplied by e^`log_stretch` ([n]); and ∂F/∂ln t, [n].

        F = Σ_i e^{−2ηλ_i t} (q_iᵀ r)², so ∂F/∂ln t = −Σ_i 2ηλ_i t e^{−2ηλ_i t} (q_iᵀ r)².
        """
        nearest = int(np.argmin(np.abs(self._sizes - size)))
        rates, energies = self._modes[nearest]
        decay = rates * (self.time(size) * np.exp(log_stretch))[:, None]
        left = np.exp(-decay) * energies
        return left.sum(-1), -(decay * left).sum(-1)


class MeasuredLens(Rectified):
    """F(Θ, t) is computed from a measured kernel; the times may be stretched by a common factor.

    Coordinates: ln B, ln t, ln β, E, where t multiplies the recorded training times; it is held at
    1 in the first stage.  ∂ln L/∂ln t = −s (∂F/∂ln t) / (F + D^β), the others as in `Rectified`.
    """

    name = "lensllm"
    stages = (("t",), ())

    def __init__(self, kernel: MeasuredKernel) -> None:
        super().__init__(Parameter("t", 1 / _FASTEST, _FASTEST))
        self.kernel = kernel

    def _shift(self, u: Array, points: Points) -> tuple[Array, Array]:
        """F and ∂F/∂ln t, [n, m]; every row of the sizes is the same curve."""
        pairs = [self.kernel.loss(float(size), u[:, 1]) for size in points.sizes[0]]
        return np.stack([f for f, _ in pairs], -1), np.stack([s for _, s in pairs], -1)

    def log_transition(self, u: Array) -> tuple[Array, Array]:
        """Where F(Θ, t) = D^β: F falls with D and D^β grows, so that they meet once."""
        gradient = np.zeros_like(u)
        for place in (1, 2):
            ends = []
            for sign in (1, -1):
                moved = u.copy()
                moved[:, place] += sign * _SMALL
                ends.append(self._log_meeting(moved))
            gradient[:, place] = (ends[0] - ends[1]) / (2 * _SMALL)
        return self._log_meeting(u), gradient

    def _log_meeting(self, u: Array) -> Array:
        """ln D* by bisection, [n]."""
        low, high = np.full(len(u), -_FARTHEST), np.full(len(u), _FARTHEST)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            size = zip(np.exp(middle), u[:, 1:2], strict=True)
            with np.errstate(over="ignore", divide="ignore"):
                kernel = np.log([self.kernel.loss(float(d), stretch)[0][0] for d, stretch in size])
            before = kernel > np.exp(u[:, 2]) * middle
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return (low + high) / 2

    def candidates(self, points: Points, log_losses: Array, weights: Array) -> Array:
        free = FreeLens().candidates(points, log_losses, weights)
        free[..., 1] = 0.0
        shift = free.copy()
        start = self._shift(np.zeros((1, 4)), points)[0].mean()
        shift[..., 1] = np.log(max(float(start), 1e-13))
        free[..., 0] = scale_for(shift, points, log_losses, weights)
        return np.unique(free, axis=1)
