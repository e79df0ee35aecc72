"""`JacHess(compile=...)`, or within ``torch.compile``: one graph with the eager step's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
from python_tests.snippets import blocks, run

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), NEEDS_MODULES_IN_GRAPHS]
VOCABULARY = 50
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32},
    **{"intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 0},
}


def bert(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return tf.BertForSequenceClassification(
        tf.BertConfig(num_attention_heads=2, num_hidden_layers=layers, **_SIZES, **rates)
    ).train()


def llama() -> nn.Module:
    """Grouped queries: four heads of queries, two of keys."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = tf.LlamaForSequenceClassification(tf.LlamaConfig(**heads, **_SIZES))
    return model.train()


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
    rate: float = 0.1,
    **settings: Any,
) -> tuple[list[list[Tensor | None]], jx.JacHess]:
    """Losses, norms and gradients of four steps on other batches, with weights that change.

    Args:
        accumulated: micro-batches of a step.
        whole: whether the caller compiles the regulariser's call, after a first eager step.
    """
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
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


PENALTY_ALONE = {"loss": penalty, "hessian": False, "seed": None, "make": lambda: bert(layers=1)}
SETTINGS: dict[str, dict[str, Any]] = {
    "penalty alone": PENALTY_ALONE,
    "softmax, normalised": {"weights": "softmax", "normalize": True},
    "uniform": {},
    "Jacobian": {"hessian": False},
    "inverse": {"weights": "inverse"},
    "norm": {"weights": "norm"},
    "raw softmax": {"weights": "raw_softmax", "temperature": 40.0},
    "numbers": {"weights": [0.3, 0.7]},
    "normalised Jacobian": {"normalize": True, "hessian": False},
    "no seed": {"seed": None, "make": lambda: bert(0.1)},
    "six directions": {"directions": 6},
    "all dimensions, squared": {"dimensions": "all", "squared": True},
    "tensor norm": {"hessian_norm": "tensor", "distribution": "rademacher"},
    "first token of the last layer": {"scope": "first", "layers": [-1]},
    "first layer": {"layers": [0], "loss": penalty},
    "logits": {"layers": "logits"},
    "no gradient of the Hessian": {"hessian_gradient": False},
    "dropout": {"make": lambda: bert(0.1)},
    "grouped queries": {"make": llama, "rate": 1e-3},
    "checkpointing": {"make": checkpointed},
    "LoRA, penalty alone": {"make": with_lora, "loss": penalty},
    "accumulated": {"accumulated": 2},
    "no labels": {"labels": False, "loss": penalty},
    "a loss of the logits": {"labels": False, "loss": logits},
    "large seed": {"seed": 2**64 - 3},
}


def trained_alike(name: str) -> tuple[jx.JacHess, jx.JacHess]:
    """Steps in a graph are the eager ones; return the eager regulariser and the compiled one."""
    expected, eager = training(**SETTINGS[name])
    results, reg = training("aot_eager", **SETTINGS[name])
    assert_equal(results, expected)
    assert reg.step == eager.step == 4
    assert graphs() == 1
    return eager, reg


QUICK = ("penalty alone", "softmax, normalised")
"""The second one's graph is that of the test of errors."""


@pytest.mark.parametrize(
    "name",
    [
        "penalty alone",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS if name not in QUICK),
    ],
)
def test_a_compiled_step_is_the_eager_one(name: str) -> None:
    trained_alike(name)


