"""A run of a live selection against its definition, by other means than the package's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from jachess_ext.lab.live import trial
from jachess_ext.lab.live.plan import make_plan
from jachess_ext.lab.live.trial import Trial, run
from jachess_ext.lab.workbench.settings import Columns
from jachess_ext.scaling import Ask

from .conftest import Settings


@pytest.fixture
def job(settings: Settings, tmp_path: Path) -> Trial:
    """Of 16 rows."""
    plan = make_plan(**settings(sizes=(8, 16, 40)))
    return plan.trial(Ask(plan.candidates[0].model, 16))


def changed(job: Trial, **recipe: Any) -> Trial:
    return replace(job, recipe=replace(job.recipe, **recipe))


def batch_of(job: Trial, part: str) -> dict[str, torch.Tensor]:
    """Token ids from the words, without the package's encoding."""
    examples = getattr(job.task, part)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokens = tokenizer(examples.texts, padding=True, return_tensors="pt")
    return {**tokens, "labels": torch.tensor(examples.labels)}


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_a_run_is_what_it_says(job: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is replaced by a known change of the weights, so that its result is at hand."""
    seen: dict[str, Any] = {}

    def change(model: Any, train: Any, recipe: Any, *, seed: int, callbacks: Any) -> None:
        with torch.no_grad():
            torch.manual_seed(3)
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for _ in range(5):
            callbacks[0].on_pre_optimizer_step(None, None, None)
        seen["model"] = model

    monkeypatch.setattr(trial, "fine_tune", change)
    record = run(job)
    model = seen["model"]
    batch = batch_of(job, "dev")
    with torch.no_grad():
        logits = logits_of(model, batch)
    expected = float(functional.cross_entropy(logits.double(), batch["labels"]))
    assert record.dev_loss == pytest.approx(expected, rel=1e-5)
    right = (logits.argmax(1) == batch["labels"]).double().mean()
    assert record.scores["accuracy"] == pytest.approx(float(right))
    one_hot = functional.one_hot(batch["labels"], 2)
    brier = (logits.double().softmax(-1) - one_hot).square().sum(-1).mean()
    assert record.scores["brier"] == pytest.approx(float(brier), rel=1e-5)
    assert record.dev_rows == 40
    assert record.steps == 5
    assert record.size == 16
    assert record.error is None


def test_the_cost_is_six_n_d(job: Trial) -> None:
    record = run(job)
    width, words, positions = 8, 20, 16
    embeddings = (words + positions + 2 + 2) * width  # and token types, and the norm
    attention = 4 * (width + 1) * width
    rest = (width + 1) * 2 * width + (2 * width + 1) * width + 4 * width
    ends = (width + 1) * width + (width + 1) * 2  # pooler and head
    parameters = embeddings + attention + rest + ends
    assert record.parameters == parameters
    tokens = 16 * (6 + 2)  # words of a row, [CLS], [SEP]
    assert record.tokens == tokens
    assert record.training_flops == 6 * parameters * tokens * 1.0
    assert record.judging_flops == 2 * parameters * 40 * 8


@pytest.mark.parametrize(("epochs", "rows"), [(1.0, 40), (3.0, 16)])
def test_steps_are_the_optimisers(job: Trial, epochs: float, rows: int) -> None:
    task = replace(job.task, train=job.task.train.take([i % 16 for i in range(rows)]))
    record = run(replace(changed(job, epochs=epochs, batch_size=8), task=task))
    assert record.steps == int(epochs * rows / 8)


def test_size_zero_is_the_model_before_training(job: Trial, tmp_path: Path) -> None:
    record = run(replace(job, task=replace(job.task, train=job.task.train.slice(0, 0))))
    assert (record.size, record.steps, record.tokens) == (0, 0, 0)
    assert record.training_flops == 0
    trained = run(job)
    assert trained.dev_loss != record.dev_loss


def test_a_run_does_not_depend_on_those_before_it(job: Trial, tmp_path: Path) -> None:
    first = run(job)
    torch.manual_seed(99)
    again = run(job)
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)
    assert run(replace(job, seed=1)).dev_loss != first.dev_loss


def test_a_diverged_run_says_so(job: Trial) -> None:
    record = run(replace(job, recipe=replace(job.recipe, lr=1e30, epochs=3.0)))
    assert "not finite" in record.error and not record.lost
    assert record.dev_loss is None


def test_names_follow_what_a_run_depends_on(job: Trial, tmp_path: Path) -> None:
    others = [
        replace(job, seed=5),
        replace(job, version="another"),
        replace(job, recipe=replace(job.recipe, epochs=2.0)),
        replace(job, task=replace(job.task, dev=job.task.dev.slice(0, 3))),
        replace(job, task=replace(job.task, train=job.task.train.slice(0, 3))),
    ]
    assert len({job.name, *(other.name for other in others)}) == 6
    assert replace(job, keep=tmp_path / "elsewhere").name == job.name


def loss_of(model: Any, job: Trial) -> float:
    """Cross-entropy of the dev rows in single precision, without the package."""
    batch = batch_of(job, "dev")
    with torch.no_grad():
        return float(functional.cross_entropy(logits_of(model, batch).double(), batch["labels"]))


def test_bf16_is_of_training_alone(job: Trial, tmp_path: Path) -> None:
    plain = run(changed(job))
    short = run(replace(changed(job, bf16=True), keep=tmp_path / "kept"))
    assert short.error is None and short.run != plain.run
    assert short.dev_loss != plain.dev_loss
    assert short.dev_loss == pytest.approx(plain.dev_loss, rel=0.05)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept").eval()
    assert short.dev_loss == pytest.approx(loss_of(model, job), rel=1e-5)


def test_memory_savers_change_no_result(job: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointed = []
    train = trial.fine_tune

    def watched(model: Any, *given: Any, **more: Any) -> None:
        train(model, *given, **more)
        checkpointed.append(any(getattr(m, "gradient_checkpointing", 0) for m in model.modules()))

    monkeypatch.setattr(trial, "fine_tune", watched)
    job = changed(job, lora=True, batch_size=4)
    losses = []
    for how in (
        {},
        {"gradient_checkpointing": True},
        {"batch_size": 2, "gradient_accumulation": 2},
    ):
        record = run(changed(job, **how))
        assert record.error is None and record.steps == 4
        losses.append(record.dev_loss)
    assert checkpointed == [False, True, False]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    untrained = run(replace(job, task=replace(job.task, train=job.task.train.slice(0, 0))))
    assert abs(losses[0] - untrained.dev_loss) > 1e-3 * losses[0]


def test_lora_costs_what_is_trained(job: Trial) -> None:
    """4 N a token for the passes to the inputs, and 2 of each number that is trained."""
    record = run(changed(job, lora=True))
    assert record.error is None
    model = AutoModelForSequenceClassification.from_pretrained(job.model)
    base = sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for p in model.classifier.parameters())
    trained = record.training_flops / record.tokens / 2 - 2 * record.parameters
    assert head < trained < base / 2
    assert record.parameters >= base


def test_numbers_are_predicted(settings: Settings, tmp_path: Path) -> None:
    def write(name: str, shift: int) -> Path:
        lines = ["text,label"]
        for row in range(48):
            word = "good" if (row + shift) % 3 else "bad"
            lines.append(f"{word} {'fine ' * (row % 4)}poor,{(row % 7) * 0.5 + shift}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    files = {"train": write("train.csv", 0), "dev": write("dev.csv", 1)}
    columns = Columns(regression=True)
    plan = make_plan(**settings(**files, columns=columns, sizes=(4, 8, 12)))
    job = plan.trial(Ask(plan.candidates[0].model, 0))
    record = run(job)
    assert record.error is None
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = trial.new_model(job, tokenizer)
    with torch.no_grad():
        batch = tokenizer(job.task.dev.texts, padding=True, return_tensors="pt")
        said = model(**batch).logits[:, 0].double()
    truth = torch.tensor(job.task.dev.labels, dtype=torch.float64)
    assert record.dev_loss == pytest.approx(float(((said - truth) ** 2).mean()), rel=1e-5)
    assert record.scores["mae"] == pytest.approx(float((said - truth).abs().mean()), rel=1e-5)
    trained = run(plan.trial(Ask(job.model, 12)))
    assert trained.error is None and trained.dev_loss != record.dev_loss
