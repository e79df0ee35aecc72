"""LoRA, bf16, accumulation, checkpointing, regression and the kept winner, with real training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from jachess_ext.cli import main
from jachess_ext.live_selection import measure, read_records, read_selection
from jachess_ext.live_selection.plan import make_plan
from jachess_ext.tasks.files import Columns

from .conftest import MakeSettings


def loss_of(model: Any, tokenizer: Any, rows: list[list[str]]) -> float:
    """Cross-entropy in single precision, without the package."""
    labels = torch.tensor([["bad", "good"].index(label) for _, label in rows])
    with torch.no_grad():
        batch = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        return float(torch.nn.functional.cross_entropy(model(**batch).logits.double(), labels))


def test_the_winner_is_kept_and_is_what_the_record_says(
    models: tuple[str, str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    rows = (*("--train", str(files[0])), *("--dev", str(files[1])))
    how = ("--lora", "--gradient-accumulation", "2", "--gradient-checkpointing")
    sizes = ("--sizes", "16", "32", "--target", "64", "--budget", "1/2", "--method", "subtuning")
    more = ("--epochs", "1", "--batch-size", "4", "--max-length", "16", "--lr", "2e-2", "2e-3")
    arguments = ["select", "--models", *models, *rows, *how, *sizes, *more]
    assert main([*arguments, "--keep", "winner", "--out", str(out)]) == 0
    found, records = read_selection(out), read_records(out)
    assert len(records) == 6, "two models at two rates, then at the better one"
    assert {(r.size, r.steps) for r in records} == {(16, 2), (32, 4)}
    winner = found.winner
    assert winner is not None and (winner.model, winner.size) == (found.best, 64)
    assert winner.steps == 8 and winner.error is None
    assert (out / "winner" / "adapter_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(out / "winner")
    model = AutoModelForSequenceClassification.from_pretrained(out / "winner").eval()
    rows = [line.rsplit(",", 1) for line in files[1].read_text().splitlines()[1:]]
    assert winner.dev_loss == pytest.approx(loss_of(model, tokenizer, rows), rel=1e-5)


def test_bf16_is_of_training_alone(settings: MakeSettings, tmp_path: Path) -> None:
    plan = make_plan(settings(sizes=(8, 16, 40)))
    job = plan.job(plan.candidates[0], 16)
    plain, _ = measure.run(job)
    job = replace(job, recipe=replace(job.recipe, bf16=True))
    short, _ = measure.run(job, keep=tmp_path / "kept")
    assert short.error is None and short.run != plain.run
    assert short.dev_loss != plain.dev_loss
    assert short.dev_loss == pytest.approx(plain.dev_loss, rel=0.05)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "kept")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept").eval()
    names = ["bad", "good"]
    rows = [[t, names[n]] for t, n in zip(job.task.dev.texts, job.task.dev.labels, strict=True)]
    assert short.dev_loss == pytest.approx(loss_of(model, tokenizer, rows), rel=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_memory_savers_change_no_result(
    settings: MakeSettings, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed = []
    train = measure.fine_tune

    def watched(model: Any, *given: Any, **more: Any) -> None:
        train(model, *given, **more)
        checkpointed.append(any(getattr(m, "gradient_checkpointing", 0) for m in model.modules()))

    monkeypatch.setattr(measure, "fine_tune", watched)
    plan = make_plan(settings(sizes=(8, 16, 40)))
    job = plan.job(plan.candidates[0], 16)
    recipe = replace(job.recipe, lora=lora, batch_size=4)
    losses, untrained = [], measure.run(replace(plan.job(plan.candidates[0], 0), recipe=recipe))[0]
    for how in (
        *({}, {"gradient_checkpointing": True}),
        {"batch_size": 2, "gradient_accumulation": 2},
    ):
        record, _ = measure.run(replace(job, recipe=replace(recipe, **how)))
        assert record.error is None and record.steps == 4
        losses.append(record.dev_loss)
    assert checkpointed == [False, True, False]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert abs(losses[0] - untrained.dev_loss) > 1e-3 * losses[0]


def test_lora_costs_what_is_trained(settings: MakeSettings) -> None:
    """4 N a token for the passes to the inputs, and 2 of each number that is trained."""
    plan = make_plan(settings(sizes=(8, 16, 40)))
    job = plan.job(plan.candidates[0], 16)
    job = replace(job, recipe=replace(job.recipe, lora=True))
    record, _ = measure.run(job)
    assert record.error is None
    model = AutoModelForSequenceClassification.from_pretrained(job.model)
    base = sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for p in model.classifier.parameters())
    trained = record.training_flops / record.tokens / 2 - 2 * record.parameters
    assert head < trained < base / 2
    assert record.parameters >= base


def test_numbers_are_predicted(settings: MakeSettings, tmp_path: Path) -> None:
    def write(name: str, shift: int) -> Path:
        lines = ["text,label"]
        for row in range(48):
            word = "good" if (row + shift) % 3 else "bad"
            lines.append(f"{word} {'fine ' * (row % 4)}poor,{(row % 7) * 0.5 + shift}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    columns = Columns(regression=True)
    files = {"train": write("train.csv", 0), "dev": write("dev.csv", 1)}
    given = settings(**files, columns=columns, sizes=(4, 8, 12), probe=4)
    plan = make_plan(given)
    job = plan.job(plan.candidates[0], 0)
    record, kernel = measure.run(job)
    assert record.error is None and kernel is not None
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = measure.new_model(job, tokenizer)
    with torch.no_grad():
        batch = tokenizer(job.task.dev.texts, padding=True, return_tensors="pt")
        said = model(**batch).logits[:, 0].double()
    truth = torch.tensor(job.task.dev.labels, dtype=torch.float64)
    assert record.dev_loss == pytest.approx(float(((said - truth) ** 2).mean()), rel=1e-5)
    assert record.scores["mae"] == pytest.approx(float((said - truth).abs().mean()), rel=1e-5)
    with torch.no_grad():
        batch = tokenizer(job.probe.texts, padding=True, return_tensors="pt")
        residual = model(**batch).logits.double() - torch.tensor(job.probe.labels)[:, None]
    assert kernel.residual == pytest.approx(residual.numpy(), abs=1e-5)
    trained, _ = measure.run(plan.job(plan.candidates[0], 12))
    assert trained.error is None and trained.dev_loss != record.dev_loss
