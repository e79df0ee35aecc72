"""Rounds, stops and budgets on runs whose losses are a formula's: nothing is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jachess_ext.live_selection import Kernel, RunRecord, Seconds, measure, read_selection
from jachess_ext.live_selection.budget import Budget
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.jobs import SubsetJob
from jachess_ext.live_selection.result import LiveSelection
from jachess_ext.live_selection.settings import LiveSettings
from jachess_ext.live_selection.store import RECORDS, read_records
from jachess_ext.tasks.examples import DataError

from .conftest import MakeSettings

Made = list[tuple[str, int]]
SIZES = (4, 8, 16, 32, 64)
ALL = [(name, size) for size in SIZES for name in ("narrow", "wide")]
PROBE_FLOPS = 1000.0
DEV_ROWS = 40
PARAMETERS = {"narrow": 1010, "wide": 3170}


def training_flops(model: str, size: int) -> float:
    """6 N D with eight tokens a row, one epoch."""
    return 6.0 * PARAMETERS[Path(model).name] * 8 * size


def judging_flops(model: str) -> float:
    """2 N D: a forward pass over the dev rows."""
    return 2.0 * PARAMETERS[Path(model).name] * 8 * DEV_ROWS


def loss_of(model: str, size: int) -> float:
    """The wide model is worse at first and better in the end; with a little noise."""
    wide = model.endswith("wide")
    scale, beta, floor = (0.9, 0.6, 0.2) if wide else (0.4, 0.25, 0.35)
    return (scale / (1 + size**beta / 3) + floor) * (1 + 0.02 * np.cos(7 * size + wide))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Which runs were made, in order; each takes three seconds and a second more a hundred rows."""
    runs: Made = []

    def run(job: SubsetJob, keep: Path | None = None) -> tuple[RunRecord, Kernel | None]:
        runs.append((Path(job.model).name, job.size))
        if keep is not None:
            keep.mkdir()
            (keep / "run.txt").write_text(job.name)
        probed = len(job.probe) > 0
        theta = np.eye(8, dtype=np.float32) * (1 + job.size)
        record = RunRecord(
            run=job.name,
            model=job.model,
            parameters=PARAMETERS[Path(job.model).name],
            size=job.size,
            epochs=1.0,
            steps=job.size,
            seed=job.seed,
            learning_rate=job.recipe.learning_rate,
            time=float(job.size),
            tokens=8 * job.size,
            metric="accuracy",
            dev_loss=loss_of(job.model, job.size),
            scores={"accuracy": 1 - loss_of(job.model, job.size) / 2},
            training_flops=training_flops(job.model, job.size),
            judging_flops=judging_flops(job.model),
            dev_rows=DEV_ROWS,
            probe_flops=PROBE_FLOPS if probed else 0.0,
            kernel=f"{job.name}.npz" if probed else None,
            features={"logme": float(-PARAMETERS[Path(job.model).name])}
            if len(job.features)
            else None,
            features_flops=7.0 if len(job.features) else 0.0,
            seconds=Seconds(job.size / 100, 1.0, 2.0),
        )
        kernel = Kernel(theta.reshape(4, 2, 4, 2), np.ones((4, 2)), np.ones(8), np.arange(4))
        return record, kernel if probed else None

    monkeypatch.setattr(measure, "run", run)
    return runs


@pytest.fixture
def go(settings: MakeSettings, tmp_path: Path) -> Callable[..., LiveSelection]:
    def select(**given: object) -> LiveSelection:
        return select_live(settings(**({"sizes": SIZES} | given)), tmp_path)

    return select


