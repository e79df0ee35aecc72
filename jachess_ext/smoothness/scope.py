"""Which layers, tokens and output dimensions a smoothness norm runs over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..jet.directions import DrawCounter
from ..ops.directions import sample_directions

Scope = Literal["all", "first", "last"]
Layers = Literal["all", "logits"] | Sequence[int]
Dimensions = int | Literal["all"]

REFERENCE_DIMENSIONS = 10
"""|D| that λ is understood for: with all dimensions, their sum is scaled by |D|/d."""


def token_weights(mask: Tensor, scope: Scope) -> Tensor:
    """``[B, T]`` booleans: the real tokens whose norms are summed.

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
    """Block numbers 0..K−1 for ``"all"`` or a list (negative numbers count from the end).

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


def check_dimensions(dimensions: Dimensions) -> None:
    """Raise ValueError unless ``dimensions`` is "all" or a number from 0 up."""
    if dimensions == "all":
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or dimensions < 0:
        raise ValueError(
            f"dimensions is {dimensions!r}; expected 'all' or how many output dimensions to sample"
        )


def sample_dimensions(
    width: int, dimensions: Dimensions, counter: DrawCounter
) -> tuple[Tensor | None, float]:
    """The set D of one layer and the scale of its sum.

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
