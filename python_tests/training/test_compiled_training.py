"""`MethodTrainer(compile=...)`: the losses and weights of the eager run, with every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch._dynamo.utils import counters

import jachess_ext.lab.attack  # noqa: F401  registers attack-augment
from jachess_ext.training import METHODS
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS
from python_tests.jet.compiling import fresh_dynamo as fresh_dynamo

from .runs import parameters, trainer
from .test_architectures import ARCHITECTURES, LOUD, TOKENIZER, rows_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    NEEDS_MODULES_IN_GRAPHS,
    pytest.mark.slow,
]
JACHESS = {
    "jachess-train": {"normalize": True},
    "jachess-joint": {"mode": "joint", "strength": 0.1},
    "jachess-unlab": {"mode": "unlab", "unlab_every": 1},
}


def run(
    folder: Path, name: str, compile: str | None = None, **settings: Any
) -> tuple[list[float], Tensor, Any]:
    """Losses of three steps, all weights after them, and the trainer."""
    torch.manual_seed(0)
    mild = {"strength": 0.1} if name in ("jacobian", "cross-holder") else {}
    method = METHODS[name.partition("-")[0]](**JACHESS[name]) if name in JACHESS else None
    made = trainer(
        folder,
        METHODS[name](**mild) if method is None else method,
        model=ARCHITECTURES["bert"]().float(),
        data=rows_of("bert"),
        unlabelled=rows_of("bert"),
        options={
            "processing_class": TOKENIZER,
            "data_collator": tf.default_data_collator,
            **({} if compile is None else {"compile": compile}),
        },
        **({"max_steps": 3} | settings),
    )
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, torch.cat([p.flatten() for p in parameters(made.model).values()]), made


def assert_same(compiled: tuple[list[float], Tensor, Any], eager: Any) -> None:
    assert compiled[0] == eager[0]
    assert torch.equal(compiled[1], eager[1])


@pytest.mark.parametrize("name", [*(name for name in LOUD if name != "jachess"), *JACHESS])
def test_every_method_trains_as_without(tmp_path: Path, name: str) -> None:
    eager = run(tmp_path, name)
    assert counters["stats"]["unique_graphs"] == 0
    assert_same(run(tmp_path, name, "aot_eager"), eager)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", JACHESS)
def test_the_arguments_of_transformers_mean_the_same(tmp_path: Path, name: str) -> None:
    eager = run(tmp_path, name)
    compiled = run(tmp_path, name, torch_compile=True, torch_compile_backend="aot_eager")
    assert_same(compiled, eager)
    regulariser = compiled[-1].method.regulariser
    assert regulariser.compile == "aot_eager"
    assert isinstance(regulariser.step, Tensor)  # a graph counts it


@pytest.mark.filterwarnings("ignore:the model accepts num_items_in_batch")
def test_accumulation(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    eager = run(tmp_path, "jachess-train", **settings)
    compiled = run(tmp_path, "jachess-train", "aot_eager", **settings)
    assert_same(compiled, eager)
    assert isinstance(compiled[-1].method.regulariser.step, Tensor)


def test_smoothed_labels(tmp_path: Path) -> None:
    """The Trainer takes the labels from the batch, and the loss from the graph's logits."""
    eager = run(tmp_path, "jachess-train", label_smoothing_factor=0.2)
    compiled = run(tmp_path, "jachess-train", "aot_eager", label_smoothing_factor=0.2)
    assert_same(compiled, eager)
