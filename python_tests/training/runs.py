"""Tiny training runs with the Trainer, on sequences of equal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from jachess_ext.smoothness import estimators
from jachess_ext.training import JacHessArguments, JacHessTrainer
from python_tests.smoothness.tiny_models import LABELS, VOCABULARY, classifier

DETERMINISTIC = {"dimensions": "all", "seed": 0}
"""With `equal_directions`: R is the same function of a sequence whatever batch it comes in."""


@pytest.fixture
def equal_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of every step gets the same directions."""

    def draw(like: torch.Tensor, count: int, **_: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (count, 1, *like.shape[1:])
        return torch.randn(shape, generator=generator).to(like).expand(count, *like.shape)

    monkeypatch.setattr(estimators, "draw_directions", draw)


def examples(count: int, tokens: int = 3, *, seed: int = 0, labels: bool = True) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, tokens), generator=generator)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    if labels:
        for number, row in enumerate(rows):
            row["labels"] = torch.tensor(number % LABELS)
    return rows


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(**(defaults | settings))


def trainer(
    folder: Path,
    jachess: dict[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    unlabelled: Any = None,
    kind: type = JacHessTrainer,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    model = classifier("bert", dtype=torch.float32) if model is None else model
    options = dict(options or {})
    if issubclass(kind, JacHessTrainer):
        options |= {"jachess": JacHessArguments(**(jachess or {}))}
        options |= {"unlabelled_dataset": unlabelled}
    return kind(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=examples(16) if data is None else data,
        **options,
    )


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_parameters(a: Any, b: Any, *, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    for (name, x), y in zip(parameters(a).items(), parameters(b).values(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def furthest(a: Any, b: Any) -> float:
    pairs = zip(parameters(a).values(), parameters(b).values(), strict=True)
    return float(torch.stack([(x - y).abs().max() for x, y in pairs]).max())
