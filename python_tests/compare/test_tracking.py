"""What --report-to logs, read back with TensorBoard's own reader; records do not change by it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jachess_ext.cli import main
from jachess_ext.compare.finetune import run_grid

from .conftest import RECIPE, MakeGrid
from .test_commands import command, refused
from .test_run import timeless

LONGER = RECIPE | {"epochs": 5.0}  # 20 steps: two entries of the loss


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag: steps and values."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_losses_penalties_and_figures(grid: MakeGrid, tmp_path: Path) -> None:
    made = grid(
        methods=("none", "jachess-train", "jachess-unlab"),
        seeds=(0,),
        recipe=LONGER,
        validation=0.25,
        curve=(2, 5),
        tuning={"strength": (0.01,), "unlab_lr_ratio": (0.5,), "seeds": (7,)},
    )
    plain = run_grid(made, tmp_path / "plain")
    assert not (tmp_path / "plain" / "logs").exists()
    out = tmp_path / "out"
    records = run_grid(made, out, report_to=["tensorboard"])
    assert timeless(records) == timeless(plain)
    assert {path.name for path in (out / "logs").iterdir()} == {r["run"] for r in records}
    for record in records:
        found = logged(out / "logs" / record["run"])
        steps = record["rows"][0] // 8 * 5
        assert [step for step, _ in found["train/loss"]] == list(range(10, steps + 1, 10))
        assert found["eval/score"][-1] == (steps, pytest.approx(record["score"]))
        names = ["eval/brier", "eval/nll"]
        assert [found[name][-1][1] for name in names] == pytest.approx(
            [record["brier"], record["nll"]]
        )
        penalty = found.get("train/jachess/penalty", [])
        if record["method"] == "none":
            assert not penalty
            points = record["curve"]
            assert found["eval/score"] == [
                (step, pytest.approx(score))
                for step, score in zip(
                    (8, 20, 20), [*(p["score"] for p in points), record["score"]], strict=True
                )
            ]
            of_validation = [value for _, value in found["eval/validation/nll"]]
            assert of_validation == pytest.approx([p["validation"]["nll"] for p in points])
        else:
            every = 10 if record["method"] == "jachess-train" else steps // 5
            assert [step for step, _ in penalty] == list(range(every, steps + 1, every))
        if record["kind"] == "final":
            assert found["eval/corrupted/0.2"][-1][1] == pytest.approx(record["corrupted"]["0.2"])
            norms = [found[f"eval/jacobian/{k}"][-1][1] for k in range(2)]
            assert norms == pytest.approx(record["jacobian"])
        assert not [tag for tag in found if "reliability" in tag or "seed" in tag]


def test_the_logged_loss_is_the_loss(grid: MakeGrid, tmp_path: Path) -> None:
    """The means over ten steps each have the mean over all that the Trainer gives at its end."""
    made = grid(methods=("none",), seeds=(0,), recipe=LONGER)
    (record,) = run_grid(made, tmp_path, report_to=["tensorboard"])
    found = logged(tmp_path / "logs" / record["run"])
    losses = [value for _, value in found["train/loss"]]
    ((_, mean),) = found["train/train_loss"]
    assert len(losses) == 2 and sum(losses) / 2 == pytest.approx(mean, rel=1e-4)


def test_a_run_made_again_and_one_that_fails(grid: MakeGrid, tmp_path: Path) -> None:
    made = grid(methods=("none", "sam,rho=1e30"), seeds=(0,), recipe=LONGER)
    for _ in range(2):
        records = run_grid(made, tmp_path, report_to=["tensorboard"])
        for path in (tmp_path / "runs").iterdir():
            path.unlink()
        (tmp_path / "results.jsonl").unlink()
    good, failed = (logged(tmp_path / "logs" / record["run"]) for record in records)
    assert len(good["train/loss"]) == 2 and len(good["eval/score"]) == 1
    assert records[1]["error"] and "eval/score" not in failed


def test_the_command(tiny_model: Path, sentiment: Path, tmp_path: Path) -> None:
    more = ["--methods", "none", "--seeds", "0", "--report-to", "tensorboard", "--processes", "2"]
    assert main(command(tiny_model, sentiment, tmp_path, *more)) == 0
    (record,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert logged(tmp_path / "logs" / record["run"])["eval/score"][0][1] == record["score"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorboard", "--report-to tensorboard needs tensorboard, which cannot be imported"),
        ("books", "--report-to books; expected some of tensorboard, mlflow, trackio, wandb"),
    ],
)
def test_what_cannot_be_reported_to(
    tiny_model: Path,
    sentiment: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: str,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    more = ["--methods", "none", "--seeds", "0", "--report-to", name]
    refused(main(command(tiny_model, sentiment, tmp_path / "o", *more)), capfd, words, "finetune")
    assert not (tmp_path / "o").exists()
