"""Tiny classifiers in float64, weights random but not small, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

WIDTH, BLOCKS, LABELS, VOCABULARY, PAD = 12, 2, 3, 20, 0
ENCODERS, DECODERS = ("bert", "roberta"), ("gpt2", "opt", "llama")

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
    "num_labels": LABELS,
    "pad_token_id": PAD,
}
_OF_MODEL = {
    "gpt2": {"n_inner": 16},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": WIDTH},
}
_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "opt": ("dropout",),
    "llama": ("attention_dropout",),
}
_ENCODERS_DROPOUTS = ("attention_probs_dropout_prob", "hidden_dropout_prob")


def classifier(
    name: str,
    *,
    attention: str = "eager",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    head: Any = AutoModelForSequenceClassification,
) -> PreTrainedModel:
    """Return a sequence classifier, or a model with another head, in evaluation mode.

    Its weights are random.
    """
    settings = _SIZES | _OF_MODEL.get(name, {})
    settings |= dict.fromkeys(_DROPOUTS.get(name, _ENCODERS_DROPOUTS), dropout)
    settings |= {"bos_token_id": 1, "eos_token_id": 2} if name in DECODERS else {}
    config = AutoConfig.for_model(name, **settings)
    torch.manual_seed(seed)
    model = head.from_config(config, attn_implementation=attention)
    randomise(model)
    return model.to(dtype).eval()


def randomise(model: nn.Module, scale: float = 0.3) -> None:
    """Draw matrices from N(0, scale²), and add as much to biases and normalisation weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = scale * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)


def token_batch(lengths: list[int], *, side: str = "right", total: int | None = None) -> dict:
    """Return labelled rows of these lengths, padded on ``side`` to ``total`` (the longest).

    The same lengths always give the same tokens.
    """
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]
    total = total or max(lengths)
    ids = torch.full((len(rows), total), PAD)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        place = slice(0, len(tokens)) if side == "right" else slice(total - len(tokens), total)
        ids[row, place] = tokens
        mask[row, place] = 1
    labels = torch.arange(len(rows)) % LABELS
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_positions(batch: dict) -> dict:
    """Add position ids that count real tokens, so that left padding moves none (BERT, GPT-2)."""
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch | {"position_ids": positions}


def parameter_gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return ∂loss/∂θ by name, zero for parameters that the loss does not use."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, gradients, strict=True))
