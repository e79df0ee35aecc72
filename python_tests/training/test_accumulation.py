"""Gradient accumulation: 4 micro-batches of 2 are one batch of 8, penalty included."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, GPT2LMHeadModel, Trainer

from python_tests.covering import pairs
from python_tests.smoothness.tiny_models import classifier

from .runs import (
    DETERMINISTIC,
    assert_same_parameters,
    examples,
    first,
    furthest,
    tensors,
    trainer,
)

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "max_steps": 2}
MODES = ("train", "joint")
WHOLE = {"per_device_train_batch_size": 8}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A compute_loss_func that divides by all items of the accumulated batch."""
    total = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


class Scaling(BertForSequenceClassification):
    """Divides its loss by ``num_items_in_batch``, as models that accept loss kwargs promise."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if output.loss is not None and num_items_in_batch is not None:
            output.loss = output.loss * len(output.logits) / num_items_in_batch
        return output


def run(folder: Path, way: str, jachess: dict | None, **settings: Any) -> Any:
    model = classifier("bert")
    model.accepts_loss_kwargs = way == "model scales"
    if way == "model scales":
        model.__class__ = Scaling
    kind = {"kind": Trainer} if jachess is None else {"method": jachess}
    made = trainer(folder, **kind, model=model, data=examples(16), **(SGD | settings))
    made.train()
    assert made.model_accepts_loss_kwargs is (way == "model scales")
    return made


@pytest.mark.usefixtures("equal_directions")
@pytest.mark.parametrize(
    "way, mode", pairs(["model scales", "trainer scales", "loss function", "smoothed"], MODES)
)
def test_split_batches_equal_whole_ones(tmp_path: Path, way: str, mode: str) -> None:
    settings: dict[str, Any] = {}
    if way == "loss function":
        settings["options"] = {"compute_loss_func": mean_loss}
    if way == "smoothed":
        settings["label_smoothing_factor"] = 0.1
    # Eight equal sequences: whatever batches the unlabelled data is cut into, R is the same.
    if mode == "joint":
        settings["unlabelled"] = examples(1, seed=5, labels=False) * 8
    jachess = DETERMINISTIC | {"mode": mode, "strength": 0.5}
    whole = run(tmp_path, way, jachess, **settings, **WHOLE)
    split = run(tmp_path, way, jachess, **settings, **SPLIT)
    settings.pop("unlabelled", None)
    plain = run(tmp_path, way, None, **settings, **WHOLE)
    assert_same_parameters(whole.model, split.model)
    assert furthest(whole.model, plain.model) > 1e-4, "the penalty moved nothing"
    for key in ("jachess/task_loss", "jachess/penalty", "jachess/hessian_0"):
        # label smoothing is float32
        assert first(whole, key) == pytest.approx(first(split, key), rel=1e-6), key


@pytest.mark.usefixtures("equal_directions")
def test_a_step_is_the_task_plus_the_penalty_by_hand(tmp_path: Path) -> None:
    """One SGD step of the trainer against the same step from `jx.JacHess` and autograd."""
    jachess = DETERMINISTIC | {"strength": 0.5}
    made = trainer(
        tmp_path,
        jachess,
        model=classifier("bert"),
        data=examples(8),
        **SGD | {"max_steps": 1},
        **WHOLE,
    )
    made.train()
    model = classifier("bert").train()
    reg = made.method.build_regulariser(model, made.args.seed)
    reg.base = made.method.regulariser.base
    reg(tensors(examples(8))).total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= SGD["learning_rate"] * parameter.grad
    assert_same_parameters(made.model, model, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("equal_directions")
@pytest.mark.parametrize("name, strength", [("bert", 0.3), ("opt", 0.0)])
def test_models_that_ignore_num_items_in_batch(tmp_path: Path, name: str, strength: float) -> None:
    """Classifiers take any keyword, so the Trainer trusts them to divide; they do not."""
    jachess = DETERMINISTIC | {"strength": strength}
    whole, split = (
        trainer(tmp_path, jachess, model=classifier(name), data=examples(16), **SGD, **batches)
        for batches in (WHOLE, SPLIT)
    )
    assert split.model_accepts_loss_kwargs
    whole.train()
    with pytest.warns(UserWarning, match="4 times too large; this trainer divides it"):
        split.train()
    assert_same_parameters(whole.model, split.model)
    assert first(whole, "loss") == pytest.approx(first(split, "loss"), rel=1e-4)


def test_models_that_divide_are_left_alone(tmp_path: Path) -> None:
    config = classifier("gpt2").config
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    data = [row | {"labels": row["input_ids"]} for row in examples(16)]
    made = trainer(tmp_path, {"strength": 0.1}, model=model, data=data, **SGD, **SPLIT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.train()
    assert made.model_accepts_loss_kwargs
    assert not [w for w in caught if "num_items_in_batch" in str(w.message)]


def test_a_loss_function_that_ignores_the_count(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    settings = {"options": {"compute_loss_func": loss}, "gradient_accumulation_steps": 2}
    with pytest.raises(
        ValueError, match=r"compute_loss_func is given .* 2 times too large; return"
    ):
        trainer(tmp_path, **settings).train()
