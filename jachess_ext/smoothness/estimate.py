"""`jx.smoothness`: how strongly a model's hidden states react to its token embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..jet.directions import Distribution
from ..jet.dynamo import without_dynamo
from . import backward, forward
from .scope import Dimensions, Layers, Scope
from .settings import Engine, HessianNorm, Randomness, Settings, TokenNorms

_MEASURES = {
    "jet": forward.measure,
    "reverse": backward.measure,
    "exact": backward.measure,
}


@dataclass(frozen=True)
class Smoothness:
    """Norms of the Jacobian and Hessian of each chosen layer.

    Attributes:
        jacobian: ``[K]``; batch mean of Σ_t ‖J_t‖_F.
        hessian: ``[K]``; batch mean of Σ_t Σ_{j∈D} ‖H_{t,j}‖_F; None with ``hessian=False``.
        jacobian_tokens, hessian_tokens: ``[K, B, T]``, per token; zero where a token is padding or
            out of scope.  ``layers="logits"`` of a classifier has T = 1.
        tokens: ``[B, T]`` booleans: the tokens that count.
    """

    jacobian: Tensor
    hessian: Tensor | None
    jacobian_tokens: Tensor
    hessian_tokens: Tensor | None
    tokens: Tensor


def smoothness(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    engine: Engine = "jet",
    directions: int = 2,
    layers: Layers = "all",
    scope: Scope = "all",
    dimensions: Dimensions = 10,
    hessian: bool = True,
    seed: int | None = None,
    step: int = 0,
    hessian_norm: HessianNorm = "per_dimension",
    squared: bool = False,
    distribution: Distribution = "gaussian",
) -> Smoothness:
    """Norms of ∂z/∂x and ∂²z/∂x² of a model's block outputs z (Eq. 5–7, docs/how_it_works.md).

    The block outputs are the model's ``hidden_states[1:]``; the derivatives are with respect to
    what its embedding layer returns.  Differentiable unless under ``torch.no_grad()``.  The model
    runs as it is: call ``model.eval()`` first for a figure without dropout noise.

    Args:
        model: a transformers model (or one with ``get_input_embeddings`` and ``hidden_states``).
        batch: what a collator yields: input_ids or inputs_embeds, attention_mask, ...
        engine: "jet": one Taylor-mode pass. "reverse": Eq. 5 and 6, many backward passes.
            "exact": full derivatives, tiny models only.
        directions: random directions (jet: 1..4, the Hessian needs 2) or projections (reverse).
        layers: "all" blocks, a list of block numbers from 0, or "logits".
        scope: "all" real tokens, the "first" ([CLS]) or the "last" real one.
        dimensions: how many output dimensions D to sample per layer, afresh in every call; or
            "all", whose sum is scaled by 10/d so that it means the same.
        hessian: False computes first derivatives only.
        seed: any 64-bit integer. Same seed and step, same directions and dimensions, however the
            batch is padded, in every precision and on every device; None draws a fresh seed from
            torch's global CPU generator, which `torch.manual_seed` makes repeatable.
        step: other directions and dimensions of the same seed, independent of other steps'.
        hessian_norm: "per_dimension", Σ_j ‖H_j‖_F as in Eq. 7; "tensor", √(Σ_j ‖H_j‖_F²) over all
            dimensions.
        squared: squares in place of norms; every estimator of these is unbiased.
        distribution: of the directions, "gaussian" or "rademacher".

    Raises:
        TypeError, ValueError: bad arguments; a batch without inputs, with an all-padding row or a
            mask of the wrong shape; NaN embeddings; a model without hidden states.
        MissingJetRule: the model uses an operation the jet engine has no rule for.
    """
    settings = Settings(
        engine, directions, layers, scope, dimensions, hessian, hessian_norm, squared, distribution
    )
    return reduced(measure_tokens(model, batch, settings, Randomness.from_seed(seed, step)))


@without_dynamo
def measure_tokens(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, random: Randomness
) -> TokenNorms:
    """Run the engine that ``settings`` names."""
    return _MEASURES[settings.engine](model, batch, settings, random)


def reduced(norms: TokenNorms) -> Smoothness:
    """Sum over tokens, mean over the batch; without a graph under ``torch.no_grad()``."""
    jacobian, hessian = norms.jacobian, norms.hessian
    if not torch.is_grad_enabled():
        jacobian, hessian = jacobian.detach(), None if hessian is None else hessian.detach()
    means = None if hessian is None else hessian.sum(-1).mean(-1)
    return Smoothness(jacobian.sum(-1).mean(-1), means, jacobian, hessian, norms.tokens)
