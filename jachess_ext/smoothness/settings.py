"""What is asked of an estimator, checked once, and what every estimator gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..jet.directions import Distribution, DrawCounter, Use, fresh_seed
from ..ops.directions import sample_directions

Engine = Literal["jet", "reverse"]
HessianNorm = Literal["per_dimension", "tensor"]
Scope = Literal["all", "first", "last"]
Layers = Literal["all", "logits"] | Sequence[int]
Dimensions = int | Literal["all"]

ENGINES: dict[str, Callable[..., TokenNorms]] = {}
"""Name -> the function (model, batch, settings, random) that measures; `estimators` fills it."""

REFERENCE_DIMENSIONS = 10
"""|D| that λ is understood for: with all dimensions, their sum is scaled by |D|/d."""


@dataclass(frozen=True)
class Settings:
    """Arguments shared by `smoothness` and `JacHess`, and documented there."""

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
        _one_of("engine", self.engine, tuple(ENGINES))
        _one_of("scope", self.scope, get_args(Scope))
        _one_of("hessian_norm", self.hessian_norm, get_args(HessianNorm))
        _one_of("distribution", self.distribution, get_args(Distribution))
        size = self.dimensions
        if size != "all" and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ValueError(
                f"dimensions is {size!r}; expected 'all' or how many output dimensions to sample"
            )
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
        """Tell whether the Hessian term exists: asked for, over a non-empty set of dimensions."""
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
        """Return the same numbers for the same arguments, on every device.

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
        model_pass: the `Pass` that they were measured in.
    """

    jacobian: Tensor
    hessian: Tensor | None
    tokens: Tensor
    model_pass: Any


def token_weights(mask: Tensor, scope: Scope) -> Tensor:
    """Return ``[B, T]`` booleans: the real tokens whose norms are summed.

    ``first`` and ``last`` are the first and the last *real* token, on whichever side padding is.
    """
    if scope == "all":
        return mask
    if scope not in ("first", "last"):
        raise ValueError(f"scope is {scope!r}; expected 'all', 'first' or 'last'")
    rank = mask.long().cumsum(1)
    wanted = 1 if scope == "first" else rank[:, -1:]
    return mask & (rank == wanted)


def layer_indices(layers: Layers, count: int) -> list[int]:
    """Return block numbers 0..K−1 of ``"all"`` or a list (negative ones count from the end).

    Raises:
        ValueError: an empty list or a number outside the model.
    """
    if isinstance(layers, str):
        if layers != "all":
            raise ValueError(
                f"layers is {layers!r}; expected 'all', 'logits' or a list of block numbers"
            )
        return list(range(count))
    chosen = list(layers)
    bad = [k for k in chosen if not isinstance(k, int) or not -count <= k < count]
    if bad or not chosen:
        raise ValueError(
            f"layers is {chosen}, but the model has blocks 0 to {count - 1}; expected a non-empty "
            "list of these, or 'all', or 'logits'"
        )
    return [k % count for k in chosen]


def sample_dimensions(
    width: int, dimensions: Dimensions, counter: DrawCounter
) -> tuple[Tensor | None, float]:
    """Draw the set D of a layer, and give the scale of its sum.

    D holds the dimensions with the smallest of ``width`` independent normal numbers, drawn on the
    CPU: every subset is as likely as any other, and the same on every device.

    Returns:
        (indices or None for all of them, scale).  A sampled D has scale 1; all dimensions have
        scale |D|/d with |D| = `REFERENCE_DIMENSIONS`, so that λ keeps its meaning.
    """
    if dimensions == "all":
        return None, min(REFERENCE_DIMENSIONS, width) / width
    token = torch.zeros((), dtype=torch.int64, device="cpu")
    numbers = sample_directions(token, 1, width, seed=counter.seed, offset=counter.next_offset())
    order = numbers.flatten().argsort(stable=True)
    return order[: min(int(dimensions), width)], 1.0


class StepOutput:
    """Base of the outputs of a step with a penalty; its fields are documented there."""

    loss: Tensor
    model_output: Any
    skipped: int | None
    empty: bool

    @property
    def total(self) -> Tensor:
        """Return task loss + penalty, which train mode minimises.

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
        """Return a zero with zero gradients for all that took part."""
        task = getattr(self.model_output, "loss", None)
        return (self.loss if task is None else self.loss + task) * 0
