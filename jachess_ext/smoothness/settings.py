"""What is asked of an estimator, checked once; and what every estimator gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..jet.directions import Distribution, make_generator
from .model_pass import Pass
from .scope import Dimensions, Layers, Scope, check_dimensions

Engine = Literal["jet", "reverse", "exact"]
ENGINES = ("jet", "reverse", "exact")
HessianNorm = Literal["per_dimension", "tensor"]


@dataclass(frozen=True)
class Settings:
    """The arguments shared by `smoothness` and `JacHess`; documented there."""

    engine: Engine = "jet"
    directions: int = 2
    layers: Layers = "all"
    scope: Scope = "all"
    dimensions: Dimensions = 10
    hessian: bool = True
    hessian_norm: HessianNorm = "per_dimension"
    squared: bool = False
    distribution: Distribution = "gaussian"

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, ENGINES)
        _one_of("scope", self.scope, ("all", "first", "last"))
        _one_of("hessian_norm", self.hessian_norm, ("per_dimension", "tensor"))
        _one_of("distribution", self.distribution, ("gaussian", "rademacher"))
        check_dimensions(self.dimensions)
        count = self.directions
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"directions is {count!r}; expected a number from 1 up")
        if self.engine == "jet" and self.second_order and count < 2:
            raise ValueError(
                "the Hessian needs a pair of directions: pass directions=2 or more, or "
                "hessian=False"
            )

    @property
    def second_order(self) -> bool:
        """Whether the Hessian term exists: asked for, over a non-empty set of dimensions."""
        return self.hessian and self.dimensions != 0

    @property
    def per_dimension(self) -> bool:
        return self.hessian_norm == "per_dimension"


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")


@dataclass
class Randomness:
    """Generators of one call: directions on the device, output dimensions on the CPU."""

    directions: torch.Generator | None
    dimensions: torch.Generator | None

    @classmethod
    def from_seed(cls, seed: int | None, device: torch.device) -> Randomness:
        """None uses torch's global generators."""
        # Another stream for D, so that adding directions does not change which D is drawn.
        other = None if seed is None else (seed ^ 0x5DEECE66D) % 2**63
        return cls(make_generator(seed, device), make_generator(other, torch.device("cpu")))


@dataclass
class TokenNorms:
    """Norms per layer, row and token; ``tokens`` says where they are defined.

    Attributes:
        jacobian: ``[K, B, T]``.
        hessian: ``[K, B, T]``, or None where it was not asked for.
        tokens: ``[B, T]`` booleans, real and in scope; norms are zero elsewhere.
    """

    jacobian: Tensor
    hessian: Tensor | None
    tokens: Tensor
    model_pass: Pass
