"""Runs of `MethodTrainer` on tiny models, plain SGD so that steps can be written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jachess_ext.training import MethodArguments, MethodTrainer
from python_tests.smoothness.tiny_models import classifier

from .runs import arguments, examples

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "l2": {"strength": 0.1},
    "l2-sp": {"strength": 20.0},
    "label-smoothing": {"smoothing": 0.3},
    "r-drop": {"strength": 2.0},
    "freelb": {"adv_start": 1.0, "adv_lr": 0.5},
    "smart": {"strength": 20.0, "adv_start": 0.3},
    "sam": {"rho": 0.5},
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
    data: Any = None,
    unlabelled: Any = None,
    options: dict[str, Any] | None = None,
    method: dict[str, Any] | None = None,
    **settings: Any,
) -> MethodTrainer:
    given = SETTINGS.get(name, {}) | (method or {})
    if name.endswith(("-train", "-joint", "-unlab")):
        given = {"dimensions": "all", "seed": 0} | given
    return MethodTrainer(
        model=classifier("bert") if model is None else model,
        args=arguments(folder, **(SGD | settings)),
        train_dataset=examples(16) if data is None else data,
        unlabelled_dataset=examples(8, seed=5, labels=False) if unlabelled is None else unlabelled,
        method=MethodArguments(method=name, **given),
        **(options or {}),
    )


def first_figures(made: MethodTrainer) -> dict[str, float]:
    """Task loss and penalty of the first step, as logged."""
    first: dict[str, float] = {}
    for entry in made.state.log_history:
        for key in ("loss", "jachess/task_loss", "jachess/penalty"):
            if key in entry:
                first.setdefault(key, entry[key])
    return first


def tapt_loss(made: MethodTrainer) -> float:
    """Mean loss of TAPT's language model, as logged."""
    name = "jachess/tapt_loss"
    return next(entry[name] for entry in made.state.log_history if name in entry)


def tensors(rows: list[dict]) -> dict[str, torch.Tensor]:
    """One batch of rows of equal length."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Padder:
    """As a tokenizer pads, on either side."""

    padding_side = "right"
    all_special_ids = (0,)

    def __init__(self, side: str) -> None:
        self.side = side

    def pad(self, rows: list[dict], return_tensors: str = "pt") -> dict[str, torch.Tensor]:
        total = max(len(row["input_ids"]) for row in rows) + 1
        batch = {}
        for key in ("input_ids", "attention_mask"):
            batch[key] = torch.zeros(len(rows), total, dtype=torch.long)
            for number, row in enumerate(rows):
                length = len(row[key])
                place = slice(0, length) if self.side == "right" else slice(total - length, total)
                batch[key][number, place] = torch.as_tensor(row[key])
        return batch

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.pad(rows)
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([int(row["labels"]) for row in rows])
        return batch
