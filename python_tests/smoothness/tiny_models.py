"""Tiny classifiers in float64, weights random but not small, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

WIDTH, BLOCKS, LABELS, VOCABULARY, PAD = 12, 2, 3, 20, 0

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
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


def _encoder(dropout: float) -> dict[str, Any]:
    rates = ("attention_probs_dropout_prob", "hidden_dropout_prob")
    return _SIZES | dict.fromkeys(rates, dropout)


def _bert(dropout: float, attention: str) -> PreTrainedModel:
    config = BertConfig(**_encoder(dropout), attn_implementation=attention)
    return BertForSequenceClassification(config)


def _roberta(dropout: float, attention: str) -> PreTrainedModel:
    config = RobertaConfig(**_encoder(dropout), attn_implementation=attention)
    return RobertaForSequenceClassification(config)


def _gpt2(dropout: float, attention: str) -> PreTrainedModel:
    config = GPT2Config(
        **_SPECIAL,
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=2,
        n_inner=16,
        n_positions=24,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        num_labels=LABELS,
        pad_token_id=PAD,
        attn_implementation=attention,
    )
    return GPT2ForSequenceClassification(config)


def _opt(dropout: float, attention: str) -> PreTrainedModel:
    sizes = {key: value for key, value in _SIZES.items() if key != "intermediate_size"}
    config = OPTConfig(
        **sizes,
        **_SPECIAL,
        ffn_dim=16,
        word_embed_proj_dim=WIDTH,
        dropout=dropout,
        attn_implementation=attention,
    )
    return OPTForSequenceClassification(config)


def _llama(dropout: float, attention: str) -> PreTrainedModel:
    config = LlamaConfig(
        **_SIZES, **_SPECIAL, attention_dropout=dropout, attn_implementation=attention
    )
    return LlamaForSequenceClassification(config)


CLASSIFIERS: dict[str, Callable[[float, str], PreTrainedModel]] = {
    "bert": _bert,
    "roberta": _roberta,
    "gpt2": _gpt2,
    "opt": _opt,
    "llama": _llama,
}
ENCODERS, DECODERS = ("bert", "roberta"), ("gpt2", "opt", "llama")


def classifier(
    name: str,
    *,
    attention: str = "eager",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> PreTrainedModel:
    """A sequence classifier with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    model = CLASSIFIERS[name](dropout, attention)
    randomise(model)
    return model.to(dtype).eval()


def randomise(model: nn.Module, scale: float = 0.3) -> None:
    """Matrices ~ N(0, scale²); biases and normalisation weights moved by as much."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = scale * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)


def token_batch(lengths: list[int], *, side: str = "right", total: int | None = None) -> dict:
    """Rows of these lengths, padded on ``side`` to ``total`` (the longest); with labels.

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
    """Position ids that count real tokens, so that left padding moves none (BERT, GPT-2)."""
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch | {"position_ids": positions}


def parameter_gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """∂loss/∂θ by name, zero for parameters the loss does not use."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, gradients, strict=True))
