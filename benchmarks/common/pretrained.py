"""A real encoder from a local folder, and a batch of sentences for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def load_encoder(path: Path, rows: int, device: torch.device) -> tuple[nn.Module, Batch]:
    """The model in ``path`` (eval mode, fp32) and its tokens for ``rows`` sentences, padded.

    Raises:
        FileNotFoundError: there is no model in ``path``.
    """
    from transformers import AutoModel, AutoTokenizer

    if not (path / "config.json").exists():
        raise FileNotFoundError(
            f"{path} holds no config.json; expected a folder as save_pretrained writes it"
        )
    model = AutoModel.from_pretrained(path, local_files_only=True).to(device).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    texts = [SENTENCES[number % len(SENTENCES)] for number in range(rows)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return model, {name: encoded[name].to(device) for name in names}
