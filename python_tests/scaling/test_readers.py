"""`read_runs` on what transformers' Trainer writes, and the document's lines for other tools."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext.scaling import LossTable, TableError, read_runs, read_table
from python_tests.snippets import blocks, run

FILES = Path(__file__).parent / "files"
ACCURACIES = {("small", 100): 0.5, ("small", 400): 0.75, ("large", 100): 0.6, ("large", 400): 0.8}
SPLIT: dict[str, Any] = {"model": "^(.*)-n=", "size": r"n=(\d+)$"}


def check(table: LossTable, order: tuple[str, str] = ("large", "small")) -> None:
    """The accuracies above, as errors."""
    assert table.names == order and table.sizes.tolist() == [100, 400]
    expected = [[1 - ACCURACIES[name, size] for size in (100, 400)] for name in order]
    np.testing.assert_allclose(table.losses, expected, rtol=1e-6)


# A run's measurements ---------------------------------------------------------------------------

Curves = list[tuple[str, int, list[Any]]]
"""Model, rows and accuracies, in the order they were measured in, of each run; "" for empty."""


def write_trainer(folder: Path, curves: Curves) -> Path:
    for model, rows, values in curves:
        log = [{"eval_accuracy": None if value == "" else value} for value in values]
        write_state(folder / f"{model}-n={rows}", log)
    return folder


def write_state(home: Path, log: list[dict[str, Any]], step: int = 0) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "trainer_state.json").write_text(json.dumps({"log_history": log, "global_step": step}))


def write_long(folder: Path, curves: Curves) -> Path:
    """With a second seed, whose accuracies are those that are right."""
    rows = [(model, rows, 0, values[-1]) for model, rows, values in curves]
    rows += [(model, rows, 1, value) for (model, rows), value in ACCURACIES.items()]
    frame = pd.DataFrame(rows, columns=["model", "rows", "seed", "eval_accuracy"])
    frame.to_csv(folder / "long.csv", index=False)
    return folder / "long.csv"


PLACES = {"first": ("small", 100, 0), "middle": ("large", 100, 1), "last": ("large", 400, 2)}


def curves_of(place: str = "", wrong: Any = None, rises: bool = True) -> Curves:
    """The accuracies above, each after two lower ones, and one that is wrong in its place."""
    curves = [(model, rows, [0.1, 0.2, value]) for (model, rows), value in ACCURACIES.items()]
    if place:
        model, rows, step = PLACES[place]
        next(each for each in curves if each[:2] == (model, rows))[2][step if rises else -1] = wrong
    return curves


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), ""], ids=repr)
def test_an_accuracy_that_is_no_number_is_told(wrong: Any, place: str, tmp_path: Path) -> None:
    """Its run is named: no other step, metric or seed of it stands in for what is missing."""
    model, rows, _ = PLACES[place]
    folder = write_trainer(tmp_path, curves_of(place, wrong))
    for value in ("last", "best"):
        with pytest.raises(TableError, match=rf"'{model}-n={rows}' has a .*ignore=\['{model}-n="):
            read_runs(folder, "eval_accuracy", value=value, **SPLIT)
    path = write_long(tmp_path, curves_of(place, wrong, rises=False))
    with pytest.raises(TableError, match=f"run of '{model}' at size {rows} with seed 0 is"):
        read_table(path, metric="eval_accuracy")


def test_a_truth_value_is_no_measurement(tmp_path: Path) -> None:
    folder = write_trainer(tmp_path, [("a", 100, [True]), ("b", 100, [0.5])])
    with pytest.raises(TableError, match="'a-n=100' has a 'eval_accuracy' of nan"):
        read_runs(folder, "eval_accuracy", **SPLIT)


def test_every_source(tmp_path: Path) -> None:
    check(read_runs(write_trainer(tmp_path, curves_of()), **SPLIT))
    check(read_table(write_long(tmp_path, curves_of())), ("small", "large"))


def test_columns_of_one_name_are_not_left_out_together() -> None:
    frame = pd.DataFrame([[0.5, 1, 0.4], [0.6, 2, 0.5]], ["a", "b"], ["100", "n", "200"])
    frame.columns = pd.Index(["100", "note", "note"])
    for given in ({"ignore": ["note"]}, {"model": "note"}):
        with pytest.raises(TableError, match="has the column 'note' twice"):
            read_table(frame, metric="loss", **given)  # type: ignore[arg-type]


# transformers' Trainer --------------------------------------------------------------------------

PATHS: dict[str, Any] = {"model": "^([^/]+)/", "size": r"/(\d+)/"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a real Trainer: two models, two sizes and two seeds; one folder is a checkpoint's."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        EvalPrediction,
        Trainer,
        TrainingArguments,
    )

    def accuracy(said: EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((said.predictions.argmax(-1) == said.label_ids).mean())}

    def rows(count: int) -> list[dict[str, Any]]:
        tokens = torch.randint(1, 20, (count, 4), generator=torch.Generator().manual_seed(count))
        return [{"input_ids": row, "labels": int(row[0] > 9)} for row in tokens]

    folder = tmp_path_factory.mktemp("trained")
    shape = {"vocab_size": 20, "intermediate_size": 8, "max_position_embeddings": 8}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    recipe: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 8}
    recipe |= {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 1}
    recipe |= {"learning_rate": 1e-2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    for width, count, seed in itertools.product((16, 32), (16, 32), (0, 1)):
        torch.manual_seed(seed)
        home = folder / f"tiny-{width}" / str(count) / f"seed{seed}"
        trainer = Trainer(
            BertForSequenceClassification(BertConfig(hidden_size=width, **shape)),
            TrainingArguments(str(home), seed=seed, **recipe),
            train_dataset=rows(count),  # type: ignore[arg-type]
            eval_dataset=rows(20),  # type: ignore[arg-type]
            compute_metrics=accuracy,
        )
        result = trainer.train()
        if seed:
            trainer.save_state()
        else:  # as the example scripts do
            trainer.save_metrics("train", result.metrics | {"train_samples": count})
    return folder


def evaluations(home: Path) -> list[float]:
    """The accuracies after each epoch, in order."""
    latest = max(home.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((latest / "trainer_state.json").read_text())["log_history"]
    return [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]


def test_runs_of_trainer(trained: Path) -> None:
    for value, pick in (("last", lambda each: each[-1]), ("best", max)):
        table = read_runs(trained, "accuracy", value=value, **PATHS)
        assert table.names == ("tiny-16", "tiny-32") and table.sizes.tolist() == [16, 32]
        assert table.metric == "accuracy" and table.noise is not None
        for row, column in np.ndindex(2, 2):
            home = trained / ("tiny-16", "tiny-32")[row] / ("16", "32")[column]
            a, b = (pick(evaluations(home / f"seed{seed}")) for seed in (0, 1))
            assert len(evaluations(home / "seed0")) == 2
            assert table.losses[row, column] == pytest.approx(1 - (a + b) / 2)
            assert table.noise[row, column] == pytest.approx(abs(a - b) / 2)


def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def test_what_trainer_runs_do_not_tell_is_asked_for(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="measurements 'eval_accuracy', 'eval_loss'; say which"):
        read_runs(trained, **PATHS)
    with pytest.raises(TableError, match=r"'tiny-16/16/seed0' has no 'f1'.*ignore="):
        read_runs(trained, "f1", **PATHS)
    with pytest.raises(TableError, match=r"has no run 'died' to ignore; it has 'tiny-16/16/seed0'"):
        read_runs(trained, "loss", ignore=["died"], **PATHS)
    with pytest.raises(TableError, match="value is 'mean'; expected 'last' or 'best'"):
        read_runs(trained, "loss", value="mean", **PATHS)
    runs, model = copied(trained, tmp_path), PATHS["model"]
    for path in runs.rglob("seed1"):
        shutil.rmtree(path)
    expected = read_runs(runs, "loss", **PATHS).losses
    np.testing.assert_array_equal(read_runs(runs, "loss", model=model).losses, expected)
    with pytest.raises(TableError, match=r"of the run 'tiny-16/16/seed1' is not known: .*size="):
        read_runs(trained, "loss", model=model)
    for size, words in (
        (r"/\d+/", "matches no part of the run .* with one group"),
        (r"x(\d+)", "matches no part of the run 'tiny-16/16/seed0'"),
        (r"(seed)", "'seed' is no number of training"),
    ):
        with pytest.raises(TableError, match=words):
            read_runs(runs, "loss", model=model, size=size)


def test_repeats_must_share_their_recipe(trained: Path, tmp_path: Path) -> None:
    runs = copied(trained, tmp_path)
    state = runs / "tiny-16" / "16" / "seed1" / "trainer_state.json"
    content = json.loads(state.read_text())
    content["num_train_epochs"] = 3
    state.write_text(json.dumps(content))
    with pytest.raises(
        TableError, match=r"'tiny-16/16/seed0' and 'tiny-16/16/seed1'.*epochs is 2 and 3"
    ):
        read_runs(runs, "loss", **PATHS)
    table = read_runs(runs, "loss", **PATHS, ignore=["tiny-16/16/seed1"])
    assert table.left_out.endswith("runs, 'tiny-16/16/seed1'") and "1 of " in table.left_out
    assert not read_runs(runs, "loss", **PATHS, ignore=["num_train_epochs"]).left_out
    assert table.noise is not None and np.isnan(table.noise).tolist() == [
        [True, False],
        [False] * 2,
    ]


LOG = [{"eval_loss": 1.0 / step, "eval_runtime": 0.1 * step} for step in (1, 2, 3, 4)]
OTHER = [{"eval_loss": 9.0 / step, "eval_runtime": 0.2 * step} for step in (1, 2, 3, 4, 5)]
LEFT = {
    # folder: checkpoints and their logs, the folder's own log; the log that counts
    "one run": ({"checkpoint-9": LOG[:1], "checkpoint-10": LOG[:2]}, None, LOG[:2]),
    "its end": ({"checkpoint-9": LOG[:1], "checkpoint-10": LOG[:2]}, LOG, LOG),
    "a NaN in it": ({"checkpoint-1": [{"train": math.nan}]}, [{"train": math.nan}, *LOG], LOG),
    "after a longer run": ({"checkpoint-500": OTHER}, LOG, LOG),
    "after a longer run of as many steps": ({"checkpoint-10": OTHER}, LOG, LOG),
    "begun after a longer run": ({"checkpoint-9": LOG[:2], "checkpoint-500": OTHER}, None, None),
    "begun after a shorter run": ({"checkpoint-9": OTHER[:1], "checkpoint-50": LOG}, None, None),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_stale_checkpoint_does_not_count(left: str, tmp_path: Path) -> None:
    """Steps do not tell which of two runs in a folder is the newer: its own end counts, or none."""
    checkpoints, own, counted = LEFT[left]
    for name in ("a1", "b2"):
        for place, log in checkpoints.items():
            write_state(tmp_path / name / place, log, int(place.partition("-")[2]))
        if own is not None:
            write_state(tmp_path / name, own, 10)
    given = {"size": r"(\d)", "model": "([ab])"}
    if counted is None:
        with pytest.raises(TableError, match="a1 holds checkpoints of several runs; remove"):
            read_runs(tmp_path, "loss", **given)
        return
    table = read_runs(tmp_path, "loss", **given)
    assert np.diag(table.losses).tolist() == [counted[-1]["eval_loss"]] * 2


AT_ONE_STEP = {
    # values by step: what "last" gives, what "best" gives; None: refused
    "one a step": ([(1, 0.5), (2, 0.7)], 0.7, 0.7),
    "the same again": ([(1, 0.5), (2, 0.7), (2, 0.7)], 0.7, 0.7),
    "the best again": ([(1, 0.8), (2, 0.7), (2, 0.8)], None, 0.8),
    "other data": ([(1, 0.5), (2, 0.7), (2, 0.6)], None, None),
    "other data before": ([(1, 0.5), (1, 0.4), (2, 0.7)], None, None),
    "of many data": ([(1, 0.5), (1, 0.4), (2, 0.7), (2, 0.6)], None, None),
}


@pytest.mark.parametrize("end", ["log", "results"])
@pytest.mark.parametrize("value", ["last", "best"])
@pytest.mark.parametrize("kind", AT_ONE_STEP)
def test_two_evaluations_at_one_step(kind: str, value: str, end: str, tmp_path: Path) -> None:
    pairs, *expected = AT_ONE_STEP[kind]
    log = [{"step": step, "eval_accuracy": each} for step, each in pairs]
    for name in ("a1", "b2"):
        write_state(tmp_path / name, log if end == "log" else log[:-1])
        if end == "results":
            (tmp_path / name / "eval_results.json").write_text(json.dumps(log[-1]))
    given: dict[str, Any] = {"size": r"(\d)", "model": "([ab])", "value": value}
    result = expected[value == "best"]
    if result is not None:
        losses = read_runs(tmp_path, "accuracy", **given).losses
        np.testing.assert_allclose(np.diag(losses), 1 - result)
        return
    with pytest.raises(TableError, match="'a1' has several eval_accuracy at step") as caught:
        read_runs(tmp_path, "accuracy", **given)
    best = expected[1] is not None
    assert caught.value.options == ({"value": "best"} if best else {"ignore": ["a1"]})


@pytest.mark.parametrize("inner", ["a-100/retry", "a-100/old/x", "b-400/checkpoints/0"])
@pytest.mark.parametrize("root", [False, True])
def test_a_run_inside_another(inner: str, root: bool, tmp_path: Path) -> None:
    for (model, rows), value in {("a", 100): 0.5, ("a", 400): 0.6, ("b", 100): 0.4}.items():
        write_state(tmp_path / f"{model}-{rows}", [{"eval_accuracy": value}])
    write_state(tmp_path / "b-400", [{"eval_accuracy": 0.7}])
    given = {"model": "(?:^|/)([ab])-", "size": r"(?:^|/)[ab]-(\d+)"}
    expected = read_runs(tmp_path, "accuracy", **given).losses
    write_state(tmp_path if root else tmp_path / inner, [{"eval_accuracy": 0.1}])
    with pytest.raises(TableError, match="lie in folders of other runs") as caught:
        read_runs(tmp_path, "accuracy", **given)
    if root:
        assert len(caught.value.options["ignore"]) == 4
        caught.value.options["ignore"] = [tmp_path.name]
    table = read_runs(tmp_path, "accuracy", **given, **caught.value.options)
    np.testing.assert_array_equal(table.losses, expected)


TRIALS: dict[str, tuple[list[dict[str, Any] | None], list[str]]] = {
    # the trial_params of two runs of a model and size; what is asked about
    "rate": ([{"learning_rate": 1e-5}, {"learning_rate": 1e-2}], ["learning_rate"]),
    "two": ([{"a": 1, "b": 2.0}, {"a": 2, "b": 3.0}], ["a", "b"]),
    "one of two": ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], ["b"]),
    "text": ([{"optim": "sgd"}, {"optim": "adamw_torch"}], ["optim"]),
    "in one alone": ([{"warmup_steps": 5}, {}], ["warmup_steps"]),
    "nested": ([{"lora": {"r": 8}}, {"lora": {"r": 16}}], ["lora"]),
    "seeds": ([{"seed": 1, "data_seed": 3}, {"seed": 2, "data_seed": 4}], []),
    "a seed and more": ([{"seed": 1, "a": 0.0}, {"seed": 2, "a": 0.1}], ["a"]),
    "equal": ([{"a": 1}, {"a": 1}], []),
    "no search": ([None, None], []),
    "one of no search": ([{"a": 1}, None], []),
}


def test_settings_in_which_repeats_may_differ(tmp_path: Path) -> None:
    """A learning rate is known from the log alone, which may have missed the peak of a warm-up."""
    for seed, rate in ((0, 2e-5), (1, 1.9e-5)):
        for model in ("a", "b"):
            log = [{"eval_loss": 1.0 + seed}, {"learning_rate": rate}]
            write_state(tmp_path / f"{model}-100" / str(seed), log)
    with pytest.raises(TableError, match=r"learning_rate is 2e-05 and 1.9e-05") as caught:
        read_runs(tmp_path, model="^(.)-", size=r"-(\d+)")
    assert caught.value.options == {"ignore": ["learning_rate"]}
    table = read_runs(tmp_path, model="^(.)-", size=r"-(\d+)", ignore=["learning_rate"])
    assert table.losses.tolist() == [[1.5], [1.5]]


@pytest.mark.parametrize("name", TRIALS)
def test_trials_of_a_search_are_no_repeats(name: str, tmp_path: Path) -> None:
    tried, asked = TRIALS[name]
    for model in ("a", "b"):
        for trial, (params, value) in enumerate(zip(tried, (0.898, 0.644), strict=True)):
            home = tmp_path / f"{model}-100" / f"run-{trial}"
            write_state(home, [{"eval_accuracy": value}])
            state = json.loads((home / "trainer_state.json").read_text())
            (home / "trainer_state.json").write_text(json.dumps(state | {"trial_params": params}))
    given = {"model": "^(.)-", "size": r"-(\d+)/"}
    if asked:
        with pytest.raises(TableError, match="are no repeats: " + ".*".join(asked)) as caught:
            read_runs(tmp_path, **given)
        assert caught.value.options == {"ignore": asked}
        for missing in asked:
            ignore = [key for key in asked if key != missing]
            with pytest.raises(TableError, match="are no repeats"):
                read_runs(tmp_path, **given, ignore=ignore)
    table = read_runs(tmp_path, **given, ignore=asked)
    np.testing.assert_allclose(table.losses, 1 - (0.898 + 0.644) / 2)
    trials = read_runs(tmp_path, model=r"^(.-100/run-\d)", size=r"-(\d+)/")
    np.testing.assert_allclose(trials.losses[:, 0], [0.102, 0.356] * 2)


@pytest.mark.parametrize("key", ["n-shot", "versions", "limit", "gen_kwargs"])
def test_other_settings_of_lm_evaluation_harness_are_no_repeats(key: str, tmp_path: Path) -> None:
    for model in ("a", "b"):
        for number in (0, 5):
            setting = {"rte": number} if key in ("n-shot", "versions") else number or None
            content: dict[str, Any] = {"results": {"rte": {"acc,none": 0.5 + number / 100}}}
            inner = content if key in ("n-shot", "versions") else content.setdefault("config", {})
            inner[key] = setting
            home = tmp_path / f"{model}-100"
            home.mkdir(exist_ok=True)
            (home / f"results_{number}.json").write_text(json.dumps(content))
    given = {"model": "^(.)-", "size": r"-(\d+)/"}
    with pytest.raises(TableError, match=f"are no repeats: {key} is") as caught:
        read_runs(tmp_path, "rte/acc", **given)
    assert caught.value.options == {"ignore": [key]}
    read_runs(tmp_path, "rte/acc", **given, ignore=[key])


def test_results_of_lm_evaluation_harness(tmp_path: Path) -> None:
    for (model, rows), value in ACCURACIES.items():
        scores = {"acc,none": value, "acc_stderr,none": 0.01, "alias": "rte", "f1,strict": 0.2}
        home = tmp_path / f"{model}-n={rows}"
        home.mkdir()
        text = json.dumps({"results": {"rte": scores}, "config": {"model": "hf"}})
        (home / "results_2024-05-01T10-00-00.json").write_text(text)
    given = {"model": "^(.*)-n=", "size": r"n=(\d+)/"}
    with pytest.raises(TableError, match=r"'rte/acc', .*; say which: metric='rte/acc'"):
        read_runs(tmp_path, **given)
    check(read_runs(tmp_path, "rte/acc", **given))
    path = tmp_path / "small-n=100" / "results_2024-05-01T10-00-00.json"
    with pytest.raises(TableError, match="has one model's results; read_runs"):
        read_table(path)
    path.write_text('{"results": 1}')
    with pytest.raises(TableError, match="is not as its tool writes it"):
        read_runs(tmp_path, "rte/acc", **given)


def test_results_of_another_training(tmp_path: Path) -> None:
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        write_state(tmp_path / name, [{"eval_loss": 1.0}, {"train_runtime": 2.0}])
        results = {"train_runtime": seconds, "train_samples": 5, "eval_loss": 0.5}
        (tmp_path / name / "all_results.json").write_text(json.dumps(results))
    with pytest.raises(TableError, match=r"results in .*b are of another training"):
        read_runs(tmp_path, "loss", model="(.)")


def test_files_that_are_no_states(tmp_path: Path) -> None:
    path = tmp_path / "a" / "trainer_state.json"
    path.parent.mkdir()
    path.write_text("[1]")
    with pytest.raises(TableError, match="is not as its tool writes it: no log_history"):
        read_runs(tmp_path, "loss", model="(.)")
    for damaged in ({"log_history": None}, {"global_step": 3}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(TableError, match="is not as its tool writes it: no log_history"):
            read_runs(tmp_path, "loss", model="(.)")
    path.write_text('{"log_history": [')
    with pytest.raises(ValueError, match=r"trainer_state\.json"):
        read_runs(tmp_path, "loss", model="(.)")


# Other tools: the lines of docs/scaling.md ------------------------------------------------------

LINES = {
    code.splitlines()[0].removeprefix("# ").split(":")[0]: code
    for text, _ in blocks(Path(__file__).resolve().parents[2] / "docs" / "scaling.md")
    if "mlflow.search_runs" in text
    for code in text.split("\n\n")
}


def as_documented(tool: str, **names: Any) -> LossTable:
    """Run the document's lines for a tool."""
    import jachess_ext as jx

    names |= {"pd": pd, "Path": Path, "jx": jx}
    run(LINES[tool], names, None)
    table: LossTable = names["runs"]
    return table


