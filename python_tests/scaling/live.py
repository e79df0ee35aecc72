"""Tiny models and labelled sentences for live selections."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from python_tests.demo.conftest import WORDS, save_tiny_model

NOUNS = [word for word in WORDS if word not in ("good", "fine", "bad", "poor")]


def save_model(folder: Path, width: int, seed: int) -> Path:
    """A BERT of one layer with the tiny model's tokenizer."""
    save_tiny_model(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * width,
        initializer_range=0.2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int) -> Path:
    """Six words, one of them good or bad, a tenth of the labels wrong."""
    draw = random.Random(seed)
    lines = ["text,label"]
    for _ in range(count):
        good = draw.random() < 0.5
        words = [draw.choice(NOUNS) for _ in range(5)]
        words.insert(draw.randrange(6), draw.choice(["good", "fine"] if good else ["bad", "poor"]))
        label = good != (draw.random() < 0.1)
        lines.append(f"{' '.join(words)},{'good' if label else 'bad'}")
    path.write_text("\n".join(lines) + "\n")
    return path
