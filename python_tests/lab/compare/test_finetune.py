"""Grids: what is run, what is chosen, and that a killed grid ends as one that was not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from jachess_ext._io import DataError, from_json, write_json
from jachess_ext.lab.compare import finetune
from jachess_ext.lab.compare.finetune import Job, choose, final_jobs, load, run_grid, tuning_jobs
from jachess_ext.lab.compare.records import RESULTS, Figures, RunRecord, read_records
from jachess_ext.lab.compare.settings import Grid
from jachess_ext.training import METHODS
from python_tests import processes

from .conftest import CONDITIONS, RECIPE, MakeGrid
from .records import record as made_by_hand

TUNING = {"strength": (0.01, 0.1), "unlab_lr_ratio": (0.5,), "validation": 0.25, "seeds": (7,)}


def test_a_grid_from_start_to_end(grid: MakeGrid, sentiment: Path, tmp_path: Path) -> None:
    made = grid(
        methods=("none", "jachess-train", "jachess-unlab"),
        tuning=TUNING,
        shift={"a": (f"{sentiment}:{sentiment}",)},
        shift_size=32,
    )
    records = run_grid(made, tmp_path)
    kinds = [(r.kind, r.method, r.seed, r.value) for r in records]
    assert kinds[:3] == [
        ("tuning", "jachess-train", 7, 0.01),
        ("tuning", "jachess-train", 7, 0.1),
        ("tuning", "jachess-unlab", 7, 0.5),
    ]
    assert [k[:3] for k in kinds[3:]] == [
        ("final", method, seed) for seed in (0, 1) for method in made.methods
    ]
    chosen = choose(records[:3])["a", "jachess-train"]
    assert {r.value for r in records if r.kind == "final"} == {None, 0.5, chosen}
    by_method = {r.method: r for r in records if r.kind == "final"}
    assert by_method["jachess-train"].settings["strength"] == chosen
    assert by_method["jachess-unlab"].settings["unlab_lr_ratio"] == 0.5
    assert [by_method[method].control for method in made.methods] == [True, False, False]
    last = records[-1]
    assert set(last.corrupted) == {"0.2"} and set(last.noisy) == {"0.0", "1.0"}
    assert last.shift["sentiment"]["score"] == last.score, "the same rows"
    assert len(last.jacobian) == 2 and last.reliability is not None
    assert sum(map(float, last.reliability["counts"])) == 32
    assert read_records(tmp_path) == records
    assert json.loads((tmp_path / "grid.json").read_text())["seeds"] == [0, 1]


def runs_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs made from here on, in order; grows."""
    made: list[str] = []
    original = finetune.run

    def run(job: Job, **options: Any) -> Any:
        made.append(job.name)
        return original(job, **options)

    monkeypatch.setattr(finetune, "run", run)
    return made


def test_finished_runs_are_not_made_again(
    grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"methods": ("none",)}
    run_grid(grid(**plain), tmp_path)
    before = (tmp_path / RESULTS).read_bytes()
    made = runs_made(monkeypatch)
    run_grid(grid(**plain), tmp_path)
    assert made == [] and (tmp_path / RESULTS).read_bytes() == before
    run_grid(grid(seeds=(0, 1, 2), **plain), tmp_path)
    assert len(made) == 1 and "none-s2" in made[0]
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 3
    run_grid(grid(recipe=RECIPE | {"lr": 4e-3}, seeds=(0,), **plain), tmp_path)
    assert len(made) == 2, "another recipe is another run"


