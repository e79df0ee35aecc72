"""The reverse estimator, Eq. 5 and 6 of the paper as they stand.

    ‖J_t‖_F ≈ √( 1/p Σ_i ‖∂(v_i·z_t)/∂x‖² )        ‖H_j‖_F ≈ √( 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖² )

One vector–Jacobian product per layer, token and projection; per sampled dimension one more, and
p on top of it.  A batch costs what a row costs, since rows do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..jet.directions import draw_directions
from .backward import Graph, build_graph, row_squares, scatter
from .norms import hessian_norm, safe_sqrt
from .scope import sample_dimensions
from .settings import Randomness, Settings, TokenNorms


def measure(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> TokenNorms:
    """‖J_t‖ and Σ_j ‖H_{t,j}‖ from ``settings.directions`` projections; differentiable."""
    train = torch.is_grad_enabled()
    with torch.enable_grad():
        graph = build_graph(model, batch, settings, train)
        jacobian = [_jacobian(graph, block, settings, random, train) for block in graph.blocks]
        hessian = None
        if settings.second_order:
            hessian = [_hessian(graph, block, settings, random, train) for block in graph.blocks]
    second = None if hessian is None else torch.stack(hessian)
    return TokenNorms(torch.stack(jacobian), second, graph.tokens, graph.result)


def _jacobian(
    graph: Graph, block: Tensor, settings: Settings, random: Randomness, train: bool
) -> Tensor:
    """``[B, T]``."""
    projections = draw_directions(
        block.detach(),
        settings.directions,
        mask=graph.mask if block.shape[:2] == graph.mask.shape else None,
        distribution=settings.distribution,
        counter=random.directions,
    )
    columns = {}
    for t, _ in graph.positions():
        squares = [
            row_squares(graph.gradient((v[:, t] * block[:, t]).sum(), train)) for v in projections
        ]
        mean = torch.stack(squares).mean(0)
        columns[t] = mean if settings.squared else safe_sqrt(mean)
    return scatter(columns, graph.tokens, block)


def _hessian(
    graph: Graph, block: Tensor, settings: Settings, random: Randomness, train: bool
) -> Tensor:
    """``[B, T]``."""
    indices, scale = sample_dimensions(block.shape[-1], settings.dimensions, random.dimensions)
    if indices is None or not settings.per_dimension:
        indices = torch.arange(block.shape[-1])
    columns = {}
    for t, _ in graph.positions():
        squares = [
            _hessian_squares(graph, block[:, t, j], settings, random, train) for j in indices
        ]
        columns[t] = hessian_norm(
            torch.stack(squares, -1),
            pairs=0,
            scale=scale,
            per_dimension=settings.per_dimension,
            squared=settings.squared,
        )
    return scatter(columns, graph.tokens, block)


def _hessian_squares(
    graph: Graph, outputs: Tensor, settings: Settings, random: Randomness, train: bool
) -> Tensor:
    """1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖² per row, ``[B]``."""
    gradient = graph.gradient(outputs.sum(), create_graph=True)
    if not gradient.requires_grad:  # z_j is linear in x
        return gradient.new_zeros(len(gradient))
    projections = draw_directions(
        graph.x.detach(),
        settings.directions,
        mask=graph.mask,
        distribution=settings.distribution,
        counter=random.directions,
    )
    squares = [row_squares(graph.gradient((v * gradient).sum(), train)) for v in projections]
    return torch.stack(squares).mean(0)
