"""Full Jacobians and Hessians of tiny models by finite differences of the plain model's outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tiny_models import classifier, token_batch

Function = Callable[[Tensor], Tensor]


@dataclass
class Full:
    """Squared norms of all derivatives of one row's block outputs.

    Attributes:
        jacobian: ``[K, T, d]``, Σ over inputs of (∂z_{t,j}/∂x)².
        hessian: ``[K, T, d]``, ‖H_{t,j}‖_F².
    """

    jacobian: Tensor
    hessian: Tensor


def embedded(model: Any, input_ids: Tensor) -> Tensor:
    """Return the embedding layer's output, detached."""
    return model.get_input_embeddings()(input_ids).detach()


def outputs_of(model: Any, names: str, extra: dict[str, Tensor]) -> Function:
    """Return x ``[N, T, d]`` → block outputs ``[N, K, T, d]``, or logits ``[N, 1, 1, C]``."""

    def function(x: Tensor) -> Tensor:
        rows = {key: value.expand(len(x), *value.shape[1:]) for key, value in extra.items()}
        output = model(inputs_embeds=x, output_hidden_states=True, **rows)
        if names == "logits":
            return output.logits[:, None, None]
        return torch.stack(output.hidden_states[1:], 1)

    return function


def by_differences(function: Function, x: Tensor, step: float = 4e-3) -> Full:
    """Take central differences of fourth order (Richardson of h and 2h), in batched passes."""
    size = x.numel()

    def second(h: float) -> Tensor:
        eye = h * torch.eye(size, dtype=x.dtype)
        a, b = torch.triu_indices(size, size)
        corners = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        values = [_chunked(function, x, s * eye[a] + r * eye[b]) * s * r for s, r in corners]
        # The upper triangle stands for both: its off-diagonal squares count twice.
        weight = torch.where(a == b, 1.0, 2.0**0.5).to(x).view(-1, 1, 1, 1)
        return torch.stack(values).sum(0) * weight / (4 * h * h)

    def first(h: float) -> Tensor:
        eye = h * torch.eye(size, dtype=x.dtype)
        return (_chunked(function, x, eye) - _chunked(function, x, -eye)) / (2 * h)

    with torch.no_grad():
        jacobian = (4 * first(step) - first(2 * step)) / 3
        hessian = (4 * second(step) - second(2 * step)) / 3
    return Full(jacobian.square().sum(0), hessian.square().sum(0))


def _chunked(function: Function, x: Tensor, moves: Tensor, size: int = 512) -> Tensor:
    return torch.cat([function(x + part.view(-1, *x.shape[1:])) for part in moves.split(size)])


@functools.cache
def table(name: str, tokens: int, outputs: str = "blocks") -> Full:
    """Return all derivatives of a tiny classifier on a sequence."""
    model, batch = classifier(name), token_batch([tokens])
    function = outputs_of(model, outputs, {"attention_mask": batch["attention_mask"]})
    return by_differences(function, embedded(model, batch["input_ids"]))
