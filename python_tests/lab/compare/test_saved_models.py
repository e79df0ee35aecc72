"""A saved model is the one that was judged, whatever of it was new, frozen or adapted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
)

from jachess_ext.lab.compare import finetune
from jachess_ext.lab.compare.finetune import final_jobs, load
from jachess_ext.lab.compare.records import Figures
from jachess_ext.lab.workbench.models import load_tokenizer

from .conftest import MakeGrid

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
LANGUAGE_MODELS: dict[str, Any] = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "deberta": lambda: DebertaV2ForMaskedLM(DebertaV2Config(**SIZES)),
}
"""Whose checkpoints lack a pooler, which a classifier has."""


def reloaded(folder: Path, adapters: bool) -> Any:
    """Return a saved model as transformers and peft load it."""
    if not adapters:
        return AutoModelForSequenceClassification.from_pretrained(folder)
    return AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()


@pytest.mark.parametrize(
    ("method", "name", "lora"),
    [
        *[("none", "bert", True), ("none", "deberta", False)],
        *[("tapt,tapt_lr=1e-2", "bert", False), ("tapt,tapt_lr=1e-2", "deberta", True)],
        *[("jachess-unlab", "bert", True), ("jachess-unlab", "deberta", False)],
    ],
)
def test_it_gives_the_same_logits(
    grid: MakeGrid,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    name: str,
    lora: bool,
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    torch.manual_seed(1)
    LANGUAGE_MODELS[name]().save_pretrained(source)
    made = grid(model=str(source), methods=(method,), seeds=(0,))
    made = replace(made, recipe=replace(made.recipe, lora=lora))
    (job,) = final_jobs(load(made), {})
    batch = load_tokenizer(source)(["the film was very good"], return_tensors="pt")
    seen: list[torch.Tensor] = []

    def figures(model: Any, *_: Any) -> Figures:
        with torch.no_grad():
            seen.append(model.eval()(**batch).logits)
        return Figures()

    monkeypatch.setattr(finetune, "judge_task", figures)
    finetune.run(job, models=tmp_path / "models")
    for _ in range(2):
        torch.manual_seed(len(seen))
        saved = reloaded(tmp_path / "models" / job.name, lora and not method.startswith("tapt"))
        with torch.no_grad():
            seen.append(saved(**batch).logits)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[2], seen[0], rtol=1e-5, atol=1e-6)
