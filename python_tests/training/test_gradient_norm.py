"""The gradient of the penalty ‖∇L‖² in closed form and against double backward."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Trainer

from jachess_ext.training import MethodMixin, MethodTrainer, with_lora
from python_tests.smoothness.tiny_models import classifier

from .runs import SGD, examples, first, method_trainer, tensors
from .test_accumulation import Scaling, mean_loss
from .test_known_answers import CURVATURE, START, Quadratic, centres

RATE, STRENGTH = SGD["learning_rate"], 0.3


def stepped(folder: Path, model: nn.Module, parts: int = 1, **settings: Any) -> Any:
    """Train one step of plain SGD on eight rows, in so many micro-batches."""
    made = method_trainer(
        folder,
        "gradient-norm",
        model=model,
        method={"strength": STRENGTH} | settings.pop("method", {}),
        max_steps=1,
        gradient_accumulation_steps=parts,
        **{"data": examples(8), "per_device_train_batch_size": 8 // parts} | settings,
    )
    made.train()
    return made


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole_loss(model: Any, smoothing: float = 0.0) -> Tensor:
    batch = tensors(examples(8))
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_on_a_quadratic(tmp_path: Path, parts: int) -> None:
    """θ ← θ − η (g + 2 s A g), g = A (θ − x̄), however the batch is cut into micro-batches."""
    data = centres(8)
    gradient = CURVATURE @ (START - torch.stack([row["x"] for row in data]).mean(0))
    made = stepped(tmp_path, Quadratic(), parts, data=data)
    expected = START - RATE * (gradient + 2 * STRENGTH * CURVATURE @ gradient)
    torch.testing.assert_close(made.model.theta.detach(), expected, rtol=1e-12, atol=1e-12)
    penalty, task = first(made, "jachess/penalty"), first(made, "jachess/task_loss")
    assert penalty == pytest.approx(STRENGTH * gradient.square().sum().item(), rel=1e-6)
    assert first(made, "loss") == pytest.approx(task + penalty, rel=1e-4)


def adding(base: type) -> type:
    """A class of the user's, with Σ θ⁴ in its loss."""

    class Adding(base):  # type: ignore[misc,valid-type]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            more = next(model.parameters()).pow(4).sum()
            result = super().compute_loss(model, *args, **kwargs)
            return (result[0] + more, *result[1:]) if isinstance(result, tuple) else result + more

    return Adding


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("above", [False, True])
def test_a_user_defined_term_is_part_of_the_loss(tmp_path: Path, above: bool, parts: int) -> None:
    data = centres(8)
    mean = torch.stack([row["x"] for row in data]).mean(0)
    gradient = CURVATURE @ (START - mean) + 4 * START**3
    hessian = CURVATURE + torch.diag(12 * START**2)
    kind = adding(MethodTrainer) if above else type("Mine", (MethodMixin, adding(Trainer)), {})
    made = stepped(tmp_path, Quadratic(), parts, data=data, kind=kind)
    expected = START - RATE * (gradient + 2 * STRENGTH * hessian @ gradient)
    torch.testing.assert_close(made.model.theta.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_step_that_asks_for_no_loss_is_refused(tmp_path: Path) -> None:
    """The second pass would add ∇L once more, in place of the penalty's gradient."""

    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> Tensor:
            loss = model(**inputs)["loss"]
            loss.backward()
            return loss.detach()

    kind = type("Mine", (MethodMixin, Own), {})
    with pytest.raises(ValueError, match=r"'gradient-norm' acts in MethodMixin\.compute_loss"):
        stepped(tmp_path, Quadratic(), data=centres(8), kind=kind)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"parts": 4},
    "checkpointed": {"gradient_checkpointing": True, "parts": 2},
    "compute_loss_func": {"options": {"compute_loss_func": mean_loss}, "parts": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "parts": 2},
    "LoRA": {"parts": 2},
    "LoRA, checkpointed": {"gradient_checkpointing": True},
    "some frozen": {"parts": 2},
}