def test_models_asked_for_later_are_made(
    grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same records; models that are there, and failed runs, are not made again."""
    made = grid(methods=("none", "sam,rho=1e30"), seeds=(0,))
    records = run_grid(made, tmp_path)
    assert [bool(r.error) for r in records] == [False, True]
    asked = runs_made(monkeypatch)
    whole = [job.name for job in final_jobs(load(made), {}) if job.method == "none"]
    run_grid(made, tmp_path)
    assert asked == []
    assert timeless(run_grid(made, tmp_path, save_models=True)) == timeless(records)
    assert asked == whole
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == sorted(whole)
    run_grid(made, tmp_path, save_models=True)
    assert asked == whole


def test_a_run_does_not_depend_on_those_before_it(grid: MakeGrid, tmp_path: Path) -> None:
    jobs = final_jobs(load(grid(methods=("none", "jachess-unlab"), seeds=(0,))), {})
    together = timeless([finetune.run(job) for job in jobs])
    for job, record in reversed(list(zip(jobs, together, strict=True))):
        assert timeless([finetune.run(job)]) == [record]


def same_results(first: Path, second: Path) -> bool:
    return timeless(read_records(first)) == timeless(read_records(second))


def timeless(records: list[RunRecord]) -> list[RunRecord]:
    """What is the same on every call of a run."""
    return [replace(record, seconds=None) for record in records]


@pytest.mark.slow
def test_ten_kills_at_random_moments(grid: MakeGrid, tmp_path: Path) -> None:
    """Two worker processes under `jachess finetune`, killed with -9, against one undisturbed.

    `test_runs.test_killed_work_goes_on` is of the same code, and fast.
    """
    made = grid(
        methods=("none", "tapt", "sam", "r3f", "jacobian-unlab", "jachess-train"),
        tuning={"strength": (0.01, 0.1), "seeds": (7,)},
        seeds=(0, 1, 2),
    )
    write_json(tmp_path / "given.json", asdict(made))
    command = [
        *(sys.executable, "-m", "jachess_ext", "finetune", "--processes", "2"),
        *("--grid", str(tmp_path / "given.json"), "--out"),
    ]
    draws = random.Random(0)
    for _ in range(10):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with processes.started([*command, tmp_path / "killed"], **quiet):
            time.sleep(draws.uniform(4, 12))
    last = processes.run([*command, tmp_path / "killed"])
    assert last.returncode == 0, last.stderr[-3000:] + last.stdout[-3000:]
    run_grid(made, tmp_path / "whole")
    assert same_results(tmp_path / "killed", tmp_path / "whole")


def test_a_diverged_run_is_recorded_and_the_grid_goes_on(grid: MakeGrid, tmp_path: Path) -> None:
    made = grid(
        recipe={"epochs": 3.0, "batch_size": 8, "lr": 1e30, "max_length": 16},
        seeds=(0,),
        methods=("none", "jachess-train"),
    )
    records = run_grid(made, tmp_path)
    assert len(records) == 2
    for record in records:
        assert record.score is None and record.error is not None
        assert "not finite" in record.error or "non-finite" in record.error


def test_tuning_reads_training_rows_only(grid: MakeGrid) -> None:
    """The judged rows of tuning are training rows that are not trained on; dev is never seen."""
    loaded = load(grid(tuning=TUNING, train_size=24))
    final, tuning = final_jobs(loaded, {})[0], tuning_jobs(loaded)[0]
    rows = list(zip(final.task.train.texts, final.task.train.labels, strict=True))
    trained = list(zip(tuning.task.train.texts, tuning.task.train.labels, strict=True))
    judged = list(zip(tuning.task.dev.texts, tuning.task.dev.labels, strict=True))
    assert (len(trained), len(judged)) == (18, 6)
    assert trained + judged == rows
    assert tuning.conditions.corruption == () and tuning.shift == ()


def record(value: float, score: float | None, brier: float) -> RunRecord:
    return made_by_hand("l2", "a", 0, score, kind="tuning", value=value, brier=brier)


@pytest.mark.parametrize(
    ("records", "value"),
    [
        ([record(0.1, 0.5, 0.2), record(1.0, 0.6, 0.9)], 1.0),
        ([record(0.1, 0.5, 0.3), record(1.0, 0.5, 0.2)], 1.0),
        ([record(1.0, 0.5, 0.2), record(0.1, 0.5, 0.2)], 0.1),
        ([record(1.0, None, 0.2), record(0.1, 0.0, 0.2)], 0.1),
        ([record(1, 0.4, 0), record(1, 0.8, 0), record(2, 0.7, 0), record(2, 0.4, 0)], 1),
    ],
)
def test_choice(records: list[dict], value: float) -> None:
    assert choose(records) == {("a", "l2"): value}


def test_a_value_in_the_methods_text_is_not_tuned(grid: MakeGrid) -> None:
    loaded = load(grid(methods=("jachess-train,strength=0.3", "none", "tapt"), tuning=TUNING))
    assert tuning_jobs(loaded) == []
    assert final_jobs(loaded, {})[0].tuned_method.strength == 0.3


def test_values_for_one_method(grid: MakeGrid) -> None:
    own = TUNING | {"methods": {"l2": [1e-5, 1e-6]}}
    made = grid(methods=("jachess-train", "l2"), tuning=own)
    tried = [(job.method, job.value) for job in tuning_jobs(load(made))]
    assert tried == [("jachess-train", 0.01), ("jachess-train", 0.1), ("l2", 1e-6), ("l2", 1e-5)]
    for methods in (("none",), ("none", "sam")):  # not there; nothing to choose
        with pytest.raises(DataError, match=r"tuning names the method 'sam', .* one of: none"):
            load(grid(methods=methods, tuning={"methods": {"sam": [1.0]}}))


def test_strengths_on_other_scales_are_tried_around_their_default(grid: MakeGrid) -> None:
    """The list is for penalties on derivatives; r3f's default is 1, l2's 1e-5."""
    methods = ("jacobian-train", "jachess-unlab", "l2", "r3f", "r3f,noise=1e-4")
    made = grid(methods=methods, tuning=TUNING)
    tried: dict[str, list[float]] = {}
    for job in tuning_jobs(load(made)):
        tried.setdefault(job.method, []).append(job.value or 0.0)
        assert job.tuned_method.strength == job.value or job.method == "jachess-unlab"
    assert tried == {
        "jacobian-train": [0.01, 0.1],
        "jachess-unlab": [0.5],
        "l2": pytest.approx([1e-6, 1e-5, 1e-4]),
        "r3f": pytest.approx([0.1, 1.0, 10.0]),
        "r3f,noise=1e-4": pytest.approx([0.1, 1.0, 10.0]),
    }
    named = replace(made.tuning, methods={"r3f": (0.3, 3.0), "jachess-unlab": (0.2,)})
    tried_now = [(job.method, job.value) for job in tuning_jobs(load(replace(made, tuning=named)))]
    assert [value for method, value in tried_now if method.startswith("r3f")] == [0.3, 3.0] * 2
    assert ("jachess-unlab", 0.2) in tried_now and ("jachess-unlab", 0.5) not in tried_now
    none = replace(made.tuning, strength=())
    assert {job.method for job in tuning_jobs(load(replace(made, tuning=none)))} == {
        "jachess-unlab"
    }


def test_seeds_draw_wrong_labels_of_their_own(grid: MakeGrid) -> None:
    """Methods of one seed see the same wrong labels; all seeds see the same rows."""
    settings = {"train_size": 16, "unlabelled_size": 8, "validation": 0.25, "seeds": (0, 1, 2)}
    jobs = final_jobs(load(grid(label_noise=0.25, **settings)), {})
    assert [(job.seed, job.method) for job in jobs[:3]] == [
        *((0, "none"), (0, "jachess-train"), (1, "none"))
    ]
    tasks = {seed: [job.task for job in jobs if job.seed == seed] for seed in (0, 1, 2)}
    assert all(pair[0] == pair[1] for pair in tasks.values())
    clean = final_jobs(load(grid(**settings)), {})[0].task
    for task, _ in tasks.values():
        assert replace(task, train=clean.train) == clean
        assert task.train.texts == clean.train.texts
        wrong = [a != b for a, b in zip(task.train.labels, clean.train.labels, strict=True)]
        assert sum(wrong) == 4
    assert len({tuple(task.train.labels) for task, _ in tasks.values()}) > 1
    assert (len(clean.dev), len(clean.validation or ())) == (24, 8)


def test_the_plain_models_best_epoch(grid: MakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores on validation rows that fall; in bf16, in which accelerate wraps the forward.

    The last epoch's figures are the run's own, and to look for the best changes nothing else.
    """
    judged, original = count(), finetune.judge

    def judge(*given: Any, validation: Any = None, **options: Any) -> Figures:
        figures = original(*given, validation=validation, **options)
        if validation is not None:  # of the dev rows, for whose temperature it is
            return figures
        return replace(figures, score=-float(next(judged)))

    monkeypatch.setattr(finetune, "judge", judge)
    recipe = RECIPE | {"epochs": 3.0, "bf16": True}
    conditions = CONDITIONS | {"texts": ("typos", "case"), "layers": False}
    settings = {"recipe": recipe, "conditions": conditions, "seeds": (0,), "validation": 0.25}
    jobs = final_jobs(load(grid(methods=("none", "sam"), **settings)), {})
    record, other = map(finetune.run, jobs)
    assert next(judged) == 3 and other.best_epoch is None, "of the plain method alone"
    best, scaled = record.best_epoch, record.scaled
    assert best is not None and scaled is not None and best["epoch"] == 1
    last = {"score": record.score, "nll": record.nll, "brier": record.brier}
    last["brier_scaled"] = scaled["brier"]
    assert {name: best[name] for name in last} != last
    monkeypatch.setattr(finetune.BestEpoch, "on_epoch_end", lambda *_, **__: None)
    unwatched = finetune.run(jobs[0])
    assert timeless([replace(record, best_epoch=None)]) == timeless([unwatched])
    assert set(record.perturbed) == {"typos", "case"}
    assert set(record.slopes) == {"logit_jacobian", "margin_over_slope"}
    assert (record.validation_rows, record.jacobian) == (8, [])
    growth = record.embedding_growth
    assert growth is not None and 0.9 < growth < 1.1 and growth != 1
    assert set(record.seconds or {}) == {"training", "processor", "judging"}


BAD_GRIDS = [
    ({"label_noise": 1.0}, "label_noise is 1.0; expected a share below 1"),
    ({"conditions": {"texts": ("noise",)}}, "texts has 'noise'"),
    ({"conditions": {"text_share": 2.0}}, "text_share is 2.0; expected a share"),
    ({"methods": ("none", "none")}, "methods is .* each of them once"),
    ({"seeds": ()}, "seeds is"),
    ({"tasks": ("nothing",)}, "unknown task 'nothing'; expected glue/"),
    ({"train_size": 1000}, "1000 training rows were asked for, and it has 32"),
    ({"train_size": 1}, "all of one class"),
    ({"shift": {"b": ()}}, "shift names the task 'b'; the tasks are a"),
    ({"recipe": {"rate": 1}}, "recipe has no setting 'rate'; it has epochs"),
    ({"recipe": {"lr": -1.0}}, "lr is -1.0"),
    ({"recipe": {"weight_decay": -1.0}}, "weight_decay is -1.0"),
    ({"recipe": {"warmup": 1.0}}, "warmup is 1.0; expected a share"),
    ({"recipe": {"scheduler": "linea"}}, "linea is not a valid SchedulerType"),
    ({"tuning": {"validation": 1.5}}, "validation is 1.5"),
    ({"tuning": {"strength": (-1.0,)}}, "strength is -1.0"),
    ({"tuning": {"strength": (float("nan"),)}}, r"tuning's strength\[0\] is nan"),
    ({"tuning": {"strength": (0.1,), "seeds": ()}}, "tuning has no seeds"),
    ({"tuning": {"seeds": (-3,)}}, "seeds has -3"),
    ({"tuning": {"factors": ()}}, "tuning has no factors"),
    ({"tuning": {"methods": {"jachess-train": ()}}}, "tuning has no values for 'jachess-train'"),
    ({"conditions": {"corruption": (2.0,)}}, "corruption has 2.0; expected shares from 0 to 1"),
    ({"conditions": {"deltas": (-1.0,)}}, "deltas has -1.0"),
    ({"conditions": {"draws": 0}}, "draws is 0; expected a number from 1 up"),
    ({"seed": 3}, "the grid has no setting 'seed'"),
    ({"model": ""}, "the grid has no model"),
]


@pytest.mark.parametrize(("settings", "words"), BAD_GRIDS)
def test_bad_grids_are_refused_before_any_training(
    grid: MakeGrid, settings: dict, words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        run_grid(grid(**settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("schedule, acts", [("constant", True), ("follow", False)])
def test_a_last_pass_acts_after_the_rate_has_decayed(
    grid: MakeGrid, schedule: str, acts: bool
) -> None:
    """One epoch, so one pass of mode unlab, after the last step: linear decay has reached 0."""
    made = grid(
        methods=("none", f"jachess-unlab,unlab_lr_ratio=1,unlab_schedule={schedule}"),
        seeds=(0,),
        recipe={"epochs": 1.0, "batch_size": 8, "lr": 5e-3, "max_length": 16},
    )
    plain, unlab = (finetune.run(job) for job in final_jobs(load(made), {}))
    ratio = (unlab.jacobian_sum or 0.0) / (plain.jacobian_sum or 0.0)
    assert ratio < 0.99 if acts else ratio == 1.0


def test_sizes_of_dev_and_shift_rows(grid: MakeGrid, sentiment: Path) -> None:
    target = {"a": (f"{sentiment}:{sentiment}",)}
    loaded = load(grid(dev_size=8, shift_size=4, shift=target))
    assert [len(loaded.tasks[0].dev), len(loaded.shift["a"][0].dev)] == [8, 4]


@pytest.fixture
def bare_decoder(tmp_path: Path) -> Path:
    """A tiny decoder and a byte-level tokenizer that puts nothing round a text, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    end = dict.fromkeys(("unk_token", "eos_token"), "<|endoftext|>")
    folder = tmp_path / "decoder"
    PreTrainedTokenizerFast(tokenizer_object=core, **end).save_pretrained(folder)
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("part", "pairs"), [("train", True), ("dev", False)])
def test_a_row_without_a_token_is_refused_before_training(
    grid: MakeGrid, bare_decoder: Path, tmp_path: Path, part: str, pairs: bool
) -> None:
    lines = [f"text {i},pair {i},{i % 2}" if pairs else f"text {i},{i % 2}" for i in range(20)]
    files = {}
    for name in ("train", "dev"):
        empty = [",,1" if pairs else ",1"]
        rows = [*lines[:7], *(empty if name == part else []), *lines[7:]]
        files[name] = tmp_path / f"{name}.csv"
        header = "text,text_pair,label" if pairs else "text,label"
        files[name].write_text("\n".join([header, *rows]) + "\n")
    spec = f"a={files['train']}:{files['dev']}"
    made = grid(model=str(bare_decoder), tasks=(spec,))
    with pytest.raises(DataError, match=f"a: row 8 of its {part} rows is empty for the model"):
        run_grid(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if part == "dev":
        target = grid(model=str(bare_decoder), tasks=(f"b={files['train']}:{files['train']}",))
        with pytest.raises(DataError, match="row 8 of its dev rows"):
            load(replace(target, shift={"b": (spec,)}))
    load(grid(tasks=(spec,)))  # a model that reads a start and an end is content


def test_shift_to_other_classes(grid: MakeGrid, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("text,label\na,1\nb,2\nc,3\n")
    with pytest.raises(DataError, match=r"shift a → other: 2 outputs against 3"):
        load(grid(shift={"a": (f"{other}:{other}",)}))
    other.write_text("text,label\na,yes\nb,no\n")
    with pytest.raises(DataError, match=r"the classes are bad, good against no, yes"):
        load(grid(shift={"a": (f"{other}:{other}",)}))


def test_names_follow_what_a_run_depends_on(grid: MakeGrid) -> None:
    job = final_jobs(load(grid()), {})[0]
    task = replace(job.task, dev=job.task.dev.slice(0, 3))
    others = [
        replace(job, seed=5),
        replace(job, version="other weights"),
        replace(job, method="l2"),
        replace(job, value=0.5),
        replace(job, task=task),
        replace(job, recipe=replace(job.recipe, epochs=2.0)),
        replace(job, shift=(task,)),
    ]
    assert len({job.name, *(other.name for other in others)}) == 8
    assert replace(job).name == job.name
    assert from_json(asdict(grid()), Grid, "it") == grid()


def test_names_follow_the_defaults(grid: MakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of runs made with another default strength does not serve."""
    job = final_jobs(load(grid(methods=("r3f",))), {})[0]
    before = job.name
    monkeypatch.setitem(METHODS["r3f"].__init__.__kwdefaults__, "noise", 0.5)
    assert replace(job).name != before
