"""The published reference code's protocol, re-enacted from a description of it.

Per layer: one forward pass of the whole model with eager attention, of which only the classifier
token's hidden state is used; 10 random projections of it differentiated with respect to the
embeddings, with a graph (so that training needs the double backward); 10 Hessian products whose
results are copied out, so that the Hessian term adds to the loss's value but has no gradient.
Norms are squared.  What is re-enacted is its cost: nothing here is to be trained with.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.common.models import Batch
from benchmarks.common.timing import Step

PROJECTIONS = 10
Products = Literal["dimensions", "projections"]


def published_step(model: nn.Module, batch: Batch, products: Products = "dimensions") -> Step:
    """Forward and backward of the protocol's penalty over all layers.

    Each layer's loss is differentiated before the next layer's forward: the sum's gradient at the
    same cost, and memory for one layer's graphs only.

    Args:
        model: a sequence classifier with eager attention; sdpa has no double backward.
        products: how its 10 Hessian products are read: one each for 10 sampled output dimensions
            (Eq. 6 with |D| = 10), or the cheaper 10 projections of one dimension's gradient.
    """
    layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for layer in range(layers):
            _layer_penalty(model, batch, layer, products).backward()

    return step


def _layer_penalty(model: nn.Module, batch: Batch, layer: int, products: Products) -> Tensor:
    """Squared Jacobian norm plus detached squared Hessian norms of one layer; scalar."""
    embeddings = model.get_input_embeddings()(batch["input_ids"])  # type: ignore[operator]
    output = model.base_model(  # type: ignore[operator]
        inputs_embeds=embeddings, attention_mask=batch["attention_mask"], output_hidden_states=True
    )
    token = output.hidden_states[layer + 1][:, 0]
    return _jacobian_squares(token, embeddings) + _hessian_squares(token, embeddings, products)


def _gradient(scalar: Tensor, x: Tensor, *, create_graph: bool) -> Tensor:
    (gradient,) = torch.autograd.grad(scalar, x, create_graph=create_graph, retain_graph=True)
    return gradient


def _jacobian_squares(token: Tensor, x: Tensor) -> Tensor:
    total = token.new_zeros(())
    for _ in range(PROJECTIONS):
        gradient = _gradient((torch.randn_like(token) * token).sum(), x, create_graph=True)
        total = total + gradient.square().sum()
    return total / PROJECTIONS


def _hessian_squares(token: Tensor, x: Tensor, products: Products) -> Tensor:
    """Squared Hessian products, copied out: without a gradient, as in the published code."""
    count = PROJECTIONS if products == "dimensions" else 1
    dimensions = torch.randperm(token.shape[-1])[:count].tolist()
    squares = []
    for j in dimensions:
        gradient = _gradient(token[:, j].sum(), x, create_graph=True)
        for _ in range(PROJECTIONS // count):
            product = _gradient(
                (torch.randn_like(gradient) * gradient).sum(), x, create_graph=False
            )
            squares.append(product.square().sum())
    return torch.stack(squares).detach().sum() / (PROJECTIONS // count)
