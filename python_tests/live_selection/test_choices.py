"""Promotion, learning rates, seeds, screening, other scores: on runs whose losses are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jachess_ext.live_selection import Kernel, RunRecord, measure
from jachess_ext.live_selection.devices import use_device
from jachess_ext.live_selection.engine import select_live
from jachess_ext.live_selection.jobs import SubsetJob
from jachess_ext.live_selection.result import LiveSelection
from jachess_ext.tasks.examples import DataError

from .conftest import MakeSettings, save_model

SIZES = (4, 8, 16)
BASE = {"a": 0.4, "b": 0.3, "c": 0.5, "d": 0.2}
Go = Callable[..., LiveSelection]
Loss = Callable[[SubsetJob], float]


def name_of(job: SubsetJob) -> str:
    return Path(job.model).name


class Runs:
    """Runs made, and the loss that each is given."""

    def __init__(self) -> None:
        self.made: list[SubsetJob] = []
        self.loss: Loss = lambda job: BASE[name_of(job)] + 1 / (job.size + 1)

    def run(self, job: SubsetJob, keep: Path | None = None) -> tuple[RunRecord, Kernel | None]:
        self.made.append(job)
        loss = self.loss(job)
        record = RunRecord(
            run=job.name,
            model=job.model,
            parameters=100,
            size=job.size,
            epochs=1.0,
            steps=job.size,
            seed=job.seed,
            learning_rate=job.recipe.learning_rate,
            time=float(job.size),
            tokens=8 * job.size,
            metric="accuracy",
            dev_loss=loss,
            scores={"accuracy": 0.1 + loss / 2},
            training_flops=1000.0 * job.size,
            judging_flops=10.0,
            dev_rows=40,
            features={"logme": -BASE[name_of(job)]} if len(job.features) else None,
            features_flops=7.0 if len(job.features) else 0.0,
        )
        return record, None

    def at(self, size: int) -> list[str]:
        return [name_of(job) for job in self.made if job.size == size]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("four")
    return tuple(str(save_model(folder / name, 8, seed)) for seed, name in enumerate(BASE))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setattr(measure, "run", found.run)
    return found


@pytest.fixture
def go(settings: MakeSettings, four: tuple[str, ...], tmp_path: Path) -> Go:
    def select(**given: object) -> LiveSelection:
        chosen = {"models": four, "sizes": SIZES, "method": "subtuning"} | given
        return select_live(settings(**chosen), tmp_path)

    return select


def test_only_the_best_half_is_promoted(go: Go, runs: Runs) -> None:
    found = go(order="promotion")
    assert runs.at(4) == ["a", "b", "c", "d"] and runs.at(8) == runs.at(16) == ["b", "d"]
    stops = {Path(one.model).name: one.stop for one in found.candidates}
    assert stops["a"] == "not promoted beyond 4 rows: 3 of 4 by its forecast"
    assert stops["c"] == "not promoted beyond 4 rows: 4 of 4 by its forecast"
    assert found.best.endswith("d")
    assert found.flops.spent == sum(1000 * job.size + 10 for job in runs.made)


def test_the_best_learning_rate_counts_and_all_are_charged(go: Go, runs: Runs) -> None:
    """The best rate is .02, but of model b .01."""

    def loss(job: SubsetJob) -> float:
        best = 0.01 if name_of(job) == "b" else 0.02
        return BASE[name_of(job)] + 10 * abs(job.recipe.learning_rate - best) + 1 / job.size

    runs.loss = loss
    found = go(rates=(0.01, 0.02, 0.09))
    tried = {size: {job.recipe.lr for job in runs.made if job.size == size} for size in SIZES}
    assert [len(runs.at(size)) for size in SIZES] == [12, 8, 4], "three, two, one of each"
    assert tried[8] == {0.01, 0.02} and tried[16] == {0.01, 0.02}
    rates = {Path(one.model).name: one.rate for one in found.candidates}
    assert rates == {"a": 0.02, "b": 0.01, "c": 0.02, "d": 0.02}
    by = {Path(one.model).name: one.predicted for one in found.ranking}
    assert by == pytest.approx({name: base + 1 / 16 for name, base in BASE.items()})
    assert found.flops.training == 1000 * (12 * 4 + 8 * 8 + 4 * 16)


def test_more_seeds_only_where_the_ranking_is_open(go: Go, runs: Runs) -> None:
    go(method="blend", seeds=3)
    assert {job.seed for job in runs.made if job.size < 16} == {0}, "no forecast yet"
    clear = len(runs.made)
    runs.made.clear()
    runs.loss = lambda job: 0.5 + 1 / job.size + 0.01 * job.seed + 0.001 * BASE[name_of(job)]
    found = go(method="blend", seeds=3, data_seed=1)
    assert sorted({job.seed for job in runs.made if job.size == 16}) == [0, 1, 2]
    assert len(runs.made) > clear
    last = {one.model: one for one in found.predictions["subtuning"]}
    rivals = {job.model for job in runs.made if job.seed == 2}
    for model in rivals:  # the mean of the three seeds
        expected = 0.5 + 1 / 16 + 0.01 + 0.001 * BASE[Path(model).name]
        assert last[model].predicted == pytest.approx(expected)


def test_screening_trains_only_the_best_by_features(go: Go, runs: Runs) -> None:
    found = go(screen=0.5)
    assert runs.at(0) == ["a", "b", "c", "d"] and runs.at(4) == runs.at(16) == ["b", "d"]
    assert found.candidates[0].stop == "screened out: 3 of 4 by logme, untrained"
    assert [Path(one.model).name for one in found.ranking] == ["d", "b"]
    assert found.flops.features == 4 * 7
    assert [Path(one.model).name for one in found.predictions["logme"]] == ["d", "b", "a", "c"]


def test_features_alone_train_nothing(go: Go, runs: Runs) -> None:
    found = go(method="logme")
    assert {job.size for job in runs.made} == {0} and found.best.endswith("d")
    assert found.flops.training == 4 * 0 and found.flops.features == 4 * 7


def test_another_score_can_rank(go: Go, runs: Runs) -> None:
    assert go().best.endswith("d"), "the lowest loss"
    found = go(rank_by="accuracy")
    assert found.best.endswith("c"), "the highest accuracy"
    assert found.ranking[0].predicted == pytest.approx(1 - (0.1 + (0.5 + 1 / 17) / 2))


def test_a_model_that_does_not_load_is_left_out(go: Go, runs: Runs, four: tuple[str, ...]) -> None:
    found = go(models=(*four[:2], "/nowhere/model"))
    assert [Path(one.model).name for one in found.ranking] == ["b", "a"]
    assert found.candidates[2].sizes == () and "/nowhere/model" in found.candidates[2].stop
    with pytest.raises(DataError, match="1 of 2 models can be used"):
        go(models=(four[0], "/nowhere/model"))


@pytest.mark.parametrize(
    ("name", "words"), [("tpu", "expected cpu, cuda or cuda:N"), ("cuda:99", "is not there")]
)
def test_devices_that_are_not_there(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        use_device(name)
