"""The forward estimator: every layer, token and dimension from one Taylor-mode pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
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


def measure(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> TokenNorms:
    """‖J_t‖ and Σ_j ‖H_{t,j}‖ of the chosen layers, differentiable.

    More than 4 directions take several passes, whose squares are averaged before any root.
    """
    mask = padding_mask(batch, check_rows=settings.check_values)
    sampled: list[tuple[Tensor | None, float]] = []
    first: list[list[Tensor]] = []  # of each pass, a sum over its directions for each layer
    second: list[list[Tensor]] = []
    pairs = 0
    result: Pass | None = None
    tokens = mask
    for count in _directions_per_pass(settings.directions):
        this = _jet_pass(model, batch, mask, settings, random, count)
        blocks = [_as_jet(block) for block in chosen_blocks(this, settings)]
        if result is None:
            result = this
            tokens = block_tokens(blocks[0], mask, settings)
            sampled = [_sample(block, settings, random) for block in blocks]
        layout = blocks[0].jet_layout
        squares = [
            stream_squares(block.streams, layout, indices, tokens)
            for block, (indices, _) in zip(blocks, sampled, strict=True)
        ]
        first.append([of_first * layout.directions for of_first, _ in squares])
        if settings.second_order:
            pairs += len(layout.pairs)
            # of the tensor: over all dimensions
            summed = [s if settings.per_dimension else s.sum(-1, keepdim=True) for _, s in squares]
            second.append([s * len(layout.pairs) for s in summed])
    assert result is not None
    jacobian = torch.stack(_totals(first)) / settings.directions
    hessian = [
        hessian_norm(
            of_layer / pairs,
            pairs=pairs,
            scale=scale,
            per_dimension=settings.per_dimension,
            squared=settings.squared,
        )
        for of_layer, (_, scale) in zip(_totals(second), sampled, strict=False)
    ]
    return TokenNorms(
        jacobian if settings.squared else safe_sqrt(jacobian),
        torch.stack(hessian) if hessian else None,
        tokens,
        result,
    )


def _totals(passes: list[list[Tensor]]) -> list[Tensor]:
    """Of each layer the sum over passes."""
    return [reduce(torch.add, layer) for layer in zip(*passes, strict=True)]


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


def chosen_blocks(result: Pass, settings: Settings) -> list[Tensor]:
    """The outputs that ``settings.layers`` names; a classifier's logits as one token's block."""
    if settings.layers != "logits":
        return [result.blocks[k] for k in layer_indices(settings.layers, len(result.blocks))]
    if result.logits is None:
        raise ValueError("layers='logits' was asked for, but the model returned no logits")
    return [_of_one_token(result.logits) if result.logits.ndim == 2 else result.logits]


def _of_one_token(logits: Tensor) -> Tensor:
    """``[B, 1, classes]`` of ``[B, classes]``; the pass that a jet is of may have ended."""
    if isinstance(logits, JetTensor):
        return logits.with_streams(logits.streams.unsqueeze(2))
    return logits.unsqueeze(1)


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