def test_mlflow() -> None:
    """The export of its search_runs, of which one run failed and has no value."""
    every = pd.read_csv(FILES / "mlflow_search_runs.csv").rename(
        columns={
            "params.model_name_or_path": "params.model",
            "params.max_train_samples": "params.n_train",
        }
    )

    class mlflow:
        @staticmethod
        def search_runs(filter_string: str) -> pd.DataFrame:
            assert filter_string == "attributes.status = 'FINISHED'"
            return every[every.status == "FINISHED"]

    check(as_documented("MLflow", mlflow=mlflow))
    every["status"] = "FINISHED"
    with pytest.raises(TableError, match=r"accuracy of the run of 'small' at size 1600 .* is nan"):
        as_documented("MLflow", mlflow=mlflow)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FILES / "wandb_runs.csv", "wandb.csv")
    table = as_documented("W&B")
    assert table.names == ("small", "large") and table.sizes.tolist() == [100, 400]
    np.testing.assert_allclose(table.losses, [[0.49, 0.25], [0.4, 0.2]])
    assert table.noise is not None and table.noise[0, 0] == pytest.approx(0.01)
    pd.read_csv("wandb.csv").assign(State="finished").to_csv("wandb.csv")
    with pytest.raises(TableError, match=r"accuracy of the run of .* is nan or empty"):
        as_documented("W&B")


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.chdir(tmp_path)
    for (model, rows), accuracy in ACCURACIES.items():
        with SummaryWriter(f"logs/{model}/{rows}/0") as writer:
            for step, value in enumerate((0.1, accuracy)):
                writer.add_scalar("eval/accuracy", value, step)
    check(as_documented("TensorBoard"), ("small", "large"))
    with SummaryWriter("logs/small/100/1") as writer:
        writer.add_scalar("eval/accuracy", math.nan, 0)
    with pytest.raises(TableError, match="run of 'small' at size 100 with seed 1 is nan"):
        as_documented("TensorBoard")
