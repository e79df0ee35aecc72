"""What the reverse and the exact engine share: a plain pass with a graph to the embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .composed_norms import ComposedNorms
from .forward import block_tokens, logits_as_block
from .model_pass import Pass, padding_mask, run_model
from .scope import layer_indices
from .settings import Settings


@dataclass
class Graph:
    """Plain outputs with the graph that leads to the embeddings.

    Attributes:
        x: ``[B, T, d]`` embeddings.
        blocks: the chosen outputs, ``[B, T, d_k]``.
        mask: ``[B, T]``, real tokens.
        tokens: ``[B, T']``, real tokens in scope (T' = 1 for a classifier's logits).
    """

    x: Tensor
    blocks: list[Tensor]
    mask: Tensor
    tokens: Tensor
    result: Pass

    def gradient(self, scalar: Tensor, create_graph: bool) -> Tensor:
        """∂scalar/∂x, zero at padded positions, which are not embeddings of the sequence."""
        (gradient,) = torch.autograd.grad(
            scalar, self.x, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )
        return gradient * self.mask.unsqueeze(-1)

    def positions(self) -> Iterator[tuple[int, Tensor]]:
        """(place, ``[B]`` which rows have a counted token there), for places with any."""
        for t in range(self.tokens.shape[1]):
            if self.tokens[:, t].any():
                yield t, self.tokens[:, t]


def build_graph(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, train: bool
) -> Graph:
    """Run the model once.  SDPA's fused kernels have no double backward; the math form has.

    Args:
        train: whether what is made of the graph will itself be differentiated.

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
    if settings.layers == "logits":
        blocks = [logits_as_block(result.logits)]
    else:
        chosen = layer_indices(settings.layers, len(result.blocks))
        blocks = [result.blocks[k] for k in chosen]
    tokens = block_tokens(blocks[0], mask, settings)
    return Graph(entered[0], blocks, mask, tokens, result)


def scatter(columns: dict[int, Tensor], tokens: Tensor, like: Tensor) -> Tensor:
    """``[B]`` per position into ``[B, T]``, zero where nothing counts."""
    zero = like.new_zeros(tokens.shape[0])
    rows = [columns.get(t, zero) for t in range(tokens.shape[1])]
    return torch.stack(rows, 1) * tokens


def row_squares(gradient: Tensor) -> Tensor:
    """Squared norm per row: ``[B, T, d]`` → ``[B]``."""
    return gradient.square().sum((-1, -2))
