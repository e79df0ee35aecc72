"""An engine that takes every derivative by backward passes: an oracle for tiny models.

Importing this module adds it to `jx.smoothness` and its users as ``engine="exact"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jachess_ext.smoothness.estimators import ForwardPass, hessian_norm, safe_sqrt
from jachess_ext.smoothness.reverse import Graph, build_graph
from jachess_ext.smoothness.settings import ENGINES, Randomness, Settings, sample_dimensions


def measure_exact(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> tuple[Tensor, Tensor | None, Tensor, ForwardPass]:
    """Compute ‖J_t‖ and Σ_j ‖H_{t,j}‖ themselves; differentiable."""
    train = torch.is_grad_enabled()
    with torch.enable_grad():
        graph = build_graph(model, batch, settings, random, train)
        jacobian = torch.stack([_jacobian(graph, block) for block in graph.blocks])
        hessian = None
        if settings.second_order:
            hessian = torch.stack([_hessian(graph, block) for block in graph.blocks])
    return jacobian, hessian, graph.tokens, graph.result


def _jacobian(graph: Graph, block: Tensor) -> Tensor:
    """Return ``[B, T]``, the norms ‖J_t‖ of a block."""

    def norm(t: int) -> Tensor:
        squares = torch.stack([graph.squares(z.sum()) for z in block[:, t].unbind(-1)]).sum(0)
        return squares if graph.settings.squared else safe_sqrt(squares)

    return graph.per_token(norm)


def _hessian(graph: Graph, block: Tensor) -> Tensor:
    """Return ``[B, T]``, the sums over D of the norms ‖H_{t,j}‖ of a block."""
    width = block.shape[-1]
    draw = graph.settings, graph.random.dimensions, block.device
    ((indices, scale),) = sample_dimensions([width], *draw)
    chosen = range(width) if indices is None else sorted(indices.tolist())

    def norm(t: int) -> Tensor:
        squares = [_hessian_squares(graph, block[:, t, j]) for j in chosen]
        return hessian_norm(torch.stack(squares, -1), graph.settings, scale=scale)

    return graph.per_token(norm)


def _hessian_squares(graph: Graph, outputs: Tensor) -> Tensor:
    """Return ‖∂²z_j/∂x²‖² per row, ``[B]``, by a backward pass for each input coordinate."""
    gradient = graph.gradient(outputs.sum(), create_graph=True)
    total = gradient.new_zeros(len(gradient))
    if not gradient.requires_grad:  # z_j is linear in x
        return total
    for t in graph.mask.any(0).nonzero().flatten().tolist():
        for of_coordinate in gradient[:, t].unbind(-1):
            total = total + graph.squares(of_coordinate.sum())
    return total


ENGINES["exact"] = measure_exact
