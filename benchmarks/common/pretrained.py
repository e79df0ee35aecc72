"""A real encoder from a local folder, and a batch of sentences for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .models import Batch

SENTENCES = (
    "The ferry to the island leaves at seven, unless the wind turns north.",
    "He measured the same table three times and wrote down three lengths.",
    "A regulariser that nobody can afford to compute regularises nothing.",
    "Most of the seeds we planted in March came up after the second rain.",
    "Her answer was short, polite and, as it turned out, completely wrong.",
    "The museum closes early on Mondays but the garden behind it does not.",
    "Prices fell for two weeks before anyone in the village noticed.",
    "Nobody reads the manual until the second screw is left over.",
)


ENCODER = {
    "vocab_size": 30_522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
"""Sizes of the 22M encoder (all-MiniLM-L6-v2): what random weights imitate."""
SMALL = ENCODER | {"vocab_size": 2_000, "hidden_size": 48, "num_hidden_layers": 2}
"""For trying a script out."""


def load_classifier(
    path: Path | None, rows: int, tokens: int, device: torch.device, *, small: bool = False
) -> tuple[nn.Module, Batch]:
    """An encoder with a new 2-class head (eval mode, fp32), and rows of exactly ``tokens`` tokens.

    Args:
        path: its folder; None: a model of the same sizes with random weights, on random ids.
        small: random weights of few and narrow layers instead.

    Raises:
        FileNotFoundError: there is no model in ``path``.
    """
    from transformers import AutoModelForSequenceClassification, BertConfig, logging

    torch.manual_seed(0)
    if path is None:
        sizes = SMALL if small else ENCODER
        config = BertConfig(**sizes, num_labels=2)
        model = AutoModelForSequenceClassification.from_config(config)
        ids = torch.randint(1000, sizes["vocab_size"], (rows, tokens))
    else:
        _require_model(path)
        logging.set_verbosity_error()  # that the head is new is no warning here
        logging.disable_progress_bar()
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=2, local_files_only=True
        )
        ids = _running_text(path, rows, tokens)
    batch = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
    return model.to(device).eval(), batch


def _running_text(path: Path, rows: int, tokens: int) -> Tensor:
    """Sentences one after another, cut into rows without padding: [rows, tokens]."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(SENTENCES, k=-(-tokens // 8))) for _ in range(rows)]
    encoded = tokenizer(texts, truncation=True, max_length=tokens, return_tensors="pt")
    assert encoded["input_ids"].shape == (rows, tokens)
    return encoded["input_ids"]


def _require_model(path: Path) -> None:
    if not (path / "config.json").exists():
        raise FileNotFoundError(
            f"{path} holds no config.json; expected a folder as save_pretrained writes it"
        )


def load_encoder(path: Path, rows: int, device: torch.device) -> tuple[nn.Module, Batch]:
    """The model in ``path`` (eval mode, fp32) and its tokens for ``rows`` sentences, padded.

    Raises:
        FileNotFoundError: there is no model in ``path``.
    """
    from transformers import AutoModel, AutoTokenizer

    _require_model(path)
    model = AutoModel.from_pretrained(path, local_files_only=True).to(device).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    texts = [SENTENCES[number % len(SENTENCES)] for number in range(rows)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return model, {name: encoded[name].to(device) for name in names}
