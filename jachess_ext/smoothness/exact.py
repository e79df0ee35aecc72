"""Full Jacobians and Hessians by reverse over reverse; for tests and small models only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .backward import Graph, build_graph, row_squares, scatter
from .norms import hessian_norm, safe_sqrt
from .scope import sample_dimensions
from .settings import Randomness, Settings, TokenNorms

MAX_ENTRIES = 500_000_000
"""Second derivatives computed per row at most; past this the engine refuses rather than runs on."""


def measure(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> TokenNorms:
    """‖J_t‖_F and Σ_j ‖H_{t,j}‖_F without sampling (but for D); differentiable."""
    train = torch.is_grad_enabled()
    with torch.enable_grad():
        graph = build_graph(model, batch, settings, train)
        _check_size(graph, settings)
        pairs = [_block(graph, block, settings, random, train) for block in graph.blocks]
    jacobian = torch.stack([j for j, _ in pairs])
    hessian = torch.stack([h for _, h in pairs]) if settings.second_order else None
    return TokenNorms(jacobian, hessian, graph.tokens, graph.result)


def _check_size(graph: Graph, settings: Settings) -> None:
    inputs = graph.x[0].numel()
    outputs = sum(block.shape[-1] for block in graph.blocks) * int(graph.tokens.any(0).sum())
    entries = outputs * inputs * (inputs if settings.second_order else 1)
    if entries > MAX_ENTRIES:
        raise ValueError(
            f"the exact engine would compute {entries:.1e} derivatives per row ({inputs} inputs, "
            f"{outputs} outputs); it is for tiny models: use engine='jet', fewer layers, or a "
            "shorter sequence"
        )


def _block(
    graph: Graph, block: Tensor, settings: Settings, random: Randomness, train: bool
) -> tuple[Tensor, Tensor]:
    """(Jacobian, Hessian) norms, ``[B, T]`` each."""
    width = block.shape[-1]
    indices, scale = sample_dimensions(width, settings.dimensions, random.dimensions)
    everything = indices is None or not settings.per_dimension
    sampled = set(range(width) if everything else indices.tolist())  # type: ignore[union-attr]
    jacobian, hessian = {}, {}
    for t, _ in graph.positions():
        first, second = [], []
        for j in range(width):
            gradient = graph.gradient(block[:, t, j].sum(), create_graph=True)
            first.append(row_squares(gradient))
            if settings.second_order and j in sampled:
                second.append(_hessian_squares(graph, gradient, train))
        squares = torch.stack(first).sum(0)
        jacobian[t] = squares if settings.squared else safe_sqrt(squares)
        if second:
            hessian[t] = hessian_norm(
                torch.stack(second, -1),
                pairs=0,
                scale=scale,
                per_dimension=settings.per_dimension,
                squared=settings.squared,
            )
    return scatter(jacobian, graph.tokens, block), scatter(hessian, graph.tokens, block)


def _hessian_squares(graph: Graph, gradient: Tensor, train: bool) -> Tensor:
    """‖∂gradient/∂x‖² per row, ``[B]``: one backward per input coordinate, rows together."""
    total: Tensor = gradient.new_zeros(len(gradient))
    if not gradient.requires_grad:  # z_j is linear in x
        return total
    for t in range(gradient.shape[1]):
        if not graph.mask[:, t].any():
            continue
        for i in range(gradient.shape[2]):
            row = graph.gradient(gradient[:, t, i].sum(), train)
            total = total + row_squares(row)
    return total
