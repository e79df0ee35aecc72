"""What is asked of an estimator, checked once; and what every estimator gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from ..jet.directions import Distribution, DrawCounter, Use, fresh_seed
from .model_pass import Pass
from .scope import Dimensions, Layers, Scope, check_dimensions

Engine = Literal["jet", "reverse", "exact"]
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
    check_values: bool = True
    """False: embeddings that are not finite, and rows that are all padding, give norms that are not
    right in place of an error; the caller looks for them afterwards, with fewer waits for a GPU."""

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, get_args(Engine))
        _one_of("scope", self.scope, get_args(Scope))
        _one_of("hessian_norm", self.hessian_norm, get_args(HessianNorm))
        _one_of("distribution", self.distribution, get_args(Distribution))
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
    """Which random numbers one call gets: its directions and its output dimensions D.

    They are counted apart, so that more directions do not change which D is drawn.
    """

    directions: DrawCounter
    dimensions: DrawCounter

    @classmethod
    def from_seed(
        cls, seed: int | None, step: int = 0, *, rank: int = 0, calibrating: bool = False
    ) -> Randomness:
        """The same numbers for the same arguments, on every device.

        Args:
            seed: None draws a fresh one from torch's global CPU generator.
            step: other numbers in every training step or calibration batch.
            rank: other directions on every rank of a data-parallel model; D is the same.
            calibrating: other numbers than the training steps have.
        """
        seed = fresh_seed() if seed is None else seed
        if calibrating:
            uses: tuple[Use, Use] = ("calibration directions", "calibration dimensions")
        else:
            uses = ("directions", "dimensions")
        return cls(DrawCounter(seed, uses[0], step, rank), DrawCounter(seed, uses[1], step))


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


class StepOutput:
    """What the outputs of a step with a penalty share; its fields are documented there."""

    loss: Tensor
    model_output: Any
    skipped: int | None
    empty: bool

    @property
    def total(self) -> Tensor:
        """Task loss + penalty: what train mode minimises.

        Raises:
            ValueError: the model computed no task loss.
        """
        if self.skipped is not None or self.empty:
            return self.loss
        task = getattr(self.model_output, "loss", None)
        if task is None:
            raise ValueError(
                "the model returned no task loss: train mode needs 'labels' in the batch (and a "
                "model with a head); for unlabelled data use .loss"
            )
        return task + self.loss

    def stand_in_loss(self) -> Tensor:
        """A zero with zero gradients for all that took part."""
        task = getattr(self.model_output, "loss", None)
        return (self.loss if task is None else self.loss + task) * 0
