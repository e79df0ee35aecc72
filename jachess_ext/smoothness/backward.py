"""The reverse estimator, Eq. 5 and 6 of the paper as they stand, and the exact engine.

    ‖J_t‖_F ≈ √( 1/p Σ_i ‖∂(v_i·z_t)/∂x‖² )        ‖H_j‖_F ≈ √( 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖² )

One vector–Jacobian product per layer, token and projection; per sampled dimension one more, and
p on top of it.  A batch costs what a row costs, since rows do not see each other.  The exact engine
takes every unit vector for v_i and sums in place of the mean; for tests and small models only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..jet.directions import draw_directions
from .composed_norms import ComposedNorms
from .forward import block_tokens, chosen_blocks
from .model_pass import Pass, padding_mask, run_model
from .norms import hessian_norm, safe_sqrt
from .scope import sample_dimensions
from .settings import Randomness, Settings, TokenNorms

MAX_ENTRIES = 500_000_000
"""Derivatives computed per row at most; past this the exact engine refuses rather than runs on."""


@dataclass
class Graph:
    """Plain outputs with the graph that leads to the embeddings.

    Attributes:
        x: ``[B, T, d]`` embeddings.
        blocks: the chosen outputs, ``[B, T, d_k]``.
        mask: ``[B, T]``, real tokens.
        tokens: ``[B, T']``, real tokens in scope (T' = 1 for a classifier's logits).
        train: whether what is made of the graph will itself be differentiated.
    """

    x: Tensor
    blocks: list[Tensor]
    mask: Tensor
    tokens: Tensor
    result: Pass
    settings: Settings
    random: Randomness
    train: bool

    @property
    def exact(self) -> bool:
        return self.settings.engine == "exact"

    def gradient(self, scalar: Tensor, create_graph: bool) -> Tensor:
        """∂scalar/∂x, zero at padded positions, which are not embeddings of the sequence."""
        (gradient,) = torch.autograd.grad(
            scalar, self.x, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )
        return gradient * self.mask.unsqueeze(-1)

    def squares(self, scalar: Tensor) -> Tensor:
        """‖∂scalar/∂x‖² per row, ``[B]``."""
        return self.gradient(scalar, self.train).square().sum((-1, -2))

    def draw(self, like: Tensor, mask: Tensor | None) -> Tensor:
        """``[p, *like.shape]``: projections v_i."""
        return draw_directions(
            like.detach(),
            self.settings.directions,
            mask=mask,
            distribution=self.settings.distribution,
            counter=self.random.directions,
        )

    def per_token(self, norm: Callable[[int], Tensor]) -> Tensor:
        """``[B, T]``: ``norm(t)`` of each place with a counted token, zero where nothing counts."""
        zero = self.x.new_zeros(len(self.x))
        counted = self.tokens.any(0).tolist()
        columns = [norm(t) if counts else zero for t, counts in enumerate(counted)]
        return torch.stack(columns, 1) * self.tokens


def measure(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> TokenNorms:
    """‖J_t‖ and Σ_j ‖H_{t,j}‖ from ``settings.directions`` projections, or all; differentiable."""
    train = torch.is_grad_enabled()
    with torch.enable_grad():
        graph = build_graph(model, batch, settings, random, train)
        if graph.exact:
            _check_size(graph)
        jacobian = torch.stack([_jacobian(graph, block) for block in graph.blocks])
        hessian = None
        if settings.second_order:
            hessian = torch.stack([_hessian(graph, block) for block in graph.blocks])
    return TokenNorms(jacobian, hessian, graph.tokens, graph.result)


def build_graph(
    model: nn.Module,
    batch: Mapping[str, Any],
    settings: Settings,
    random: Randomness,
    train: bool,
) -> Graph:
    """Run the model once.  SDPA's fused kernels have no double backward; the math form has.

    Raises:
        ValueError: in inference mode; or gradient checkpointing is on: what is computed anew
            during a backward would not be the graph built here.
    """
    if any(getattr(m, "gradient_checkpointing", False) and m.training for m in model.modules()):
        raise ValueError(
            f"engine={settings.engine!r} does not work with gradient checkpointing: use "
            "engine='jet', or call model.gradient_checkpointing_disable()"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"engine={settings.engine!r} takes gradients, which torch.inference_mode() forbids: "
            "use torch.no_grad(), or engine='jet'"
        )
    mask = padding_mask(batch)
    entered: list[Tensor] = []

    def enter(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(
                f"the embeddings have dtype {x.dtype}, but derivatives need a floating-point "
                "tensor; token ids go in as input_ids"
            )
        x = x if x.requires_grad else x.detach().requires_grad_()
        if settings.check_values and not torch.isfinite(x).all():
            raise ValueError("the embeddings contain NaN or infinite values; check the weights")
        entered.append(x)
        return x

    with ExitStack() as contexts:
        contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        if train and settings.second_order:  # a third derivative
            contexts.enter_context(ComposedNorms())
        result = run_model(model, batch, enter)
    blocks = chosen_blocks(result, settings)
    tokens = block_tokens(blocks[0], mask, settings)
    return Graph(entered[0], blocks, mask, tokens, result, settings, random, train)


def _check_size(graph: Graph) -> None:
    inputs = graph.x[0].numel()
    outputs = sum(block.shape[-1] for block in graph.blocks) * int(graph.tokens.any(0).sum())
    entries = outputs * inputs * (inputs if graph.settings.second_order else 1)
    if entries > MAX_ENTRIES:
        raise ValueError(
            f"the exact engine would compute {entries:.1e} derivatives per row ({inputs} inputs, "
            f"{outputs} outputs); it is for tiny models: use engine='jet', fewer layers, or a "
            "shorter sequence"
        )


def _jacobian(graph: Graph, block: Tensor) -> Tensor:
    """``[B, T]``."""
    if graph.exact:
        units = torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
        projections = units[:, None, None].expand(-1, *block.shape)
    else:
        projections = graph.draw(block, graph.mask if block.shape[:2] == graph.mask.shape else None)

    def norm(t: int) -> Tensor:
        squares = torch.stack([graph.squares((v[:, t] * block[:, t]).sum()) for v in projections])
        total = squares.sum(0) if graph.exact else squares.mean(0)
        return total if graph.settings.squared else safe_sqrt(total)

    return graph.per_token(norm)


def _hessian(graph: Graph, block: Tensor) -> Tensor:
    """``[B, T]``."""
    settings, width = graph.settings, block.shape[-1]
    indices, scale = sample_dimensions(width, settings.dimensions, graph.random.dimensions)
    if indices is None or not settings.per_dimension:
        indices = torch.arange(width)
    elif graph.exact:
        indices = indices.sort().values

    def norm(t: int) -> Tensor:
        return hessian_norm(
            torch.stack([_hessian_squares(graph, block[:, t, j]) for j in indices], -1),
            pairs=0,
            scale=scale,
            per_dimension=settings.per_dimension,
            squared=settings.squared,
        )

    return graph.per_token(norm)


def _hessian_squares(graph: Graph, outputs: Tensor) -> Tensor:
    """‖∂²z_j/∂x²‖² per row, ``[B]``, or its estimate 1/p Σ_i ‖∂(v_i·∂z_j/∂x)/∂x‖²."""
    gradient = graph.gradient(outputs.sum(), create_graph=True)
    zero: Tensor = gradient.new_zeros(len(gradient))
    if not gradient.requires_grad:  # z_j is linear in x
        return zero
    if graph.exact:  # one backward per input coordinate, rows together
        return sum((graph.squares(g.sum()) for g in _coordinates(graph, gradient)), zero)
    projections = graph.draw(graph.x, graph.mask)
    return torch.stack([graph.squares((v * gradient).sum()) for v in projections]).mean(0)


def _coordinates(graph: Graph, gradient: Tensor) -> Iterator[Tensor]:
    """``[B]`` each: the gradient's entries, but those at places that are padding in every row."""
    for t in graph.mask.any(0).nonzero().flatten().tolist():
        yield from gradient[:, t].unbind(-1)
