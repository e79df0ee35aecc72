"""What a scaling law is: bounded parameters, log loss with gradient, starting points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Array, Index


@dataclass(frozen=True)
class Parameter:
    """A parameter of a law and the interval it is kept in.

    It is fitted as a coordinate: ln(value) where ``log`` is set (positive, of unknown order), else
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

    def coordinate(self, value: float) -> float:
        """The coordinate of a value; −inf for ln 0."""
        if not self.log:
            return float(value)
        return float(np.log(value)) if value > 0 else -np.inf

    def value(self, coordinate: Array) -> Array:
        """Back from the coordinate."""
        return np.exp(coordinate) if self.log else coordinate


@dataclass(frozen=True)
class Points:
    """Where the losses of a batch of curves were measured.

    Attributes:
        sizes: training examples D ≥ 0, [n, m]; 0 is the model before fine-tuning.
        parameters: parameters N of the model behind each loss, [n, m]; only Kaplan's law asks.
    """

    sizes: Array
    parameters: Array | None = None

    def rows(self, index: Index) -> Points:
        """The curves `index`, one row each; repeats are allowed."""
        chosen = None if self.parameters is None else self.parameters[index]
        return replace(self, sizes=self.sizes[index], parameters=chosen)

    @property
    def log_sizes(self) -> Array:
        """ln D, and 0 where D = 0 (where a law must not read it)."""
        return np.log(np.where(self.sizes > 0, self.sizes, 1.0))

    def powers(self, beta: Array) -> tuple[Array, Array]:
        """D^β and its derivative in ln β, both [n, m]; β is [n]."""
        logs = self.log_sizes
        power = np.where(self.sizes > 0, np.exp(beta[:, None] * logs), 0.0)
        return power, power * beta[:, None] * logs


class Law(ABC):
    """A law L(D) with its parameters; curves are rows, everything is in double precision."""

    name: str
    parameters: tuple[Parameter, ...]
    stages: tuple[tuple[str, ...], ...] = ((),)
    """Parameters held at their starting value in each stage of the fit, one stage after another."""
    reads_zero = False
    """Whether D = 0 (the loss before fine-tuning) is a point of the law."""

    @abstractmethod
    def log_loss(self, u: Array, points: Points, gradient: bool = True) -> tuple[Array, Array]:
        """ln L and its gradient in the coordinates.

        Args:
            u: coordinates, [n, p].
            points: n curves of m sizes.
            gradient: False leaves the gradient out (an empty array).

        Returns:
            [n, m] and [n, m, p].
        """

    @abstractmethod
    def candidates(self, points: Points, log_losses: Array, weights: Array) -> Array:
        """Coordinates to start from, [n, k, p]: a coarse grid whose scale is fitted to the losses.

        Args:
            points: n curves of m sizes.
            log_losses: [n, m].
            weights: 0 where a loss does not count, [n, m].
        """

    def log_transition(self, u: Array) -> tuple[Array, Array] | None:
        """ln D* ([n]) with its gradient ([n, p]), or None where the law has no transition."""
        return None


def weighted_mean(values: Array, weights: Array) -> Array:
    """Mean over the last axis."""
    return (values * weights).sum(-1) / weights.sum(-1)


def lowest(log_losses: Array, weights: Array) -> Array:
    """The smallest loss of each curve that counts, [n]."""
    return np.exp(np.where(weights > 0, log_losses, np.inf).min(-1))


def grid(*axes: tuple[float, ...]) -> Array:
    """All combinations of the axes, [k, number of axes]."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], -1).astype(
        np.float64
    )
