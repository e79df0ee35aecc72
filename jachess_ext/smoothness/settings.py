"""Settings of the estimators, and their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..ops.directions import fresh_seed_on, number_on, sample_directions
from .directions import Distribution, DrawCounter, Use, fresh_seed

Engine = Literal["jet", "reverse"]
HessianNorm = Literal["per_dimension", "tensor"]
Scope = Literal["all", "first", "last"]
Layers = Literal["all", "logits"] | Sequence[int]
Dimensions = int | Literal["all"]
Number = int | Tensor

# Name → function of (model, batch, settings, random). `estimators` and `reverse` register theirs;
# `estimators.measure` calls them.
ENGINES: dict[str, Callable[..., Any]] = {}

# The number of sampled dimensions that strengths refer to: a sum over all d is scaled by 10/d.
REFERENCE_DIMENSIONS = 10


@dataclass(frozen=True)
class Settings:
    """The arguments shared by `smoothness` and `JacHess`, which document them.

    Attributes:
        check_values: whether to raise an error if embeddings are not finite or a row is all
            padding.  False: the norms are then meaningless, and the caller checks them afterwards,
            with fewer waits for a GPU.
    """

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

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, tuple(ENGINES))
        check_choice("scope", self.scope, get_args(Scope))
        check_choice("hessian_norm", self.hessian_norm, get_args(HessianNorm))
        check_choice("distribution", self.distribution, get_args(Distribution))
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
        """Whether there is a Hessian term: ``hessian`` is True and ``dimensions`` not 0."""
        return self.hessian and self.dimensions != 0

    @property
    def per_dimension(self) -> bool:
        return self.hessian_norm == "per_dimension"


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless the value of argument ``name`` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")


def check_every(every: object) -> None:
    """Raise ValueError unless ``every`` is a whole number of steps from 1 up."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}; expected a number of steps from 1 up")


@dataclass
class Randomness:
    """Counters for the random numbers of one call.

    Attributes:
        directions: counter for the random directions.
        dimensions: counter for the sampled output dimensions D; a separate one, so that D does not
            depend on the number of directions.
    """

    directions: DrawCounter
    dimensions: DrawCounter

    @classmethod
    def from_seed(
        cls, seed: Number | None, step: Number = 0, *, rank: int = 0, calibrating: bool = False
    ) -> Randomness:
        """Return counters that give the same random numbers for the same arguments on every device.

        Args:
            seed: the seed, a number or an int64 scalar on the model's device; None: drawn from
                torch's global CPU generator, or, if ``step`` is a tensor, from the generator of its
                device.
            step: number of the training step or calibration batch, or an int64 scalar on the
                model's device.
            rank: rank of this process; ranks draw different directions, but the same sampled
                dimensions D.
            calibrating: whether the numbers are for calibration, which draws other directions and
                another D than training.
        """
        if seed is None:
            seed = fresh_seed_on(step.device) if isinstance(step, Tensor) else fresh_seed()
        directions: Use = "calibration directions" if calibrating else "directions"
        dimensions: Use = "calibration dimensions" if calibrating else "dimensions"
        return cls(DrawCounter(seed, directions, step, rank), DrawCounter(seed, dimensions, step))


def tokens_in_scope(mask: Tensor, scope: Scope) -> Tensor:
    """Return a mask of each row's real tokens in scope ("all", the "first" or the "last"),
    ``[B, T]``."""
    if scope == "all":
        return mask
    rank = mask.long().cumsum(1)
    scope_rank = 1 if scope == "first" else rank[:, -1:]
    return mask & (rank == scope_rank)


def layer_indices(layers: Layers, count: int) -> list[int]:
    """Return the indices of the chosen blocks of a model with ``count`` blocks, from 0.

    Args:
        layers: "all", or a list of indices, in which negative ones count from the end.

    Raises:
        ValueError: ``layers`` is an empty list, another word, or has an index out of range.
    """
    if isinstance(layers, str):
        if layers != "all":
            raise ValueError(
                f"layers is {layers!r}; expected 'all', 'logits' or a list of block numbers"
            )
        return list(range(count))
    chosen = list(layers)
    invalid = [k for k in chosen if not isinstance(k, int) or not -count <= k < count]
    if invalid or not chosen:
        raise ValueError(
            f"layers is {chosen}, but the model has blocks 0 to {count - 1}; expected a non-empty "
            "list of these, or 'all', or 'logits'"
        )
    return [k % count for k in chosen]


def stack_equal_shapes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return K tensors as a list of one stack ``[K, ...]`` if they have the same shape, otherwise
    as K stacks ``[1, ...]``."""
    # Not a set of shapes: within a graph of any size they hold symbols, which have no hash.
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return [torch.stack([*tensors])]
    return [tensor.unsqueeze(0) for tensor in tensors]


def sample_dimensions(
    widths: Sequence[int], settings: Settings, counter: DrawCounter, device: torch.device
) -> list[tuple[Tensor | None, float]]:
    """Draw the set D of output dimensions of each layer, and return it with the factor of its sum.

    For each layer one normal number per dimension is drawn, and D is the set of the dimensions with
    the smallest numbers: every subset is equally likely, and D is the same on every device.  The
    numbers are drawn on the device itself, so that the host does not wait for a copy.

    Args:
        widths: number of dimensions of each layer.

    Returns:
        For each layer, the indices in D (None: all dimensions) and the scale, which makes strengths
        comparable: 1 for a sampled D, `REFERENCE_DIMENSIONS`/d for all d dimensions.  The tensor
        norm always uses all dimensions.
    """
    size = settings.dimensions
    if not settings.per_dimension:
        return [(None, 1.0) for _ in widths]
    if size == "all":
        return [(None, min(REFERENCE_DIMENSIONS, width) / width) for width in widths]
    layers = torch.arange(len(widths), device=device)
    seed, offsets = number_on(device, counter.seed), layers + counter.next_offset()
    counter.drawn += len(widths) - 1  # a draw for each layer
    numbers = [
        sample_directions(layers[0], 1, width, seed=seed, offset=offset).flatten()
        for width, offset in zip(widths, offsets, strict=True)
    ]
    orders = [order for rows in stack_equal_shapes(numbers) for order in rows.argsort(stable=True)]
    return [(order[:size], 1.0) for order in orders]
