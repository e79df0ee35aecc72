"""A BERT of a few thousand parameters with a tokenizer, saved as transformers saves models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = "good bad fine poor film book the a was is very not it we all".split()  # noqa: SIM905
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_tiny_model(folder: Path) -> Path:
    """Saves the model and its tokenizer in `folder` and returns it."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=32, **dict(zip(names, SPECIAL, strict=True))
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.2,  # of a random model, wide enough to learn from in few steps
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_sentiment(path: Path, copies: int) -> Path:
    """A csv file of 4 · `copies` sentences, good or bad."""
    lines = ["text,label"]
    for index in range(copies):
        noun = ("film", "book")[index % 2]
        lines += [f"the {noun} was very {word},good" for word in ("good", "fine")]
        lines += [f"the {noun} was very {word},bad" for word in ("bad", "poor")]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a saved tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A csv file of 32 labelled sentences."""
    return write_sentiment(tmp_path_factory.mktemp("data") / "sentiment.csv", 8)
