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
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
    "num_labels": LABELS,
    "pad_token_id": PAD,
}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": END}
_GROUPED = {**_SIZES, **_SPECIAL, "num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2 = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 16,
    "n_positions": 24,
    "num_labels": LABELS,
    "pad_token_id": PAD,
}
_OPT = {
    **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
    **_SPECIAL,
    "ffn_dim": 16,
    "word_embed_proj_dim": WIDTH,
}
_T5 = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 6,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "num_labels": LABELS,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
}
_BART = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 24,
    "num_labels": LABELS,
    "pad_token_id": PAD,
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


def _mixtral() -> MixtralForSequenceClassification:
    """Experts one by one: the grouped matrix product knows no float64."""
    config = MixtralConfig(**_GROUPED, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return MixtralForSequenceClassification(config)


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**_SIZES)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**_SIZES)),
    "modernbert": lambda: ModernBertForSequenceClassification(ModernBertConfig(**_MODERN_BERT)),
    "albert": lambda: AlbertForSequenceClassification(AlbertConfig(**_SIZES, embedding_size=8)),
    "opt": lambda: OPTForSequenceClassification(OPTConfig(**_OPT)),
    "gpt2": lambda: GPT2ForSequenceClassification(GPT2Config(**_GPT2)),
    "llama": lambda: LlamaForSequenceClassification(LlamaConfig(**_GROUPED)),
    "gemma2": lambda: Gemma2ForSequenceClassification(Gemma2Config(**_GROUPED, head_dim=4)),
    "mixtral": _mixtral,
    "t5": lambda: T5ForSequenceClassification(T5Config(**_T5)),
    "bart": lambda: BartForSequenceClassification(BartConfig(**_BART)),
}
LANGUAGE_MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "bert": lambda tied: BertForMaskedLM(BertConfig(**_SIZES, tie_word_embeddings=tied)),
    "roberta": lambda tied: RobertaForMaskedLM(RobertaConfig(**_SIZES, tie_word_embeddings=tied)),
    "modernbert": lambda tied: ModernBertForMaskedLM(
        ModernBertConfig(**_MODERN_BERT, tie_word_embeddings=tied)
    ),
    "gpt2": lambda tied: GPT2LMHeadModel(GPT2Config(**_GPT2, tie_word_embeddings=tied)),
    "opt": lambda tied: OPTForCausalLM(OPTConfig(**_OPT, tie_word_embeddings=tied)),
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**_GROUPED, tie_word_embeddings=tied)),
    "t5": lambda tied: T5ForConditionalGeneration(T5Config(**_T5, tie_word_embeddings=tied)),
    "bart": lambda tied: BartForConditionalGeneration(
        BartConfig(**_BART, tie_word_embeddings=tied)
    ),
}


def classifier(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A classifier of LABELS classes."""
    return _prepared(CLASSIFIERS[name], dtype)


def language_model(name: str, tied: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A language model whose output head is the embedding matrix, or is not."""

    def make() -> nn.Module:
        model = LANGUAGE_MODELS[name](tied)
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if not tied and head.weight is embeddings.weight:  # transformers ties T5 in any case
            head.weight = nn.Parameter(head.weight.detach().clone())
        assert (head.weight is embeddings.weight) == tied
        return model

    return _prepared(make, dtype)


def _prepared(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    randomise(model)
    return model.to(dtype).eval()


def batch(lengths: list[int], *, seed: int = 7, total: int | None = None) -> dict[str, Any]:
    """Rows of these lengths, each ended by END, padded on the right; class labels."""
    generator = torch.Generator().manual_seed(seed)
    total = total or max(lengths)
    ids = torch.full((len(lengths), total), PAD)
    for row, length in enumerate(lengths):
        ids[row, : length - 1] = torch.randint(3, VOCABULARY, (length - 1,), generator=generator)
        ids[row, length - 1] = END
    labels = torch.arange(len(lengths)) % LABELS
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def language_batch(lengths: list[int], *, seed: int = 7) -> dict[str, Any]:
    """Token labels: the inputs themselves, padding ignored."""
    made = batch(lengths, seed=seed)
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    return made | {"labels": labels}
