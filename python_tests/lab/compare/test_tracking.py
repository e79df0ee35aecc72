"""What --report-to logs, read back with TensorBoard's own reader; records do not change by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jachess_ext.lab.cli import main
from jachess_ext.lab.compare.finetune import run_grid

from .conftest import RECIPE, MakeGrid
from .test_commands import command, refused
from .test_finetune import timeless

LONGER = RECIPE | {"epochs": 5.0}  # 20 steps: two entries of the loss


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_losses_and_penalties(grid: MakeGrid, tmp_path: Path) -> None:
    """A run that is repeated replaces its log; the mean of the losses is the Trainer's."""
    methods = ("none", "jachess-train", "jachess-unlab", "sam,rho=1e30")
    made = grid(methods=methods, seeds=(0,), recipe=LONGER)
    plain = run_grid(made, tmp_path / "plain")
    assert not (tmp_path / "plain" / "logs").exists()
    out = tmp_path / "out"
    for _ in range(2):
        for path in (out / "runs").glob("*none*.json"):
            path.unlink()
        (out / "results.jsonl").unlink(missing_ok=True)
        records = run_grid(made, out, report_to=["tensorboard"])
    assert timeless(records) == timeless(plain) and records[3].error
    assert {path.name for path in (out / "logs").iterdir()} == {r.run for r in records}
    for record in records[:3]:
        events = logged(out / "logs" / record.run)
        assert [step for step, _ in events["train/loss"]] == [10, 20]
        penalty = [step for step, _ in events.get("train/jachess/penalty", [])]
        every = {"none": 21, "jachess-train": 10, "jachess-unlab": 4}[record.method]
        assert penalty == list(range(every, 21, every))
        if record.method == "none":
            losses = [value for _, value in events["train/loss"]]
            ((_, mean),) = events["train/train_loss"]
            assert sum(losses) / 2 == pytest.approx(mean, rel=1e-4)


def test_the_command(tiny_model: Path, sentiment: Path, tmp_path: Path) -> None:
    more = ["--methods", "none", "--seeds", "0", "--report-to", "tensorboard"]
    more += ["--recipe.epochs", "3"]
    assert main(command(tiny_model, sentiment, tmp_path, *more)) == 0
    (record,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert logged(tmp_path / "logs" / record["run"])["train/loss"]


@pytest.mark.parametrize("name", ["books", "comet_ml"])
def test_what_cannot_be_reported_to(
    tiny_model: Path, sentiment: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """A tracker that transformers does not know, or whose library is not installed."""
    more = ["--methods", "none", "--seeds", "0", "--report-to", name]
    code = main(command(tiny_model, sentiment, tmp_path / "o", *more))
    refused(code, capfd, f"--report-to {name}: ", "finetune")
    assert not (tmp_path / "o").exists()
