"""Two tiny models and labelled sentences, settings of live selections of them, and fake runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from jachess_ext.experiment.grid import Recipe
from jachess_ext.live_selection.budget import Budget
from jachess_ext.live_selection.settings import LiveSettings
from python_tests.demo.conftest import WORDS, save_tiny_model
from python_tests.threads import one_thread  # noqa: F401  a fixture

NOUNS = [word for word in WORDS if word not in ("good", "fine", "bad", "poor")]
MakeSettings = Callable[..., LiveSettings]


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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of the two models."""
    folder = tmp_path_factory.mktemp("models")
    return str(save_model(folder / "narrow", 8, 1)), str(save_model(folder / "wide", 16, 2))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """256 rows to train on and 40 to judge on."""
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "train.csv", 256, 0), write_rows(folder / "dev.csv", 40, 1)


@pytest.fixture
def settings(models: tuple[str, str], files: tuple[Path, Path]) -> MakeSettings:
    """Settings of the two models on the rows, one epoch; arguments replace the defaults."""

    def make(**given: Any) -> LiveSettings:
        recipe = Recipe(epochs=1.0, batch_size=2, lr=5e-3, max_length=16)
        defaults: dict[str, Any] = {
            **{"models": models, "train": files[0], "dev": files[1]},
            **{"budget": Budget.parse("1/4"), "recipe": recipe},
        }
        return LiveSettings(**(defaults | given))

    return make
