"""Two steps of the Trainer, by each method, for models that divide and that do not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from python_tests.smoothness.tiny_models import classifier
from python_tests.training.runs import examples, method_trainer, parameters
from python_tests.training.test_accumulation import Scaling, mean_loss

ROWS = 4  # of a step, on all ranks together
METHODS = ("none", "label-smoothing", "r3f", "jachess-train")
MODELS = ("ignores the count", "divides", "trainer divides", "language model", "loss function")


def model_of(kind: str) -> Any:
    if kind == "language model":
        torch.manual_seed(0)
        return GPT2LMHeadModel(classifier("gpt2").config).double()
    model: Any = classifier("bert")
    if kind == "divides":
        model.__class__ = Scaling
    if kind == "trainer divides":
        model.accepts_loss_kwargs = False
    return model


def cases() -> list[tuple[str, str]]:
    return [
        (method, kind)
        for kind in MODELS
        for method in METHODS
        if kind == MODELS[0] or method == "none" or (kind, method) == ("divides", "jachess-train")
    ]


def equal_draw(like: Tensor, count: int, **_: Any) -> Tensor:
    z = torch.randn(count, 1, *like.shape[1:], generator=torch.Generator().manual_seed(1))
    return z.to(like).expand(count, *like.shape)


def equal_noise(shape: torch.Size, size: float, *_: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return (size * torch.randn(shape[1:], generator=generator)).expand(shape)


def runs(
    folder: Path, ranks: int, micro_batches: Sequence[int] = (1, 2)
) -> dict[tuple[str, str, int], dict[str, Tensor]]:
    """Parameters by method, model and number of micro-batches; rows draw the same numbers."""
    found = {}
    places = ("smoothness.estimators.draw_directions", "training.methods.noise.draw_noise")
    with (
        mock.patch(f"jachess_ext.{places[0]}", equal_draw),
        mock.patch(f"jachess_ext.{places[1]}", equal_noise),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for method, kind in cases():
            for micro in micro_batches:
                data = examples(2 * ROWS)
                if kind == "language model":  # rows of other numbers of labels
                    for number, row in enumerate(data):
                        row["labels"] = row["input_ids"].clone()
                        row["labels"][1 : 1 + number % 2] = -100
                made = method_trainer(
                    folder,
                    method,
                    model=model_of(kind),
                    data=data,
                    options={"compute_loss_func": mean_loss} if kind == "loss function" else {},
                    per_device_train_batch_size=ROWS // ranks // micro,
                    gradient_accumulation_steps=micro,
                    **({"ddp_backend": "gloo"} if ranks > 1 else {}),
                )
                made.train()
                found[method, kind, micro] = parameters(made.model)
    return found