@pytest.mark.slow
def test_lora_is_equal_to_rounding() -> None:
    """The frozen pooler's product rounds otherwise in a graph."""
    expected, _ = training(make=with_lora)
    results, _ = training("aot_eager", make=with_lora)
    for ours, theirs in zip(results, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if a is not None and b is not None:
                assert (a.double() - b.double()).norm() <= 1e-5 * b.double().norm()


@pytest.mark.slow
def test_a_step_that_the_caller_compiles() -> None:
    """After a first eager step, with fullgraph=True; the graph counts the steps."""
    expected, _ = training(weights="softmax", normalize=True)
    results, reg = training("aot_eager", whole=True, weights="softmax", normalize=True)
    assert_equal(results, expected)
    assert graphs() == 1
    assert isinstance(reg.step, Tensor)
    assert reg.state_dict()["step"] == 4
    reg.calibrate(batch_of(8))  # the graph reads the base norms of now
    step = int(reg.step)
    graph = torch.compile(reg, backend="aot_eager", fullgraph=True)(batch_of(1))
    reg.step = step
    torch.testing.assert_close(graph.loss, reg(batch_of(1)).loss, rtol=0, atol=0)


@pytest.mark.slow
def test_shapes(caplog: pytest.LogCaptureFixture) -> None:
    """The second shape is traced once more, for every size; but the other side of the size from
    which a product goes to oneDNN (128 · rows · tokens from 4,096 on) has a graph of its own."""
    sizes = [(2, 7), (3, 16), (5, 12), (4, 20), (3, 12), (3, 9), (4, 7)]
    batches = [batch_of(n, *size) for n, size in enumerate(sizes)]
    expected, _ = training(batches=batches)
    results, _ = training("aot_eager", batches=batches)
    assert_equal(results, expected)
    assert graphs() == 3
    assert sum("traced once more" in message for message in caplog.messages) == 1


class Writing(tf.BertForSequenceClassification):
    """Writes an attribute where there are labels: another one each time, or the same."""

    counts = False
    written = 0

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is not None:
            self.written = self.written + 1 if self.counts else 1
        return super().forward(*args, labels=labels, **kwargs)


def writing(counts: bool) -> nn.Module:
    model = bert()
    model.__class__ = type("Writer", (Writing,), {"counts": counts})
    return model


def total_or_penalty(out: JacHessOutput) -> Tensor:
    return out.loss if out.model_output.loss is None else out.total


@pytest.mark.slow
def test_a_model_that_writes_in_a_later_step(caplog: pytest.LogCaptureFixture) -> None:
    """That step runs eagerly, and the next one is traced again."""
    settings: dict[str, Any] = {
        "make": lambda: writing(False),
        "batches": [batch_of(n, labels=n > 1) for n in range(5)],
        "loss": total_or_penalty,
    }
    expected, _ = training(**settings)
    results, _ = training("aot_eager", **settings)
    assert_equal(results, expected)
    assert graphs() == 2
    assert sum("changes written" in message for message in caplog.messages) == 1


@pytest.mark.slow
def test_a_model_that_writes_in_every_step(caplog: pytest.LogCaptureFixture) -> None:
    """All steps run eagerly, and the third is not traced any more."""
    expected, _ = training(make=lambda: writing(True))
    results, _ = training("aot_eager", make=lambda: writing(True))
    assert_equal(results, expected)
    assert graphs() == 0
    assert sum("changes written" in message for message in caplog.messages) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"on_nonfinite": "skip"},
        {"engine": "reverse", "dimensions": 1, "hessian": False},
        pytest.param({"directions": 6, "make": lambda: bert(0.1)}, marks=pytest.mark.slow),
    ],
)
def test_what_a_graph_cannot_hold_runs_eagerly(settings: dict[str, Any]) -> None:
    """As do passes of more than four directions with dropout, which draw other masks each."""
    expected, _ = training(**settings)
    results, _ = training("aot_eager", **settings)
    assert_equal(results, expected)
    assert graphs() == 0


def messages_of(steps: list[Callable[[], Any]]) -> list[str]:
    texts = []
    for step in steps:
        with pytest.raises((FloatingPointError, ValueError)) as error:
            step()
        texts.append(f"{type(error.value).__name__}: {error.value}")
    return texts


@pytest.mark.slow
def test_the_example_of_the_documentation() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "compile.md"
    (code,) = [code for code, _ in blocks(document) if "compile=" in code]
    names: dict[str, Any] = {}
    run(code, names)
    assert int(names["regulariser"].step) == 3
    assert graphs() == 1


@pytest.mark.slow
def test_inductor() -> None:
    """Its rounding (keys' biases have a gradient of rounding alone), and None as eagerly."""
    expected, _ = training(loss=penalty, weights="norm")
    results, _ = training("inductor", loss=penalty, weights="norm")
    for ours, theirs in zip(results, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.double() - b.double()).norm() <= 1e-4 * b.double().norm() + 1e-9


@pytest.mark.slow
def test_a_frozen_part_that_is_trained_later() -> None:
    """Parameters that the first step did not train get their gradient."""
    model = bert()
    layer = model.bert.encoder.layer[0].output.dense
    layer.requires_grad_(False)
    reg = jx.JacHess(model, seed=0, weights="uniform", dimensions=5, compile="aot_eager")
    reg(batch_of(0)).loss.backward()
    layer.requires_grad_(True)
    reg(batch_of(1)).loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.norm() > 0
    assert model.classifier.weight.grad is None
    reg(batch_of(1)).total.backward()
    assert model.classifier.weight.grad.norm() > 0


def test_errors_of_a_graph_are_the_eager_ones() -> None:
    """A row, a norm and an embedding; the step is not counted, and nothing is traced again."""
    regs = trained_alike("softmax, normalised")
    padded = batch_of(1)
    padded["attention_mask"][0] = 0
    assert len({*messages_of([lambda reg=reg: reg(padded) for reg in regs])}) == 1
    layers = [reg.model.bert.encoder.layer[1].output.dense for reg in regs]
    with torch.no_grad():
        for layer in layers:
            layer.weight[0] = float("inf")
    assert len({*messages_of([lambda reg=reg: reg(batch_of(2)) for reg in regs])}) == 1
    with torch.no_grad():
        for reg, layer in zip(regs, layers, strict=True):
            layer.weight[0] = 0.1
            reg.model.get_input_embeddings().weight[int(batch_of(2)["input_ids"][0, 0])] = 1e38
    assert len({*messages_of([lambda reg=reg: reg(batch_of(2)) for reg in regs])}) == 1
    assert int(regs[1].step) == regs[0].step == 4
    assert graphs() == 1