def test_all_rounds(go: Callable[..., LiveSelection], made: Made, tmp_path: Path) -> None:
    found = go()
    assert made == ALL
    assert found.stop == "every planned size was run" and found.share == 1 / 4
    assert [one.sizes for one in found.candidates] == [SIZES] * 2
    assert set(found.predictions) == {
        *("blend", "rectified", "power", "ats", "subtuning", "modelsize")
    }
    assert set(found.missing) == {"lensllm", "zeroshot", "logme", "hscore", "knn"}
    assert "give --screen" in found.missing["knn"] and "--probe" in found.missing["lensllm"]
    assert found.best.endswith("wide"), "loss_of crosses beyond 64"
    assert loss_of("wide", 64) > loss_of("narrow", 64) - 0.2
    assert read_selection(tmp_path) == found
    assert [r.size for r in read_records(tmp_path)] == [r[1] for r in made]
    training = sum(training_flops(*run) for run in made)
    judging = sum(judging_flops(name) for name, _ in made)
    assert found.flops.training == training and found.flops.judging == judging
    assert found.flops.probe == found.flops.features == 0
    assert found.flops.spent == training + judging
    full = sum(training_flops(name, 256) + judging_flops(name) for name in PARAMETERS)
    assert found.flops.full_tuning == full and found.flops.share == found.flops.spent / full
    assert found.seconds == pytest.approx(sum(3 + size / 100 for _, size in made))


def test_finished_runs_are_not_made_again(
    go: Callable[..., LiveSelection], made: Made, tmp_path: Path
) -> None:
    first = go()
    before = (tmp_path / RECORDS).read_bytes()
    made.clear()
    assert go() == first and made == []
    assert (tmp_path / RECORDS).read_bytes() == before
    victim = next((tmp_path / "runs").glob("*wide-16-*.json"))
    victim.write_text(victim.read_text()[:100])
    with pytest.warns(RuntimeWarning, match="only this run is made again"):
        assert go() == first
    assert made == [("wide", 16)] and (tmp_path / RECORDS).read_bytes() == before
    made.clear()
    go(sizes=(*SIZES[:-1], 48))
    assert made == [("narrow", 48), ("wide", 48)]
    made.clear()
    go(seed=1)
    assert len(made) == 10, "another seed is another run"


