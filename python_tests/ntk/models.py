"""Tiny models of every family the kernel must know, in float64 with random weights, and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForSequenceClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    OPTForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

from ..smoothness.tiny_models import randomise

VOCABULARY, WIDTH, LABELS, PAD, END = 19, 16, 3, 0, 2
_COMMON = {"vocab_size": VOCABULARY, "num_labels": LABELS, "pad_token_id": PAD}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": END}
_SIZES = {
    **_COMMON,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
}
_GROUPED = {**_SIZES, **_SPECIAL, "num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2 = {
    **_COMMON,
    **_SPECIAL,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 16,
    "n_positions": 24,
}
_OPT = {
    **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
    **_SPECIAL,
    "ffn_dim": 16,
    "word_embed_proj_dim": WIDTH,
}
_T5 = {
    **_COMMON,
    **_SPECIAL,
    "d_model": WIDTH,
    "d_kv": 6,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": PAD,
}
_BART_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
_BART = {
    **_COMMON,
    **_SPECIAL,
    **{f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in _BART_SIDE.items()},
    "d_model": WIDTH,
    "max_position_embeddings": 24,
    "decoder_start_token_id": END,
    "scale_embedding": True,
}
_MODERN_BERT = {
    **_SIZES,
    **_SPECIAL,
    "num_hidden_layers": 3,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
}


def _mixtral(**settings: Any) -> MixtralConfig:
    """Experts one by one: the grouped matrix product knows no float64."""
    config = MixtralConfig(**settings, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return config


# name -> (class, configuration, its settings)
Family = tuple[Any, Callable[..., Any], dict[str, Any]]
CLASSIFIERS: dict[str, Family] = {
    "bert": (BertForSequenceClassification, BertConfig, _SIZES),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, _SIZES),
    "modernbert": (ModernBertForSequenceClassification, ModernBertConfig, _MODERN_BERT),
    "albert": (AlbertForSequenceClassification, AlbertConfig, _SIZES | {"embedding_size": 8}),
    "opt": (OPTForSequenceClassification, OPTConfig, _OPT),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config, _GPT2),
    "llama": (LlamaForSequenceClassification, LlamaConfig, _GROUPED),
    "gemma2": (Gemma2ForSequenceClassification, Gemma2Config, _GROUPED | {"head_dim": 4}),
    "mixtral": (MixtralForSequenceClassification, _mixtral, _GROUPED),
    "t5": (T5ForSequenceClassification, T5Config, _T5),
    "bart": (BartForSequenceClassification, BartConfig, _BART),
}
LANGUAGE_MODELS: dict[str, Family] = {
    "bert": (BertForMaskedLM, BertConfig, _SIZES),
    "roberta": (RobertaForMaskedLM, RobertaConfig, _SIZES),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, _MODERN_BERT),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "opt": (OPTForCausalLM, OPTConfig, _OPT),
    "llama": (LlamaForCausalLM, LlamaConfig, _GROUPED),
    "t5": (T5ForConditionalGeneration, T5Config, _T5),
    "bart": (BartForConditionalGeneration, BartConfig, _BART),
}


def classifier(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a classifier of LABELS classes."""
    torch.manual_seed(0)
    make, config, settings = CLASSIFIERS[name]
    model = make(config(**settings))
    randomise(model)
    return model.to(dtype).eval()


def language_model(name: str, tied: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a language model whose output head is the embedding matrix, or is not."""
    torch.manual_seed(0)
    make, config, settings = LANGUAGE_MODELS[name]
    model = make(config(**settings, tie_word_embeddings=tied))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not tied and head.weight is embeddings.weight:  # transformers ties T5 in any case
        head.weight = nn.Parameter(head.weight.detach().clone())
    assert (head.weight is embeddings.weight) == tied
    randomise(model)
    return model.to(dtype).eval()


def batch(lengths: list[int], *, seed: int = 7, total: int | None = None) -> dict[str, Any]:
    """Return rows of these lengths, each ended by END, padded on the right; class labels."""
    generator = torch.Generator().manual_seed(seed)
    total = total or max(lengths)
    ids = torch.full((len(lengths), total), PAD)
    for row, length in enumerate(lengths):
        ids[row, : length - 1] = torch.randint(3, VOCABULARY, (length - 1,), generator=generator)
        ids[row, length - 1] = END
    labels = torch.arange(len(lengths)) % LABELS
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def language_batch(lengths: list[int], *, seed: int = 7) -> dict[str, Any]:
    """Return a batch with token labels: the inputs themselves, padding ignored."""
    samples = batch(lengths, seed=seed)
    labels = samples["input_ids"].masked_fill(samples["attention_mask"] == 0, -100)
    return samples | {"labels": labels}