@pytest.mark.parametrize(
    "family, attention, way",
    [
        *(("bert", "sdpa", way) for way in WAYS if way != "compiled"),
        pytest.param("bert", "sdpa", "compiled", marks=pytest.mark.slow),
        *(("opt", "sdpa", "checkpointed"), ("bert", "eager", "plain"), ("llama", "sdpa", "plain")),
        ("bert", "sdpa", "the model divides"),
    ],
)
def test_the_step_of_a_transformer(tmp_path: Path, family: str, attention: str, way: str) -> None:
    """∇L + s ∇‖∇L‖², the second by a double backward through attention written out."""

    def build(attention: str) -> Any:
        model: Any = classifier(family, attention=attention)
        model.accepts_loss_kwargs = False
        if way == "the model divides":
            model.__class__, model.accepts_loss_kwargs = Scaling, True
        if way == "some frozen":
            model.get_input_embeddings().requires_grad_(False)
        if "LoRA" in way:
            model = with_lora(model).double()
            with torch.no_grad():
                for name, p in trained(model).items():
                    if "lora_B" in name:  # zero at first, which hides half of the derivatives
                        p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p).sin())
        return model

    model = build(attention)
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    made = stepped(tmp_path, model, **WAYS.get(way, {"parts": 4}))
    oracle = build("sdpa")
    leaves = trained(oracle)
    with sdpa_kernel(SDPBackend.MATH):
        loss = whole_loss(oracle, WAYS.get(way, {}).get("label_smoothing_factor", 0.0))
    wanted = partial(torch.autograd.grad, inputs=list(leaves.values()), allow_unused=True)
    slopes = [slope for slope in wanted(loss, create_graph=True) if slope is not None]
    penalty = STRENGTH * torch.stack([slope.square().sum() for slope in slopes]).sum()
    expected = wanted(loss + penalty)
    size = torch.cat([slope.flatten() for slope in expected if slope is not None]).abs().max()
    # transformers smooths labels and takes Llama's norms in float32
    near = (1e-6 if way == "smoothed" or family == "llama" else 1e-9) * size
    for (name, old), slope in zip(before.items(), expected, strict=True):
        step = (old - trained(model)[name].detach()) / RATE
        assert (step - (0 if slope is None else slope)).abs().max() < near, name
    assert first(made, "jachess/penalty") == pytest.approx(penalty.item(), rel=1e-6)
    assert first(made, "jachess/task_loss") == pytest.approx(loss.item(), rel=1e-6)


class Dropping(nn.Module):
    """½ Σ (m θ − 1)² of a dropout mask m."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.linspace(0.0, 0.3, 4096, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        away = nn.functional.dropout(self.theta, 0.5, self.training) - 1
        return {"loss": away.square().sum() / 2 + 0 * x.sum()}


def test_with_dropout_it_is_the_norm_of_the_mean_gradient(tmp_path: Path) -> None:
    """E g = 2 θ − 1; with one mask for both passes the penalty would be twice as large."""
    model = Dropping()
    mean = 2 * model.theta.detach() - 1
    made = stepped(tmp_path, model, data=centres(8))
    assert first(made, "jachess/penalty") == pytest.approx(
        STRENGTH * mean.square().sum().item(), rel=0.15
    )


@pytest.mark.parametrize("last", [False, True])
def test_a_micro_batch_without_labels(tmp_path: Path, last: bool) -> None:
    """Its gradient is zero, where its loss is a mean over nothing."""
    data = [row | {"labels": row["input_ids"].clone()} for row in examples(2, labels=False)]
    data[0]["labels"].fill_(-100)

    def gradient(rows: list[dict]) -> Tensor:
        model = classifier("gpt2", attention="sdpa", head=AutoModelForCausalLM)
        model.accepts_loss_kwargs = False
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        stepped(tmp_path, model, len(rows), data=rows, per_device_train_batch_size=1)
        return (start - torch.cat([p.detach().flatten() for p in model.parameters()])) / RATE

    model = classifier("gpt2", head=AutoModelForCausalLM)
    labelled = {name: value[None] for name, value in data[1].items()}
    (model(**labelled).loss / 2).backward(create_graph=True)
    slopes = torch.cat([p.grad.flatten() for p in model.parameters()])
    again = torch.autograd.grad(STRENGTH * slopes.square().sum(), list(model.parameters()))
    expected = slopes.detach() + torch.cat([x.flatten() for x in again])
    found = gradient(data[::-1] if last else data)
    # transformers takes the loss of a language model in float32
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_its_placebo(tmp_path: Path) -> None:
    """A step as long, in another direction, and the same value."""
    moves, figures = [], []
    for placebo in (False, True):
        model = classifier("bert", attention="sdpa")
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        made = stepped(tmp_path, model, method={"placebo": placebo, "strength": 1e6})
        moves.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
        figures.append(first(made, "jachess/penalty"))
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)
    assert moves[1].norm() == pytest.approx(moves[0].norm().item(), rel=1e-4)
    assert abs(moves[0] @ moves[1]) < 0.1 * moves[0].norm() ** 2
