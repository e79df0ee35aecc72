"""Gradient checkpointing of models whose blocks end in what the engine defers.

Their last step is ``residual + post_norm(h)``: a jet that is made when the next block, within a
checkpoint of its own, first looks at it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import jachess_ext as jx

from .penalty import smoothness_penalty
from .zoo import randomise

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=4, query_pre_attn_scalar=4),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=4, query_pre_attn_scalar=4),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "exaone4": lambda: Exaone4Config(**SIZES, sliding_window=4, sliding_window_pattern=2),
}
POINT = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DIRECTIONS = torch.randn(2, *POINT.shape, dtype=POINT.dtype)


def build_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIGS[name](), attn_implementation="eager")
    randomise(model)
    return model.double().train()


def loss_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The penalty of every layer's jet and its gradients."""

    def hidden_states(x: Tensor) -> tuple[Tensor, ...]:
        return model(inputs_embeds=x, use_cache=False, output_hidden_states=True).hidden_states

    model.zero_grad()
    jets = jx.jet(hidden_states, POINT, DIRECTIONS)
    loss = smoothness_penalty(jets, torch.ones(POINT.shape[:2], dtype=torch.bool))
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def count_calls(module: nn.Module) -> list[int]:
    """Grows by an entry with every call of the module."""
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointing_changes_nothing(name: str) -> None:
    model = build_model(name)
    expected, expected_gradients = loss_and_gradients(model)
    calls = count_calls(model.layers[1].mlp.down_proj)
    model.gradient_checkpointing_enable()
    loss, gradients = loss_and_gradients(model)
    assert len(calls) == 2, "the block was not recomputed, so nothing was tested"
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_the_regulariser_with_checkpointing(name: str) -> None:
    """`JacHess` in float32, as a user would call it."""
    model = build_model(name).float()
    batch = {"input_ids": torch.tensor([[3, 5, 7, 9], [4, 6, 8, 2]])}

    def loss_and_norm() -> tuple[float, float]:
        model.zero_grad()
        loss = jx.JacHess(model, weights="uniform", seed=1)(batch).loss
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        return loss.item(), torch.stack(norms).norm().item()

    expected = loss_and_norm()
    model.gradient_checkpointing_enable()
    assert loss_and_norm() == pytest.approx(expected, rel=1e-4)