def test_a_decided_ranking_stops(
    go: Callable[..., LiveSelection], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = go(confidence=0.6)
    assert found.stop.startswith("decided: ") and found.ranking[0].prob_best >= 0.6
    assert found.ranking[0].model in found.stop
    largest = max(size for _, size in made)
    assert largest in SIZES[2:-1] and made == ALL[: 2 * (1 + SIZES.index(largest))]
    alike = loss_of
    monkeypatch.setattr(sys.modules[__name__], "loss_of", lambda model, size: alike("", size))
    undecided = go(confidence=0.6, seed=1)
    assert undecided.stop == "every planned size was run"
    assert undecided.ranking[0].prob_best == pytest.approx(0.5, abs=0.02)


def test_models_clearly_out_are_dropped_only_if_asked(
    go: Callable[..., LiveSelection], made: Made
) -> None:
    found = go(drop=0.45)
    dropped = [one for one in found.candidates if one.stop.startswith("dropped: ")]
    assert len(dropped) == 1 and found.stop.startswith("all but ")
    assert len(found.ranking) == 2 and sum(p.prob_best for p in found.ranking) == pytest.approx(1)
    assert go().candidates[0].sizes == go().candidates[1].sizes == SIZES


def test_flops_are_not_exceeded(go: Callable[..., LiveSelection], made: Made) -> None:
    found = go(probe=4)
    judging = sum(map(judging_flops, PARAMETERS))
    assert found.flops.probe == PROBE_FLOPS * len(made), "before fine-tuning too"
    assert found.flops.sub_tuning == judging + sum(training_flops(m, 64) for m in PARAMETERS)
    made.clear()
    each = [training_flops(*run) + judging_flops(run[0]) + PROBE_FLOPS for run in ALL[:6]]
    least = sum(each) + judging + 2 * PROBE_FLOPS
    for amount, rounds in ((found.flops.spent, 6), (found.flops.spent - 1, 5), (least, 4)):
        less = go(budget=Budget.parse(f"{amount}flops"), probe=4)
        assert less.flops.spent <= amount
        assert less.candidates[0].sizes == (0, *SIZES)[:rounds]
        assert rounds == 6 or "does not pay for the next size" in less.stop
    with pytest.raises(DataError, match=r"no ranking yet .* the runs are kept"):
        go(budget=Budget.parse(f"{least - 1}flops"), probe=4)
    assert made == [], "all of these runs were there"


def test_minutes(go: Callable[..., LiveSelection], made: Made) -> None:
    """A round of two takes 6 s and a fiftieth of its rows; four rounds are paid, the fifth not."""
    spent = sum(2 * (3 + size / 100) for size in SIZES[:4])
    found = go(budget=Budget.parse(f"{spent + 7.2}s"))
    assert found.candidates[0].sizes == SIZES[:4]
    assert found.stop == f"the budget {spent + 7.2}s does not pay for the next size, 64"
    assert found.seconds == pytest.approx(spent)


def test_too_small_a_budget_keeps_the_runs(
    go: Callable[..., LiveSelection], made: Made, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"no ranking yet .* blend needs 3 sizes .* has 2"):
        go(budget=Budget.parse("14s"))
    assert len(read_records(tmp_path)) == len(made) == 4
    made.clear()
    assert go(budget=Budget.parse("1h")).share == 1 / 4 and len(made) == 6


def kinked(job: SubsetJob) -> float:
    """A line in ln L over ln D down to 16 rows, and off it below; the wide one earlier."""
    edge = 16 if job.model.endswith("wide") else 8
    line = 2.0 * max(job.size, 1) ** -0.3 * (1 + 0.001 * (job.size % 3))
    return line if job.size >= edge else 0.7 * line


def test_algorithm_1(
    go: Callable[..., LiveSelection], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the largest size down, every model until a loss leaves its line."""
    original = measure.run

    def run(job: SubsetJob, keep: Path | None = None) -> tuple[RunRecord, Kernel | None]:
        record, kernel = original(job, keep)
        return replace(record, dev_loss=kinked(job)), kernel

    monkeypatch.setattr(measure, "run", run)
    sizes = (3, 4, 8, 16, 32, 64)
    found = go(sizes=sizes, order="algorithm1", method="ats", tau=5.0)
    assert [size for name, size in made if name == "wide"] == [64, 32, 16, 8]
    assert [size for name, size in made if name == "narrow"] == [64, 32, 16, 8, 4]
    assert found.candidates[1].stop.startswith("the loss at 8 rows left the line of the 3 larger")
    assert found.candidates[0].stop.startswith("the loss at 4 rows left the line of the 4 larger")
    assert found.stop == "every model was stopped"
    for one in found.ranking:  # the line of the sizes accepted, by numpy
        kept = np.array([s for s in sizes if s >= (16 if one.model.endswith("wide") else 8)])
        losses = [kinked(_Job(one.model, int(size))) for size in kept]
        slope, level = np.polyfit(np.log(kept), np.log(losses), 1)
        assert one.predicted == pytest.approx(np.exp(level + slope * np.log(256)))
    made.clear()
    with pytest.warns(FutureWarning, match="'halving' is now called 'algorithm1'"):
        patient = go(sizes=sizes, order="halving", method="ats", tau=1e9)
    assert patient.order == "algorithm1" and len(made) == 3
    assert patient.stop == "every planned size was run"


class _Job:
    def __init__(self, model: str, size: int) -> None:
        self.model, self.size = model, size


def test_a_model_that_diverges_is_left_out(
    go: Callable[..., LiveSelection], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = measure.run

    def run(job: SubsetJob, keep: Path | None = None) -> tuple[RunRecord, Kernel | None]:
        record, kernel = original(job, keep)
        if job.model.endswith("wide") and job.size == 8:
            return replace(record, dev_loss=None, kernel=None, error="not finite"), None
        return record, kernel

    monkeypatch.setattr(measure, "run", run)
    found = go()
    assert found.candidates[1].stop == "failed at 8 rows: not finite"
    assert found.candidates[1].sizes == (4, 8)
    assert [Path(one.model).name for one in found.ranking] == ["narrow"]
    made.clear()
    assert go() == found and made == [], "a failure is a result, too"


def test_two_selections_do_not_write_to_one_folder(
    settings: MakeSettings, made: Made, tmp_path: Path
) -> None:
    from jachess_ext.live_selection import SelectionFolder

    given: LiveSettings = settings(sizes=SIZES)
    with SelectionFolder(tmp_path).locked(), pytest.raises(DataError, match="is in use by another"):
        select_live(given, tmp_path)
