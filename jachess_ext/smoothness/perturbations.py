"""Directions in embedding space along which a decision should stay: noise, or swapped tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..jet.directions import DrawCounter, draw_directions
from .model_pass import unwrapped


class Perturbation(Protocol):
    """Draws directions u for a batch."""

    def __call__(
        self, model: nn.Module, batch: Any, x: Tensor, mask: Tensor, count: int, draw: DrawCounter
    ) -> Tensor:
        """``[count, B, T, d]``, zero where ``mask`` is false.

        Args:
            x: ``[B, T, d]``, the batch's token embeddings.
            mask: ``[B, T]`` booleans, true at real tokens.
            draw: says which random numbers; the same on every device.
        """


@dataclass(frozen=True)
class Isotropic:
    """Gaussian noise on every real token, with the root mean square of the batch's embeddings.

    The size is relative to the embeddings as they are now, and differentiable: a model cannot
    shrink its derivatives by growing its embedding table.

    Attributes:
        size: standard deviation over that root mean square.
    """

    size: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.size < float("inf"):
            raise ValueError(f"size is {self.size}; expected a number above 0")

    def __call__(
        self, model: nn.Module, batch: Any, x: Tensor, mask: Tensor, count: int, draw: DrawCounter
    ) -> Tensor:
        unit = draw_directions(x.detach(), count, mask=mask, counter=draw)
        return self.size * x[mask].square().mean().sqrt() * unit


@dataclass(frozen=True)
class Substitution:
    """Steps from a token's embedding to another token's: u_t = e(w'_t) − e(w_t), else 0.

    Every real token that is not special is swapped with probability ``share``.  A swapped token
    becomes the unknown token with probability ``unknown_share``, else a token of this batch drawn
    at random, so that common words come as often as they do in the text.  Both embeddings are
    differentiable: a model gains nothing by growing its embedding table.

    Attributes:
        special: ids that are neither swapped nor drawn.
        unknown: id of the unknown (or mask) token; None: only tokens of the batch are drawn.
    """

    special: Collection[int] = field(default=())
    unknown: int | None = None
    share: float = 0.15
    unknown_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; expected a number above 0, up to 1")
        if not 0 <= self.unknown_share <= 1:
            raise ValueError(f"unknown_share is {self.unknown_share}; expected 0 to 1")

    @classmethod
    def of(cls, tokenizer: Any, **settings: float) -> Substitution:
        """With the special and unknown tokens of a transformers tokenizer.

        The mask token stands in where a tokenizer knows no unknown token.
        """
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is None:
            unknown = getattr(tokenizer, "mask_token_id", None)
        return cls(frozenset(tokenizer.all_special_ids), unknown, **settings)

    def __call__(
        self, model: nn.Module, batch: Any, x: Tensor, mask: Tensor, count: int, draw: DrawCounter
    ) -> Tensor:
        ids = batch.get("input_ids")
        if ids is None:
            raise ValueError(
                "swapping tokens needs input_ids, but the batch has inputs_embeds; use isotropic "
                "directions"
            )
        swapped = self.swap(ids, mask, count, draw)
        layer: Any = unwrapped(model).get_input_embeddings()  # type: ignore[operator]
        return layer.forward(swapped) - x  # .forward: this runs within a hook of the layer

    def swap(self, ids: Tensor, mask: Tensor, count: int, draw: DrawCounter) -> Tensor:
        """``[count, B, T]``: the token ids with a share of them swapped."""
        special = torch.tensor(sorted(self.special), dtype=ids.dtype, device=ids.device)
        free = mask & ~torch.isin(ids, special)
        pool = ids[free]
        generator = generator_of(draw)
        # One number a free token, so that padding does not change what is drawn.
        other, unknown, chosen = torch.rand(3, count, len(pool), generator=generator).to(ids.device)
        new = pool[(other * len(pool)).long().clamp_(max=max(0, len(pool) - 1))]
        if self.unknown is not None:
            new = new.masked_fill(unknown < self.unknown_share, self.unknown)
        swapped = ids.repeat(count, 1, 1)
        swapped[:, free] = torch.where(chosen < self.share, new, pool)
        return swapped


def generator_of(draw: DrawCounter) -> torch.Generator:
    """A CPU generator for one draw, of its seed and offset."""
    seed = (draw.seed * 0x9E3779B97F4A7C15 + draw.next_offset()) % 2**63
    return torch.Generator().manual_seed(seed)
