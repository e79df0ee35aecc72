"""The models of the zoo: family, size, and how long each is pretrained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import BertConfig, GPT2Config, LlamaConfig, OPTConfig

from jachess_ext.tasks.vocabulary import LONGEST

DROPOUT = 0.1
"""Of fine-tuning, as published models have it; pretraining runs without."""


@dataclass(frozen=True)
class Member:
    """One model: `width` is the hidden size; `steps` and `rate` (the highest learning rate) are
    those of its pretraining."""

    name: str
    family: str
    width: int
    layers: int
    heads: int
    steps: int
    rate: float


MEMBERS = (
    Member("bert-32x1", "bert", 32, 1, 2, 4000, 4e-3),
    Member("bert-96x2", "bert", 96, 2, 4, 4000, 2e-3),
    Member("bert-192x4", "bert", 192, 4, 6, 800, 1e-3),
    Member("gpt2-64x2", "gpt2", 64, 2, 4, 2000, 3e-3),
    Member("llama-128x3", "llama", 128, 3, 4, 1200, 2e-3),
    Member("opt-160x2", "opt", 160, 2, 5, 400, 1e-3),
)
"""Sizes and lengths cross on purpose: the largest model is not the best trained one."""

ENCODERS = frozenset({"bert"})


def config_of(member: Member, tokenizer: Any, dropout: float) -> Any:
    """The model's configuration, with the tokenizer's vocabulary and special tokens.

    Llama has no dropout outside attention, and none of that when it is fine-tuned.

    Raises:
        ValueError: a family that is not one of bert, gpt2, llama, opt.
    """
    common = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    usual = {
        "hidden_size": member.width,
        "num_hidden_layers": member.layers,
        "num_attention_heads": member.heads,
        "max_position_embeddings": LONGEST,
    }
    if member.family == "bert":
        drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return BertConfig(**common, **usual, **drop, intermediate_size=4 * member.width)
    if member.family == "gpt2":
        return GPT2Config(
            **common,
            **ends,
            n_embd=member.width,
            n_layer=member.layers,
            n_head=member.heads,
            n_positions=LONGEST,
            embd_pdrop=dropout,
            resid_pdrop=dropout,
            attn_pdrop=dropout,
        )
    if member.family == "llama":
        return LlamaConfig(
            **common,
            **ends,
            **usual,
            num_key_value_heads=member.heads // 2,
            intermediate_size=8 * member.width // 3,
            tie_word_embeddings=True,
        )
    if member.family == "opt":
        return OPTConfig(
            **common,
            **ends,
            **usual,
            ffn_dim=4 * member.width,
            word_embed_proj_dim=member.width,
            dropout=dropout,
        )
    raise ValueError(f"unknown family {member.family!r}; known are bert, gpt2, llama, opt")
