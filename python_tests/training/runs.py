"""Tiny training runs with the Trainer, on sequences of equal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from jachess_ext.smoothness import estimators
from jachess_ext.training import JacHess, Method, MethodMixin, MethodTrainer, parse_method
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
    method: Method | str | dict[str, Any] = "none",
    *,
    model: Any = None,
    data: Any = None,
    unlabelled: Any = None,
    kind: type = MethodTrainer,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer by AdamW; a dict for the method has the settings of `JacHess`."""
    options = dict(options or {})
    if issubclass(kind, MethodMixin):
        options["method"] = JacHess(**method) if isinstance(method, dict) else method
        options["unlabelled_dataset"] = unlabelled
    model = classifier("bert", dtype=torch.float32) if model is None else model
    if not hasattr(model, "drawn_modules"):
        model.drawn_modules = ()  # its weights stand for a checkpoint's
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


SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "l2": {"strength": 0.1},
    "label-smoothing": {"smoothing": 0.3},
    "sam": {"rho": 0.5},
    "gradient-norm": {"strength": 0.2},
    "r3f": {"strength": 50.0, "noise": 0.1},
    "jacobian-train": {"strength": 0.2},
    "jacobian-joint": {"strength": 0.2},
    "jacobian-unlab": {"unlab_every": 1},
    "cross-holder-train": {"strength": 0.2},
    "cross-holder-joint": {"strength": 0.2},
    "cross-holder-unlab": {"unlab_every": 1},
    "jachess-train": {"strength": 0.2},
    "jachess-joint": {"strength": 0.2},
    "jachess-unlab": {"unlab_every": 1},
}
"""Every method of one stage and one strong setting for each, so that its effect shows."""


def method_trainer(
    folder: Path,
    name: str,
    *,
    model: Any = None,
    unlabelled: Any = None,
    method: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer by plain SGD, so that steps can be written out, with `SETTINGS` and `method`."""
    given = SETTINGS.get(name, {}) | (method or {})
    if name.endswith(("-train", "-joint", "-unlab")):
        given = {"dimensions": "all", "seed": 0} | given
    return trainer(
        folder,
        parse_method(name).replace(**given),
        model=classifier("bert") if model is None else model,
        unlabelled=examples(8, seed=5, labels=False) if unlabelled is None else unlabelled,
        **(SGD | settings),
    )


def first_figures(made: Any) -> dict[str, float]:
    """Task loss and penalty of the first step, as logged."""
    keys = ("loss", "jachess/task_loss", "jachess/penalty")
    return {key: first(made, key) for key in keys if entries(made, key)}


def entries(made: Any, key: str) -> list[dict]:
    """The log entries that have a figure."""
    return [entry for entry in made.state.log_history if key in entry]


def first(made: Any, key: str) -> float:
    """A figure as first logged."""
    return entries(made, key)[0][key]


def tensors(rows: list[dict]) -> dict[str, torch.Tensor]:
    """One batch of rows of equal length."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Padder:
    """As a tokenizer pads, on either side."""

    padding_side = "right"
    all_special_ids = (0,)

    def __init__(self, side: str) -> None:
        self.side = side

    def pad(
        self, rows: list[dict], padding_side: str | None = None, return_tensors: str = "pt"
    ) -> dict[str, torch.Tensor]:
        side = padding_side or self.side
        total = max(len(row["input_ids"]) for row in rows) + 1
        batch = {}
        for key in ("input_ids", "attention_mask"):
            batch[key] = torch.zeros(len(rows), total, dtype=torch.long)
            for number, row in enumerate(rows):
                length = len(row[key])
                place = slice(0, length) if side == "right" else slice(total - length, total)
                batch[key][number, place] = torch.as_tensor(row[key])
        return batch

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.pad(rows)
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([int(row["labels"]) for row in rows])
        return batch
