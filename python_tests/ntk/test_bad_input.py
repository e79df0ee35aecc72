"""Bad input: one clear sentence each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import jachess_ext as jx

from .models import batch, classifier

GOOD = batch([5, 4])

BATCHES: list[tuple[Any, type, str]] = [
    ((GOOD["input_ids"],), TypeError, "batch must be a tensor or a dict, not tuple"),
    ({}, ValueError, "batch holds no tensor of inputs; expected input_ids"),
    ({"input_ids": torch.zeros(0, 4).long()}, ValueError, r"batch is empty .*\[0, 4\]"),
    (GOOD | {"attention_mask": torch.ones(3, 5)}, ValueError,
     r"batch\['attention_mask'\] has 3 rows, but 'input_ids' has 2"),
]  # fmt: skip


@pytest.mark.parametrize("samples, kind, sentence", BATCHES)
def test_batches(samples: Any, kind: type, sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        jx.ntk(classifier("bert"), samples)


def test_the_right_side_is_named() -> None:
    with pytest.raises(ValueError, match="other is empty"):
        jx.ntk(classifier("bert"), GOOD, {"input_ids": torch.zeros(0, 4).long()})
    unlabelled = {key: value for key, value in GOOD.items() if key != "labels"}
    with pytest.raises(ValueError, match="outputs='label' needs labels, and other has none"):
        jx.ntk(classifier("bert"), GOOD, unlabelled, outputs="label")


ARGUMENTS: list[tuple[dict[str, Any], type, str]] = [
    ({"outputs": "loss"}, ValueError, "outputs is 'loss'; expected 'logits', 'sum', 'label'"),
    ({"outputs": 0}, ValueError, "outputs is 0; expected"),
    ({"outputs": True}, ValueError, "outputs is True; expected"),
    ({"outputs": lambda out, batch: out.logits[0]}, ValueError, r"outputs should be \[n, C\]"),
    ({"method": "fast"}, ValueError, "method is 'fast'; expected one of 'auto', 'gram'"),
    ({"parameters": "classifier.weight"}, TypeError, "parameters is 'classifier.weight'; expected"),
    ({"parameters": ["clasifier.weight"]}, ValueError, "did you mean 'classifier.weight'"),
    ({"parameters": lambda name, p: False}, ValueError, "no parameter .* was chosen"),
    ({"parameters": []}, ValueError, "no parameter .* was chosen"),
    ({"memory_budget": 1000}, ValueError,
     "memory_budget is 1000 bytes, too few for one sample: .*pass at least"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, kind, sentence", ARGUMENTS)
def test_arguments(arguments: dict[str, Any], kind: type, sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        jx.ntk(classifier("bert"), GOOD, **arguments)


def test_the_named_budget_is_enough() -> None:
    """What the sentence asks for works, and gives the same kernel."""
    model = classifier("bert")
    with pytest.raises(ValueError, match="too few") as caught:
        jx.ntk(model, GOOD, memory_budget=1000)
    enough = int(str(caught.value).split("pass at least ")[1].split(",")[0])
    found = jx.ntk(model, GOOD, memory_budget=enough)
    torch.testing.assert_close(found, jx.ntk(model, GOOD), rtol=1e-12, atol=1e-12)


def test_no_trainable_parameter() -> None:
    model = classifier("bert").requires_grad_(False)
    with pytest.raises(ValueError, match="none that requires gradients; call requires_grad_"):
        jx.ntk(model, GOOD)
    with pytest.raises(ValueError, match=r"'classifier.weight' is frozen"):
        jx.ntk(model, GOOD, parameters=["classifier.weight"])


def test_outputs_that_need_no_parameter() -> None:
    with pytest.raises(ValueError, match="outputs do not depend on any parameter"):
        jx.ntk(classifier("bert"), GOOD, outputs=lambda out, batch: out.logits.detach())


def test_nan_weights() -> None:
    model = classifier("bert")
    with torch.no_grad():
        model.bert.pooler.dense.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"outputs are NaN or infinite for samples \[0, 1\]"):
        jx.ntk(model, GOOD)


class Cusp(nn.Module):
    """√|w x| at 0: a finite output whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).abs().sqrt()


def test_nan_gradients() -> None:
    """In the first samples, which are checked before; and in one that is not."""
    model, zeros = Cusp().double(), torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"gradient of parameter 'inner.weight' is NaN"):
        jx.ntk(model, zeros)
    ones = torch.ones(6, 3, dtype=torch.float64)
    ones[5] = 0
    with pytest.raises(ValueError, match=r"kernel of parameter 'inner.weight' is NaN"):
        jx.ntk(model, ones)


def test_labels_that_do_not_fit() -> None:
    model = classifier("bert")
    with pytest.raises(ValueError, match="label 7 is not one of the 3 classes"):
        jx.ntk(model, GOOD | {"labels": torch.tensor([0, 7])}, outputs="label")
    with pytest.raises(
        ValueError, match=r"labels are torch.float32 of shape \[1\].*one class number"
    ):
        jx.ntk(model, GOOD | {"labels": torch.zeros(2)}, outputs="label")


def test_models_without_logits() -> None:
    with pytest.raises(ValueError, match="the model returned no logits"):
        jx.ntk(classifier("bert").bert, GOOD)
