"""`JacHess(compile=...)` and a step within ``torch.compile``: one graph, the eager step's numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

import jachess_ext as jx
from jachess_ext.smoothness import JacHessOutput
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS
from python_tests.jet.compiling import fresh_dynamo as fresh_dynamo

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), NEEDS_MODULES_IN_GRAPHS]
VOCABULARY = 50
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 0},
}


def bert(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return tf.BertForSequenceClassification(
        tf.BertConfig(num_attention_heads=2, **_SIZES, **rates)
    ).train()


def llama() -> nn.Module:
    """Grouped queries: four heads of queries, two of keys."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**heads, **_SIZES)).train()


def checkpointed() -> nn.Module:
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora() -> nn.Module:
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = get_peft_model(bert(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def batch_of(number: int, rows: int = 2, tokens: int = 7, labels: bool = True) -> dict[str, Tensor]:
    """A batch whose last row is padded."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    ids[-1, 4:], mask[-1, 4:] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if labels:
        batch["labels"] = torch.randint(0, 2, (rows,), generator=generator)
    return batch


Loss = Callable[[JacHessOutput], Tensor]


def total(out: JacHessOutput) -> Tensor:
    return out.total


def penalty(out: JacHessOutput) -> Tensor:
    return out.loss


def logits(out: JacHessOutput) -> Tensor:
    """A loss of the caller's, as of label smoothing, which takes the labels from the batch."""
    return out.loss + out.model_output.logits.square().sum()


def training(
    compile: str | None = None,
    make: Callable[[], nn.Module] = bert,
    loss: Loss = total,
    labels: bool = True,
    batches: Any = None,
    accumulated: int = 1,
    whole: bool = False,
    **settings: Any,
) -> tuple[list[list[Tensor | None]], jx.JacHess]:
    """Losses, norms and gradients of four steps on other batches, with weights that change.

    Args:
        accumulated: micro-batches of a step.
        whole: whether the caller compiles the regulariser's call, after a first eager step.
    """
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {"seed": 0, "dimensions": 5, "weights": "uniform"} | settings
    reg = jx.JacHess(model, compile=None if whole else compile, **arguments)
    if reg.needs_base:
        reg.calibrate(batch_of(9))
    call: Any = reg
    torch.manual_seed(1)
    results: list[list[Tensor | None]] = []
    for number, batch in enumerate(batches or [batch_of(n, labels=labels) for n in range(4)]):
        out = call(batch)
        loss(out).backward()
        figures = (out.loss, out.jacobian, out.hessian, out.smoothness.tokens, out.model_output[0])
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        results.append([*(f if f is None else f.detach() for f in figures), *gradients])
        if number % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
        if whole and number == 0 and compile:
            call = torch.compile(reg, backend=compile, fullgraph=True)
    return results, reg


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def assert_equal(results: list[list[Any]], expected: list[list[Any]]) -> None:
    """To the bit, and None where there is None."""
    for step, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if b is None or a is None:
                assert a is b, (step, number)
            else:
                torch.testing.assert_close(a, b, rtol=0, atol=0)


QUICK: dict[str, dict[str, Any]] = {
    "softmax, normalised": {"weights": "softmax", "normalize": True},
    "penalty alone": {"loss": penalty, "hessian": False, "seed": None},
}
SLOW: dict[str, dict[str, Any]] = {
    "uniform": {},
    "Jacobian": {"hessian": False},
    "inverse": {"weights": "inverse"},
    "norm": {"weights": "norm"},
    "raw softmax": {"weights": "raw_softmax", "temperature": 40.0},
    "numbers": {"weights": [0.3, 0.7]},
    "normalised Jacobian": {"normalize": True, "hessian": False},
    "no seed": {"seed": None, "make": lambda: bert(0.1)},
    "six directions": {"directions": 6},
    "six directions, dropout": {"directions": 6, "make": lambda: bert(0.1)},
    "all dimensions, squared": {"dimensions": "all", "squared": True},
    "tensor norm": {"hessian_norm": "tensor", "distribution": "rademacher"},
    "first token of the last layer": {"scope": "first", "layers": [-1]},
    "first layer": {"layers": [0], "loss": penalty},
    "logits": {"layers": "logits"},
    "no gradient of the Hessian": {"hessian_gradient": False},
    "dropout": {"make": lambda: bert(0.1)},
    "grouped queries": {"make": llama},
    "checkpointing": {"make": checkpointed},
    "LoRA": {"make": with_lora},
    "LoRA, penalty alone": {"make": with_lora, "loss": penalty},
    "accumulated": {"accumulated": 2},
    "no labels": {"labels": False, "loss": penalty},
    "a loss of the logits": {"labels": False, "loss": logits},
    "large seed": {"seed": 2**64 - 3},
}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_compiled_step_is_the_eager_one(name: str) -> None:
    settings = (QUICK | SLOW)[name]
    expected, eager = training(**settings)
    results, reg = training("aot_eager", **settings)
    assert_equal(results, expected)
    assert reg.step == eager.step == 4
    assert graphs() == 1
