"""`select_live` and `jachess select-live`: what is decided and refused, kept, resumed, shown."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

from jachess_ext.lab.cli import main
from jachess_ext.lab.live import LiveSelection, choice, read_selection, report, select_live, trial
from jachess_ext.lab.live.plan import (
    make_plan,
    smallest_subset,
    stratified_order,
    subset_sizes,
)
from jachess_ext.lab.live.trial import RunRecord, Trial
from jachess_ext.lab.workbench.settings import Columns, Recipe
from jachess_ext.lab.workbench.tasks import Examples, Task
from jachess_ext.scaling import Ask, Selection
from jachess_ext.scaling.methods import METHODS

from .conftest import Settings
from .tiny import killed, save_model, write_rows

SIZES = (4, 8, 16)


def untimed(selection: LiveSelection) -> list[RunRecord]:
    return [replace(record, seconds=0.0) for record in selection.records]


# Before any training ----------------------------------------------------------------------------


def test_sizes_are_quarters_and_three_where_they_fit(settings: Settings) -> None:
    plan = make_plan(**settings())  # a quarter of 256 rows; 16 and more make sense
    assert plan.search.sizes == plan.search.rounds == (16, 32, 64) and plan.search.target == 256
    assert make_plan(**settings(method="rectified")).search.rounds == (0, 16, 32, 64)
    assert make_plan(**settings(budget=1 / 2)).search.sizes == (16, 42, 112), "a third more"
    algorithm_1 = settings(strategy="accept-then-stop", method="ats", budget=1 / 2)
    assert make_plan(**algorithm_1).search.rounds == (128, 64, 32, 16)
    given = settings(budget=1.0, target=5000)
    assert make_plan(**given).search.sizes == (16, 64, 256), "no more rows than there are"


@pytest.mark.parametrize("target", [179, 200, 713, 714, 2000, 12_000])
def test_sizes_of_small_files(target: int) -> None:
    """Three subsets: of an eighth where they fit, else 1, 2, 4 times what eight steps take."""
    sizes = subset_sizes(target, target, Recipe())
    if target < 714:
        assert sizes == (17, 34, 68) and sum(sizes) <= 2 / 3 * target
    else:
        assert len(sizes) >= 3 and sizes[0] >= 17 and sum(sizes) <= target / 6
    with pytest.raises(ValueError, match="60 rows are too few to forecast from subsets of 17 rows"):
        subset_sizes(60, target, Recipe())


@pytest.mark.parametrize("rows", [67, 68, 300, 1700, 40_000])
def test_sizes_stay_within_a_budget(rows: int) -> None:
    """A half of so many rows twice over: 1, 2, 4 times the smallest where quarters do not fit."""
    if rows < 68:
        with pytest.raises(ValueError, match=r"of 134 rows is 67; three subsets of 17 .* need 68"):
            subset_sizes(2 * rows, 2 * rows, Recipe(), 1 / 2)
        return
    sizes = subset_sizes(2 * rows, 2 * rows, Recipe(), 1 / 2)
    ratios = np.array(sizes[1:]) / np.array(sizes[:-1])
    assert len(sizes) >= 3 and 17 <= sizes[0] < 4 * 17 and sizes[-1] <= rows
    assert (ratios > 1.9).all() and (ratios < 4.1).all()
    assert sizes == (17, 34, 68) or sum(sizes) <= 4 / 3 * rows


def test_the_advice_for_too_few_rows_can_be_followed(settings: Settings, tmp_path: Path) -> None:
    few = {"train": write_rows(tmp_path / "few.csv", 167, 3), "budget": None}
    given = settings(**few)
    assert smallest_subset(given["settings"].recipe) * 7 > 167 * 2 / 3
    with pytest.raises(ValueError, match="167 rows are too few to forecast from") as caught:
        make_plan(**given)
    method, sizes = re.findall(r"--method (\w+) --sizes (\d+) ", str(caught.value))[0]
    plan = make_plan(**settings(**few, method=method, sizes=[int(sizes)]))
    assert plan.search.rounds == (166,)
    plan = make_plan(**settings(**few, method="zeroshot"))
    assert plan.search.rounds == (0,), "nothing is trained"
    more = settings(train=write_rows(tmp_path / "more.csv", 168, 3), budget=None)
    assert make_plan(**more).search.rounds == (16, 32, 64)


@pytest.mark.parametrize(
    ("epochs", "batch", "accumulation", "rows"),
    [(1.0, 2, 1, 16), (5.0, 16, 1, 17), (1.0, 16, 1, 113), (5.0, 16, 2, 33), (8.0, 64, 1, 16)],
)
def test_the_smallest_subset_gives_eight_steps(
    epochs: float, batch: int, accumulation: int, rows: int
) -> None:
    recipe = Recipe(epochs=epochs, batch_size=batch, gradient_accumulation=accumulation)
    assert smallest_subset(recipe) == rows
    if rows > 16:
        steps = [-(-n // (batch * accumulation)) * epochs for n in (rows - 1, rows)]
        assert steps[0] < 8 <= steps[1]


def test_dev_rows_are_as_many_as_judging_may_cost(settings: Settings, tmp_path: Path) -> None:
    dev = write_rows(tmp_path / "dev.csv", 900, 5)

    def judged(epochs: float = 1.0, **given: Any) -> Task:
        recipe = replace(settings()["settings"].recipe, epochs=epochs)
        return make_plan(**settings(dev=dev, recipe=recipe, **given)).task

    few = judged()
    assert len(few.dev) == 80, "always"
    sixth = 10 * 3 * 112 // (3 * 6)
    assert len(judged(10.0).dev) == sixth, "a sixth of training on 16, 32, 64 rows"
    assert len(judged(20.0).dev) == 200, "at least, where a sixth allows it"
    assert len(judged(100.0).dev) == 384, "0.5 % of 256 rows, 100 epochs, forward and back"
    texts = iter(line.rsplit(",", 1)[0] for line in dev.read_text().splitlines()[1:])
    assert len(judged(dev_size=10_000).dev) == 900
    assert all(text in texts for text in few.dev.texts), "in order"
    head, *lines = dev.read_text().splitlines()
    rows = [line.rsplit(",", 1) for line in lines]
    dev = tmp_path / "long.csv"
    dev.write_text("\n".join([head, *(f"{text} {text},{y}" for text, y in rows)]) + "\n")
    assert len(judged(100.0).dev) == 384 * 8 // 14, "two tokens of them mark begin and end"


def test_subsets_are_nested_and_the_same_for_all_models(settings: Settings, tmp_path: Path) -> None:
    plan = make_plan(**settings())
    first, second = plan.search.models
    small, large, other = (
        plan.trial(Ask(*run)) for run in ((first, 16), (first, 64), (second, 64))
    )
    assert large.task.train.texts[:16] == small.task.train.texts
    assert other.task == large.task and other.name != large.name
    rows = make_plan(**settings(data_seed=1)).task.train.texts
    assert rows != plan.task.train.texts and sorted(rows) == sorted(plan.task.train.texts)


def test_subsets_have_the_classes_in_proportion() -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    rows = Examples([str(i) for i in range(100)], None, labels)
    order = stratified_order(rows, 3, is_regression=False)
    assert sorted(order) == list(range(100)) and order != stratified_order(
        rows, 4, is_regression=False
    )
    for count in range(1, 101):
        shares = np.bincount([labels[i] for i in order[:count]], minlength=3)
        assert np.abs(shares - count * np.array([0.6, 0.3, 0.1])).max() <= 1.0
    ones = [i for i in order if labels[i] == 1]
    assert ones != sorted(ones), "within a class the order is drawn"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sizes": (16, 32, 300)}, "the size 300 is above the data: there are 256 training rows"),
    ({"sizes": (16, 32, 65)}, "share of the target's 256 rows; the size 65 is above it"),
    ({"sizes": (16, 64, 32)}, "sizes must increase strictly"),
    ({"budget": 1.0}, "nothing would be left to predict"),
    ({"budget": 2.0}, "the budget is 2, a share"),
    ({"budget": 1 / 100}, "of 256 rows is 2; three subsets of 16 rows and more need 64"),
    ({"flops": -1.0}, "budget is -1.0; expected a positive number"),
    ({"method": "oracle"}, "method is 'oracle'"),
    ({"rank_by": "mae"}, "rank_by is 'mae'; expected one of loss, accuracy, f1"),
    ({"dev_size": 0}, "dev_size is 0"),
    ({"target": 0}, "target is 0"),
    ({"models": ("a",)}, "1 model to choose from"),
    (
        {"models": ("/nowhere/a", "/nowhere/b")},
        "0 of 2 models can be used, .*'/nowhere/a' could not be loaded: there is no such folder",
    ),
    ({"columns": Columns(text="words")}, "has no column 'words'"),
    ({"columns": Columns(regression=True)}, "has the label 'bad'; expected a number"),
    (
        {"recipe": Recipe(epochs=1, batch_size=16), "sizes": (16, 32, 64)},
        "is trained on in one step, whose learning rate",
    ),
]


@pytest.mark.parametrize(("given", "words"), BAD)
def test_refused_before_any_training(
    settings: Settings,
    given: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("something was trained"))
    with pytest.raises(ValueError, match=words):
        select_live(out=tmp_path / "out", **settings(**given))
    assert not (tmp_path / "out").exists()


def test_rows_that_cannot_be_used(settings: Settings, tmp_path: Path) -> None:
    train = settings()["task"].split(":")[0]
    with pytest.raises(ValueError, match="the dev rows are the training rows"):
        make_plan(**settings(dev=shutil.copy(train, tmp_path / "copy.csv")))
    path = tmp_path / "one.csv"
    path.write_text("text,label\n" + "the film,good\n" * 64)
    with pytest.raises(ValueError, match="needs at least two classes"):
        make_plan(**settings(train=path))
    path.write_text("text,label\n" + "the film,good\n" * 255 + "the book,bad\n")
    with pytest.raises(ValueError, match="the smallest subset, 16 rows, holds one class only"):
        make_plan(**settings(train=path))


def test_a_model_whose_files_changed_is_another(
    settings: Settings, models: tuple[str, str], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(models[0], tmp_path / "copy"))
    given = settings(models=(models[0], str(copy)))
    before = make_plan(**given).candidates
    assert before[0].version == before[1].version
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert make_plan(**given).candidates[1].version != before[1].version


# Runs whose results are given -------------------------------------------------------------------


class Runs:
    """Runs done, and what each is said to give."""

    def __init__(self) -> None:
        self.jobs: list[Trial] = []

    def loss(self, job: Trial) -> float:
        return (0.3 if job.model.endswith("wide") else 0.4) + 1 / (job.size + 1)

    def run(self, job: Trial) -> RunRecord:
        self.jobs.append(job)
        loss = self.loss(job)
        return RunRecord(
            job.name,
            job.model,
            job.size,
            job.seed,
            parameters=100,
            steps=job.size,
            dev_loss=loss,
            scores={"accuracy": 0.1 + loss / 2},
            dev_rows=40,
            training_flops=1000.0 * job.size,
            judging_flops=10.0,
            seconds=3.0,
        )

    @property
    def done(self) -> list[tuple[str, int]]:
        return [(Path(job.model).name, job.size) for job in self.jobs]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(choice, "run", lambda job: runs.run(job))
    return runs


@pytest.fixture
def go(settings: Settings, tmp_path: Path) -> Callable[..., LiveSelection]:
    return lambda **given: select_live(out=tmp_path, **settings(**{"sizes": SIZES} | given))


Go = Callable[..., LiveSelection]
ALL = [(name, size) for size in SIZES for name in ("narrow", "wide")]


def test_what_a_selection_holds(go: Go, runs: Runs, tmp_path: Path) -> None:
    selection = go()
    assert runs.done == ALL and selection.best.endswith("wide")
    assert selection.share == 1 / 16 and selection.seconds == 6 * 3.0
    with pytest.raises(ValueError, match="rectified needs 4 sizes"):
        selection.search.selection("rectified")
    flops = selection.flops
    assert flops["training"] == 1000 * sum(size for _, size in ALL) and flops["judging"] == 60
    assert flops["spent"] == flops["training"] + 60
    costs = selection.search.costs
    assert costs is not None
    full = sum(once + 256 * row for once, row in costs.values())
    assert flops["full_tuning"] == full
    frame = selection.to_frame()
    assert frame[["model", "size"]].values.tolist() == [
        [record.model, record.size] for record in selection.records
    ]
    assert (frame.training_flops + frame.judging_flops).sum() == flops["spent"]
    assert frame.score.equals(frame.dev_loss)
    assert read_selection(tmp_path) == selection
    content = json.loads((tmp_path / "selection.json").read_text())
    assert content["best"] == selection.best == content["ranking"][0]["name"]
    assert [row["name"] for row in content["ranking"]] == selection.search.selection().ranking


def test_finished_runs_are_not_repeated(go: Go, runs: Runs, tmp_path: Path) -> None:
    first = go()
    before = (tmp_path / "records.jsonl").read_bytes()
    runs.jobs.clear()
    assert go() == first and runs.done == []
    assert (tmp_path / "records.jsonl").read_bytes() == before
    victim = next((tmp_path / "runs").glob("*wide-16-*.json"))
    victim.write_text(victim.read_text()[:100])
    with pytest.warns(RuntimeWarning, match="only this run is repeated"):
        assert go() == first
    assert runs.done == [("wide", 16)] and (tmp_path / "records.jsonl").read_bytes() == before
    runs.jobs.clear()
    go(sizes=(*SIZES[:-1], 12))
    assert runs.done == [("narrow", 12), ("wide", 12)]
    runs.jobs.clear()
    go(seed=1)
    assert len(runs.done) == 6, "another seed is another run"


def test_who_is_dropped_is_trained_no_further(
    go: Go, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runs, "loss", lambda job: job.size ** (-0.9 if job.model.endswith("wide") else -0.02)
    )
    given = {"sizes": (4, 8, 16, 32, 64), "strategy": "dropping"}
    first = go(**given)
    sizes = {name: [size for n, size in runs.done if n == name] for name in ("narrow", "wide")}
    assert sizes["wide"] == sizes["narrow"] and max(sizes["wide"]) < 64
    assert first.search.stop is not None and first.search.stop.endswith("wide alone is left")
    (dropped,) = first.search.stops
    assert dropped.endswith("narrow") and first.best.endswith("wide")
    assert (
        first.stops[dropped] == first.search.stops[dropped]
        and "as number 2" in first.stops[dropped]
    )
    assert read_selection(tmp_path) == first
    content = json.loads((tmp_path / "selection.json").read_text())
    assert [row["rank"] for row in content["ranking"]] == [1, None]
    report.write_live_selection(tmp_path / "page.html", first)
    assert "number 2 of 2" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "selection.json").unlink()
    next((tmp_path / "runs").glob("*wide-8-*.json")).unlink()
    done, runs.jobs = len(runs.jobs), []
    assert go(**given) == first and runs.done == [("wide", 8)] and done == 2 * len(sizes["wide"])


def test_accept_then_stop_begins_at_the_budget(go: Go, runs: Runs, tmp_path: Path) -> None:
    runs.loss = lambda job: job.size**-0.3 * (1 + 0.001 * (job.size % 3)) * (job.size < 16 or 2)  # type: ignore[method-assign]
    selection = go(sizes=(4, 8, 16, 32, 64), strategy="accept-then-stop", method="ats")
    order = (64, 32, 16, 8)
    assert runs.done == [(name, size) for size in order for name in ("narrow", "wide")]
    assert all("at 8 rows deviates" in why for why in selection.stops.values())
    assert read_selection(tmp_path) == selection


def test_too_small_a_budget_keeps_the_runs(go: Go, runs: Runs, settings: Settings) -> None:
    plan = make_plan(**settings(sizes=SIZES))
    first = sum(once + 4 * row for once, row in (plan.search.costs or {}).values())
    with pytest.raises(ValueError, match=r"no ranking yet .* blend needs 3 sizes .* has 1"):
        go(flops=first + 1)
    assert runs.done == ALL[:2]
    runs.jobs.clear()
    assert go().share == 1 / 16 and runs.done == ALL[2:]


def test_a_model_that_diverges_is_left_out(
    go: Go, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = runs.run

    def run(job: Trial) -> RunRecord:
        bad = job.model.endswith("wide") and job.size == 8
        return replace(original(job), **({"dev_loss": None, "error": "not finite"} if bad else {}))

    monkeypatch.setattr(runs, "run", run)
    selection = go()
    assert list(selection.stops.values())[1] == "failed at 8 rows: not finite"
    assert [Path(name).name for name in selection.search.selection().names] == ["narrow"]
    runs.jobs.clear()
    assert go() == selection and runs.done == [], "a failure is a result, too"


def test_a_lost_run_is_repeated(go: Go, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = runs.run, {"dev_loss": None, "error": "out of memory", "lost": True}

    def run(job: Trial) -> RunRecord:
        return replace(original(job), **lost if job.size == 8 else {})  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "run", run)
    with pytest.raises(ValueError, match="no model could be trained; failed at 8 rows: out of mem"):
        go()
    runs.jobs.clear()
    monkeypatch.setattr(runs, "run", original)
    assert go().share == 1 / 16 and runs.done == ALL[2:]


def test_another_score_can_rank(go: Go, runs: Runs) -> None:
    assert go().best.endswith("wide"), "the lowest loss"
    selection = go(rank_by="accuracy", method="subtuning")
    assert selection.best.endswith("narrow"), "the highest accuracy"
    chosen = selection.search.selection()
    scored = 0.1 + (0.4 + 1 / 17) / 2
    assert chosen.predicted_losses[0] == pytest.approx(1 - scored)
    assert chosen.to_frame().set_index("name").predicted[chosen.names[0]] == pytest.approx(scored)
    runs_of = selection.to_frame().set_index("model").loc[chosen.names[0]]
    assert runs_of.score.iloc[-1] == pytest.approx(scored)
    assert chosen.text().splitlines()[1].split()[:3] == ["model", "accuracy", "of"]


# Real runs --------------------------------------------------------------------------------------


def test_bad_candidates_are_named_and_the_rest_goes_on(
    settings: Settings, models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = save_model(tmp_path / "spoiled", 8, 3)
    weights = BertModel.from_pretrained(spoiled)
    torch.nn.init.constant_(weights.embeddings.word_embeddings.weight, torch.nan)
    weights.save_pretrained(spoiled)
    hungry = str(save_model(tmp_path / "hungry", 8, 4))
    new_model, train = trial.new_model, trial.fine_tune
    current: list[str] = []

    def watched(job: Trial, tokenizer: Any) -> Any:
        current[:] = [job.model]
        return new_model(job, tokenizer)

    def fine_tune(*given: Any, **named: Any) -> Any:
        if current == [hungry]:
            torch.empty(1 << 60)  # what torch raises when memory ends
        return train(*given, **named)

    monkeypatch.setattr(trial, "new_model", watched)
    monkeypatch.setattr(trial, "fine_tune", fine_tune)
    named = (str(spoiled), models[0], "/nowhere", hungry, models[1])
    given = settings(models=named, sizes=(8, 16, 32))
    selection = select_live(out=tmp_path / "out", **given)

    assert set(selection.search.selection().names) == set(models)
    stops = selection.stops
    assert set(stops) == set(named)
    assert stops[str(spoiled)].startswith("failed at 8 rows:") and "finite" in stops[str(spoiled)]
    assert "/nowhere" in stops["/nowhere"]
    assert stops[hungry].startswith("failed at 8 rows: out of memory (")
    alone = select_live(out=tmp_path / "alone", **settings(sizes=(8, 16, 32)))
    expected, found = (s.search.selection().to_frame() for s in (alone, selection))
    assert found.equals(expected), "the others are as without them"


METHODS_TO_PAGES = [
    pytest.param(name, marks=[] if name == "blend" else pytest.mark.slow) for name in METHODS
]
Command = Callable[..., list[str]]
Whole = tuple[Path, LiveSelection]


@pytest.fixture(scope="module")
def command(models: tuple[str, str], files: tuple[Path, Path]) -> Command:
    """The command line of a small selection; arguments are added."""
    words = f"select-live --task {files[0]}:{files[1]} --sizes 8 16 32 64 --budget 0.25"
    how = "--method lensllm --recipe.epochs 2 --recipe.lr 5e-3"
    how += " --recipe.batch-size 8 --recipe.max-length 16"
    return lambda *more: [*words.split(), "--models", *models, *how.split(), *more]


@pytest.fixture(scope="module")
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An undisturbed selection: its folder and its result."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(command("--out", str(out))) == 0
    return out, read_selection(out)


def same(folder: Path, whole: Whole) -> bool:
    """Whether a folder holds what an undisturbed selection holds."""
    selection = read_selection(folder)
    records = untimed(selection) == untimed(whole[1])
    return records and selection.search == whole[1].search


def test_a_history_reaches_the_search(
    settings: Settings, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier.csv"
    earlier.write_text("model,160,320,640\na,0.9,0.8,0.7\nb,0.9,0.7,0.6\n")
    search = make_plan(**settings(history=(earlier,))).search
    assert [table["names"] for table in search.state()["history"]] == [["a", "b"]]
    earlier.write_text("model,160,320,640\na,0.9,x,0.7\nb,0.9,0.7,0.6\n")
    assert main(command("--history", str(tmp_path), "--out", str(tmp_path / "out"))) != 0
    assert f"the history's {earlier}" in capsys.readouterr().err


def test_from_files_to_a_ranking(whole: Whole) -> None:
    out, selection = whole
    records = selection.records
    assert [record.size for record in records] == [s for s in (0, 8, 16, 32, 64) for _ in "ab"]
    assert selection.search.selection().has_intervals
    flops = selection.flops
    assert 0 < flops["training"] + flops["judging"] < flops["full_tuning"]
    assert all(record.steps == 2 * record.size / 8 for record in records)
    last = {record.model: record.dev_loss for record in records if record.size == 64}
    for row in selection.search.selection("subtuning").to_frame().itertuples():
        assert row.predicted == last[row.name]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert str(selection.search.stop) in page
    assert all(Path(name).name in page for name in last)


@pytest.mark.parametrize("has_signal", [False, True])
def test_models_that_nothing_tells_apart_are_told_first(
    command: Command,
    whole: Whole,
    has_signal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Selection, "has_signal", property(lambda self: has_signal))
    assert main(command("--out", str(whole[0]))) == 0
    first = capsys.readouterr().out.splitlines()[0]
    sentence = "No model is known to be better than another on 256 examples."
    assert (first == sentence) == (sentence in (whole[0] / "report.html").read_text())
    assert (first == sentence) != has_signal


@pytest.mark.parametrize("method", METHODS_TO_PAGES)
def test_every_method_runs_to_its_page(
    command: Command,
    whole: Whole,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0], out, ignore=shutil.ignore_patterns("*.html", "selection.json"))
    arguments = command("--method", method, "--out", str(out))
    assert main(arguments) == 0
    selection, page = read_selection(out), out / "report.html"
    ranking = selection.search.selection().ranking
    assert selection.search.method == method and sorted(ranking) == sorted(selection.search.models)
    assert f"Ranking by {method}." in page.read_text(encoding="utf-8")
    json.loads((out / "selection.json").read_text(), parse_constant=pytest.fail)
    printed = capsys.readouterr().out
    assert printed.index(Path(ranking[0]).name) < printed.index(Path(ranking[1]).name)
    assert "nan" not in printed.lower() and "% of training all" in printed
    assert "stopped: " in printed
    page.unlink()
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("a finished run was repeated"))
    assert main(arguments) == 0 and read_selection(out) == selection and page.exists()
    assert capsys.readouterr().out == printed


def test_without_matplotlib_the_result_stays(
    command: Command,
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shutil.copytree(whole[0], tmp_path / "out", ignore=shutil.ignore_patterns("*.html"))
    page = tmp_path / "out" / "report.html"
    assert main(command("--out", str(tmp_path / "out"))) == 0
    shown = capsys.readouterr()
    assert "no report: matplotlib is needed" in shown.err and "Result:" in shown.out
    assert not page.exists()


def test_killed_selections_go_on(command: Command, whole: Whole, tmp_path: Path) -> None:
    """Kills with -9 at random moments; no finished run is repeated, and the end is the same."""
    out = tmp_path / "killed"
    draws, kills = random.Random(0), 0
    ended: dict[str, float] = {}
    for further in range(2):  # runs, and not seconds: those hang on what else the machine does
        runs, wait = len(ended) + further, draws.uniform(0, 0.3)
        kills += killed(command("--out", str(out)), out, runs, wait)
        now = {path.name: path.stat().st_mtime for path in out.glob("runs/*.json")}
        assert ended.items() <= now.items(), "a finished run was repeated"
        ended = now
    assert kills, "every selection ended before it was killed"
    assert main(command("--out", str(out))) == 0
    assert same(out, whole) and not list(out.rglob("*.broken"))


@pytest.mark.slow
def test_processes_do_not_change_the_result(command: Command, whole: Whole, tmp_path: Path) -> None:
    assert main(command("--out", str(tmp_path), "--processes", "2")) == 0
    assert same(tmp_path, whole)


def test_the_winner_is_kept_and_is_what_the_record_says(
    models: tuple[str, str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = f"--task {files[0]}:{files[1]} --sizes 16 32 --target 64 --budget 0.5"
    how = "--method subtuning --recipe.lora --recipe.gradient-accumulation 2"
    how += " --recipe.gradient-checkpointing --recipe.epochs 1 --recipe.batch-size 4"
    more = f"--recipe.max-length 16 --recipe.lr 2e-2 --keep-winner --out {out}"
    arguments = ["select-live", "--models", *models, *f"{words} {how} {more}".split()]
    assert main(arguments) == 0
    selection = read_selection(out)
    assert {(record.size, record.steps) for record in selection.records} == {(16, 2), (32, 4)}
    winner = selection.winner
    assert winner is not None and (winner.model, winner.size) == (selection.best, 64)
    assert winner.steps == 8 and winner.error is None
    assert (out / "winner" / "adapter_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(out / "winner")
    model = AutoModelForSequenceClassification.from_pretrained(out / "winner").eval()
    rows = [line.rsplit(",", 1) for line in files[1].read_text().splitlines()[1:]]
    labels = torch.tensor([["bad", "good"].index(label) for _, label in rows])
    with torch.no_grad():
        batch = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        logits = model(**batch).logits.double()
    loss = float(torch.nn.functional.cross_entropy(logits, labels))
    assert winner.dev_loss == pytest.approx(loss, rel=1e-5)
    shutil.rmtree(out / "winner")
    assert main(arguments) == 0
    assert (out / "winner" / "adapter_config.json").exists(), "its record alone is not enough"


BAD_COMMANDS = [
    (["--budget", "0.03"], "the size 64 is above it"),
    (["--strategy", "accept-then-stop"], "chooses by the method 'ats', not 'lensllm'"),
    (["--target", "many"], "'many' is no number of training examples"),
    (["--processes", "0"], "--processes is 0; expected at least 1"),
    (["--task", "/nowhere"], "unknown task '/nowhere'"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_COMMANDS)
def test_bad_input_is_one_sentence_and_no_folder(
    command: Command,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(command(*arguments, "--out", str(tmp_path / "out"))) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert words in last and last.startswith("jachess select-live: ")
    assert not (tmp_path / "out").exists()


BAD_OPTIONS = [
    (["--budget", "much"], "--budget"),
    (["--recipe.lr", "-1"], "lr is -1"),
    (["--recipe.epoch", "3"], "--recipe.epochs"),
    (["--recipe", "epochs", "3"], "--recipe"),
    (["--columns", "text", "words"], "--columns"),
    (["--optimiser", "none"], "--optimiser"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_OPTIONS)
def test_bad_options_exit_with_two(
    command: Command, arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command(*arguments))
    error = capfd.readouterr().err
    assert caught.value.code == 2 and words in error and "Traceback" not in error


def test_missing_libraries_are_sentences_before_any_training(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("something was trained"))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(command("--processes", "local")) == 2
    error = capfd.readouterr().err
    assert "ray is needed" in error and "pip install ray" in error
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert main(command()) == 2
    assert "needs scipy, which is not installed: pip install scipy" in capfd.readouterr().err


def change_metric(folder: Path, other: str | None) -> None:
    content = json.loads((folder / "selection.json").read_text())
    assert content["state"]["search"]["metric"] == "loss"
    content["state"]["search"]["metric"] = other
    (folder / "selection.json").write_text(json.dumps(content))


CHANGES: list[Callable[[Path], Any]] = [
    lambda folder: change_metric(folder, None),
    lambda folder: change_metric(folder, "bpb"),
    lambda folder: (folder / "selection.json").unlink(),
    lambda folder: (folder / "selection.json").write_text("{}"),
    lambda folder: (folder / "selection.json").write_text('{"state": {"search": {}}}'),
    lambda folder: (folder / "records.jsonl").write_text('{"run": "a"}\n'),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_is_not_whole_is_a_sentence(
    whole: Whole, tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    shutil.copytree(whole[0], tmp_path / "copy")
    change(tmp_path / "copy")
    with pytest.raises(ValueError, match=r"selection\.json|state of a search|records"):
        read_selection(tmp_path / "copy")
