"""What it costs to know: C ≈ 6 N D floating-point operations an epoch."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Array

OPERATIONS = 6.0
"""Per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020)."""


@dataclass(frozen=True)
class Cost:
    """How training examples become operations.

    Attributes:
        tokens: per example; 1 counts examples as tokens, which keeps ratios between methods.
        epochs: passes over every subset.
    """

    tokens: float = 1.0
    epochs: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; expected a positive number")

    def flops(self, parameters: Array, examples: Array) -> Array:
        """Operations of training models of `parameters` ([n]) on `examples` ([n] in all), [n]."""
        return OPERATIONS * parameters * examples * self.tokens * self.epochs
