"""The benchmarks' reference shapes as transformers models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY = 4_000
"""Small on purpose: the embedding table and its gradient are no part of any question here."""


@dataclass(frozen=True)
class Shape:
    """A model family with its sizes, and the batch it is timed on (B sequences of T tokens)."""

    family: str
    layers: int
    width: int
    heads: int
    inner: int
    batch: int
    tokens: int
    key_value_heads: int = 0

    @property
    def name(self) -> str:
        return f"{self.family}-{self.layers}x{self.width}-B{self.batch}-T{self.tokens}"


SHAPES = {
    "tiny": Shape("bert", 2, 64, 4, 128, 2, 8),
    "encoder6-T32": Shape("bert", 6, 384, 12, 1536, 8, 32),
    "encoder6-T128": Shape("bert", 6, 384, 12, 1536, 8, 128),
    "encoder12-T32": Shape("bert", 12, 768, 12, 3072, 4, 32),
    "encoder12-T128": Shape("bert", 12, 768, 12, 3072, 4, 128),
    "encoder24-T128": Shape("bert", 24, 1024, 16, 4096, 4, 128),
    "llama6-T128": Shape("llama", 6, 512, 8, 1408, 8, 128, key_value_heads=2),
    "llama-tiny": Shape("llama", 2, 64, 4, 128, 2, 8, key_value_heads=2),
    "opt-tiny": Shape("opt", 2, 64, 4, 128, 2, 8),
    "opt12-T128": Shape("opt", 12, 768, 12, 3072, 4, 128),
    "opt24-T128": Shape("opt", 24, 2048, 32, 8192, 8, 128),
}


def _bert(shape: Shape, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def _llama(shape: Shape, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "num_key_value_heads": shape.key_value_heads,
        "attention_dropout": dropout,
    }


def _opt(shape: Shape, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "word_embed_proj_dim": shape.width,
        "num_hidden_layers": shape.layers,
        "ffn_dim": shape.inner,
        "dropout": dropout,
        "attention_dropout": dropout,
    }


_FAMILIES: dict[str, Callable[[Shape, float], dict[str, Any]]] = {
    "bert": _bert,
    "llama": _llama,
    "opt": _opt,
}


def build_model(
    shape: Shape,
    *,
    attention: str = "sdpa",
    dropout: float = 0.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """A sequence classifier with random weights, in train mode.

    Args:
        attention: "sdpa" or "eager".
        dropout: of every kind; 0 by default, since CPU sdpa leaves its fused kernel for any other
            value, which would slow the plain step and flatter ours.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=VOCABULARY,
        num_attention_heads=shape.heads,
        max_position_embeddings=max(512, shape.tokens),
        num_labels=2,
        pad_token_id=0,
        **_FAMILIES[shape.family](shape, dropout),
    )
    config._attn_implementation = attention
    model = AutoModelForSequenceClassification.from_config(config)
    return model.to(device=device, dtype=dtype).train()


def make_batch(
    shape: Shape, *, labels: bool, device: torch.device | str = "cpu", seed: int = 0
) -> Batch:
    """Random token ids ``[B, T]`` without padding, a full mask, and labels ``[B]`` if asked."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.tokens)
    batch = {
        "input_ids": torch.randint(1, VOCABULARY, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.long),
    }
    if labels:
        batch["labels"] = torch.randint(0, 2, (shape.batch,), generator=generator)
    return {name: value.to(device) for name, value in batch.items()}
