"""Errors of methods that the model or the data rule out; losses that are not finite."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForQuestionAnswering

import jachess_ext as jx
from jachess_ext.smoothness.parallel import placeholder_row
from jachess_ext.training import MethodTrainer
from jachess_ext.training.batches import LeftPadding
from python_tests.smoothness.tiny_models import classifier, token_batch

from .runs import assert_same_parameters, examples, method_trainer
from .test_metamorphic import Collator


def answering() -> Any:
    config = classifier("bert").config
    config.num_labels = 2
    return BertForQuestionAnswering(config).double()


def spans() -> list[dict]:
    place = {"start_positions": torch.tensor(0), "end_positions": torch.tensor(1)}
    return [row | place for row in examples(8, labels=False)]


def test_label_smoothing_without_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"labels are called start_positions, .*, not 'labels'"):
        method_trainer(tmp_path, "label-smoothing", model=answering(), data=spans())


@pytest.mark.filterwarnings("ignore:method='recommended' leaves out label smoothing")
@pytest.mark.parametrize("name", ["r3f", "recommended"])
def test_outputs_without_logits(tmp_path: Path, name: str) -> None:
    options = {"processing_class": Collator("right", 3)}
    made = method_trainer(tmp_path, name, model=answering(), data=spans(), options=options)
    with pytest.raises(ValueError, match="has no tensor called logits; it has loss, start_logits"):
        made.train()


def floats(width: int) -> list[dict]:
    shape = (width,) if width > 1 else ()
    return [row | {"labels": torch.ones(shape, dtype=torch.double)} for row in examples(8)]


@pytest.mark.parametrize("outputs", [1, 3])
def test_label_smoothing_needs_class_labels(tmp_path: Path, outputs: int) -> None:
    def made(name: str) -> MethodTrainer:
        config = classifier("bert").config
        config.num_labels, config.problem_type = outputs, None
        model = type(classifier("bert"))(config).double()
        return method_trainer(
            tmp_path,
            name,
            model=model,
            data=floats(outputs),
            options={"processing_class": Collator("right", 3)},
        )

    with pytest.raises(ValueError, match=r"but the (model is a regression|labels are numbers)"):
        made("label-smoothing").train()
    with pytest.warns(UserWarning, match="'recommended' leaves out label smoothing"):
        made("recommended").train()


def test_label_smoothing_with_compute_loss_func_is_refused(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    with pytest.raises(ValueError, match="compute_loss_func takes the labels"):
        method_trainer(tmp_path, "label-smoothing", options={"compute_loss_func": loss})


@pytest.mark.parametrize("name", ["none", "l2", "jachess-train", "jachess-joint"])
def test_a_task_loss_that_is_not_finite(tmp_path: Path, name: str) -> None:
    model = classifier("bert")
    with torch.no_grad():
        model.classifier.bias[0] = float("inf")
    before = copy.deepcopy(model)
    made = method_trainer(tmp_path, name, model=model)
    with pytest.raises(FloatingPointError, match=r"the task loss is .*learning rate"):
        made.train()
    assert_same_parameters(model, before, rtol=0, atol=0)


def test_the_placeholder_row_has_the_shapes_of_the_batch() -> None:
    batch = token_batch([3, 2]) | {"labels": torch.ones(2, 3)}
    assert placeholder_row(batch)["labels"].shape == (1, 3)
    assert placeholder_row(batch)["attention_mask"].sum() == 1


def test_ids_that_are_a_list_are_refused() -> None:
    model, batch = classifier("bert"), token_batch([3, 2])
    with pytest.raises(TypeError, match=r"input_ids is a list; expected a tensor: torch.tensor"):
        jx.smoothness(model, batch | {"input_ids": batch["input_ids"].tolist()})


class Captions(nn.Module):
    """Reads a text beside an image."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        return input_ids.float() + pixel_values.flatten(1).sum(1, keepdim=True)


def test_left_padding_is_tested_on_a_row_with_tokens() -> None:
    """A row of padding alone tells nothing; what reads more than text is left as it is."""
    model = classifier("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(30)
    ids = torch.tensor([[0, 0, 0], [0, 1, 2]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    assert "position_ids" in LeftPadding()(model, batch)
    images = batch | {"pixel_values": torch.ones(2, 3, 4, 4)}
    assert LeftPadding()(Captions(), images) is images
    model.config.is_encoder_decoder = True
    assert LeftPadding()(model, batch) is batch
