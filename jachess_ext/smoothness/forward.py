"""The forward estimator: every layer, token and dimension from one Taylor-mode pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..jet.api import make_input
from ..jet.directions import draw_directions
from ..jet.layout import MAX_DIRECTIONS
from ..jet.tensor import JetTensor
from .model_pass import Pass, padding_mask, run_model
from .norms import hessian_norm, safe_sqrt, stream_squares
from .scope import layer_indices, sample_dimensions, token_weights
from .settings import Randomness, Settings, TokenNorms


@dataclass
class _Squares:
    """Sums over the passes so far, one entry per layer."""

    first: list[Tensor]
    second: list[Tensor]
    directions: int
    pairs: int


def measure(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> TokenNorms:
    """‖J_t‖ and Σ_j ‖H_{t,j}‖ of the chosen layers, differentiable.

    More than 4 directions take several passes, whose squares are averaged before any root.
    """
    mask = padding_mask(batch, check_rows=settings.check_values)
    sampled: list[tuple[Tensor | None, float]] = []
    total: _Squares | None = None
    result: Pass | None = None
    tokens = mask
    for count in _directions_per_pass(settings.directions):
        this = _jet_pass(model, batch, mask, settings, random, count)
        blocks = _chosen_blocks(this, settings)
        if result is None:
            result = this
            tokens = block_tokens(blocks[0], mask, settings)
            sampled = [_sample(block, settings, random) for block in blocks]
        total = _add(total, _squares(blocks, sampled, tokens, settings))
    assert total is not None and result is not None
    return _norms(total, sampled, settings, tokens, result)


def _directions_per_pass(count: int) -> list[int]:
    """Passes of 2 to 4 directions, as even as they can be; a single one for 1."""
    passes = math.ceil(count / MAX_DIRECTIONS)
    return [count // passes + (number < count % passes) for number in range(passes)]


def _jet_pass(
    model: nn.Module,
    batch: Mapping[str, Any],
    mask: Tensor,
    settings: Settings,
    random: Randomness,
    count: int,
) -> Pass:
    def enter(x: Tensor) -> JetTensor:
        directions = draw_directions(
            x.detach(),
            count,
            mask=mask,
            distribution=settings.distribution,
            counter=random.directions,
        )
        order = 2 if settings.second_order else 1
        return make_input(x, directions, order=order, check_values=settings.check_values)

    return run_model(model, batch, enter, through_head=settings.layers == "logits")


def _chosen_blocks(result: Pass, settings: Settings) -> list[JetTensor]:
    if settings.layers == "logits":
        return [_as_jet(logits_as_block(result.logits))]
    chosen = layer_indices(settings.layers, len(result.blocks))
    return [_as_jet(result.blocks[k]) for k in chosen]


def _as_jet(block: Any) -> JetTensor:
    if not isinstance(block, JetTensor):
        raise ValueError(
            "a hidden state does not depend on the embeddings (detached, or another input's); "
            "its derivatives would be zero"
        )
    return block


def _sample(
    block: JetTensor, settings: Settings, random: Randomness
) -> tuple[Tensor | None, float]:
    """D of one layer; the tensor norm runs over all dimensions."""
    if not settings.per_dimension:
        return None, 1.0
    return sample_dimensions(block.shape[-1], settings.dimensions, random.dimensions)


def _squares(
    blocks: list[JetTensor],
    sampled: list[tuple[Tensor | None, float]],
    tokens: Tensor,
    settings: Settings,
) -> _Squares:
    layout = blocks[0].jet_layout
    first, second = [], []
    for block, (indices, _) in zip(blocks, sampled, strict=True):
        of_first, of_second = stream_squares(block.streams, layout, indices, tokens)
        if not settings.per_dimension:  # of the tensor: over all dimensions
            of_second = of_second.sum(-1, keepdim=True)
        first.append(of_first * layout.directions)
        if settings.second_order:
            second.append(of_second * len(layout.pairs))
    return _Squares(first, second, layout.directions, len(layout.pairs))


def _add(a: _Squares | None, b: _Squares) -> _Squares:
    if a is None:
        return b
    first = [x + y for x, y in zip(a.first, b.first, strict=True)]
    second = [x + y for x, y in zip(a.second, b.second, strict=True)]
    return _Squares(first, second, a.directions + b.directions, a.pairs + b.pairs)


def _norms(
    total: _Squares,
    sampled: list[tuple[Tensor | None, float]],
    settings: Settings,
    tokens: Tensor,
    result: Pass,
) -> TokenNorms:
    jacobian = torch.stack(total.first) / total.directions
    if not settings.squared:
        jacobian = safe_sqrt(jacobian)
    hessian = None
    if settings.second_order:
        layers = [
            hessian_norm(
                squares / total.pairs,
                pairs=total.pairs,
                scale=scale,
                per_dimension=settings.per_dimension,
                squared=settings.squared,
            )
            for squares, (_, scale) in zip(total.second, sampled, strict=True)
        ]
        hessian = torch.stack(layers)
    return TokenNorms(jacobian, hessian, tokens, result)


def logits_as_block(logits: Any) -> Any:
    """Logits of a classifier ``[B, C]`` as the block of one token ``[B, 1, C]``."""
    if logits is None:
        raise ValueError("layers='logits' was asked for, but the model returned no logits")
    return logits.unsqueeze(1) if logits.ndim == 2 else logits


def block_tokens(block: Tensor, mask: Tensor, settings: Settings) -> Tensor:
    """Which tokens of a block count; a classifier's logits have one, which always does."""
    if block.shape[:2] == mask.shape:
        return token_weights(mask, settings.scope)
    if block.shape[1] == 1:
        return torch.ones_like(mask[:, :1])
    raise ValueError(
        f"a block output of shape {list(block.shape)} does not match the batch's tokens "
        f"{list(mask.shape)}"
    )
