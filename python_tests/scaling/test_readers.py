"""`read_runs` on what transformers, MLflow, TensorBoard and W&B write."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext.scaling import LossTable, TableError, read_runs

FILES = Path(__file__).parent / "files"
ACCURACIES = {("small", 100): 0.5, ("small", 400): 0.75, ("large", 100): 0.6, ("large", 400): 0.8}


def check(table: LossTable, order: tuple[str, str] = ("large", "small")) -> None:
    """The accuracies above, as errors."""
    assert table.names == order and table.sizes.tolist() == [100, 400]
    expected = [[1 - ACCURACIES[name, size] for size in (100, 400)] for name in order]
    np.testing.assert_allclose(table.losses, expected, rtol=1e-6)


# Every source -----------------------------------------------------------------------------------

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


def write_mlflow(folder: Path, curves: Curves) -> Path:
    for number, (model, rows, values) in enumerate(curves):
        metrics = folder / str(number) / "metrics"
        metrics.mkdir(parents=True)
        (metrics.parent / "meta.yaml").write_text(f"run_name: {model}-n={rows}\nstatus: 3\n")
        lines = [f"17000000 {value} {step}\n" for step, value in enumerate(values)]
        (metrics / "eval_accuracy").write_text("".join(lines))
    return folder


def write_events(folder: Path, curves: Curves, new_style: bool = False) -> Path:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for model, rows, values in curves:
        with SummaryWriter(str(folder / f"{model}-n={rows}")) as writer:
            writer.add_scalar("eval/loss", 1.0)
            for step, value in enumerate(values):
                if "" not in values:  # event files have no empty scalar: here it is not there
                    writer.add_scalar("eval/accuracy", value, step, new_style=new_style)
    return folder


def write_new_events(folder: Path, curves: Curves) -> Path:
    return write_events(folder, curves, new_style=True)


def write_downloads(folder: Path, curves: Curves) -> Path:
    for model, rows, values in curves:
        lines = [f"1700000000.5,{step},{value}\n" for step, value in enumerate(values)]
        path = folder / f"run-{model}-n={rows}-tag-eval_accuracy.csv"
        path.write_text("Wall time,Step,Value\n" + "".join(lines))
    return folder


def frame_of(curves: Curves, name: str, value: str, **more: Any) -> pd.DataFrame:
    """A row a run, with its last accuracy."""
    rows = [(f"{model}-n={rows}", values[-1]) for model, rows, values in curves]
    return pd.DataFrame(rows, columns=[name, value]).assign(**more)


def write_search_runs(folder: Path, curves: Curves) -> Path:
    more = {"metrics.val_accuracy": 0.9, "status": "FINISHED"}
    frame = frame_of(curves, "tags.mlflow.runName", "metrics.eval_accuracy", **more)
    frame.to_csv(folder / "runs.csv")
    return folder / "runs.csv"


def wandb_frame(_: Path, curves: Curves) -> pd.DataFrame:
    more = {"State": "finished", "val/accuracy": 0.9}
    return frame_of(curves, "Name", "eval_accuracy", **more).replace("", None)


def wandb_api(_: Path, curves: Curves) -> pd.DataFrame:
    frame = frame_of(curves, "name", "eval_accuracy")
    told = [{"eval_accuracy": value or None, "val/accuracy": 0.9} for value in frame.eval_accuracy]
    return frame[["name"]].assign(summary=told, config=[{}] * len(told))


def write_long(folder: Path, curves: Curves) -> Path:
    """With a second seed, whose accuracies are those that are right."""
    rows = [(model, rows, 0, values[-1]) for model, rows, values in curves]
    rows += [(model, rows, 1, value) for (model, rows), value in ACCURACIES.items()]
    frame = pd.DataFrame(rows, columns=["model", "rows", "seed", "eval_accuracy"])
    frame.to_csv(folder / "long.csv", index=False)
    return folder / "long.csv"


SERIES = (write_trainer, write_mlflow, write_events, write_new_events, write_downloads)
ROWS = (write_search_runs, wandb_frame, wandb_api, write_long)
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
@pytest.mark.parametrize("write", [*SERIES, *ROWS])
def test_an_accuracy_that_is_no_number_is_told(
    write: Any, wrong: Any, place: str, tmp_path: Path
) -> None:
    """Its run is named: no other step, metric or seed of it stands in for what is missing."""
    model, rows, _ = PLACES[place]
    source = write(tmp_path, curves_of(place, wrong, rises=write in SERIES))
    name = f"{model}' at size {rows}" if write is write_long else f"'{model}-n={rows}'"
    for value in ("last", "best"):
        with pytest.raises(TableError, match=name):
            read_runs(source, "eval_accuracy", value=value)


@pytest.mark.parametrize("write", [*SERIES, *ROWS])
def test_every_source(write: Any, tmp_path: Path) -> None:
    table = read_runs(write(tmp_path, curves_of()), "eval_accuracy")
    check(table, table.names if table.names[0] == "small" else ("large", "small"))  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [write_mlflow, write_search_runs, wandb_frame, wandb_api])
@pytest.mark.parametrize("wrong_first", [True, False])
def test_one_of_two_runs_of_a_name_is_left_out(
    write: Any, wrong_first: bool, tmp_path: Path
) -> None:
    """What the error advises leaves out the run that diverged, and not the one that did not."""
    curves, diverged = curves_of(), ("small", 400, [float("nan")])
    place = curves.index(next(each for each in curves if each[:2] == diverged[:2]))
    curves.insert(place if wrong_first else place + 1, diverged)
    source = write(tmp_path, curves)
    wrong = f"small-n=400 ({1 if wrong_first else 2})"
    advice = re.escape(f"leave it out with ignore=['{wrong}']")
    with pytest.raises(TableError, match=advice):
        read_runs(source, "eval_accuracy")
    with pytest.raises(TableError, match=r"2 runs 'small-n=400'; say which to ignore: .*\(2\)'"):
        read_runs(source, "eval_accuracy", ignore=["small-n=400"])
    table = read_runs(source, "eval_accuracy", ignore=[wrong])
    check(table, table.names if table.names[0] == "small" else ("large", "small"))  # type: ignore[arg-type]


def test_columns_of_one_name_are_not_left_out_together() -> None:
    frame = pd.DataFrame([[0.5, 1, 0.4], [0.6, 2, 0.5]], ["a", "b"], ["100", "n", "200"])
    frame.columns = pd.Index(["100", "note", "note"])
    for given in ({"ignore": ["note"]}, {"model": "note"}):
        with pytest.raises(TableError, match="has the column 'note' twice"):
            read_runs(frame, "loss", **given)  # type: ignore[arg-type]


# transformers' Trainer --------------------------------------------------------------------------


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
    for width in (16, 32):
        for count in (16, 32):
            for seed in (0, 1):
                torch.manual_seed(seed)
                home = folder / f"tiny-{width}" / str(count) / f"seed{seed}"
                config = BertConfig(
                    vocab_size=20,
                    hidden_size=width,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                    max_position_embeddings=8,
                )
                arguments = TrainingArguments(
                    str(home),
                    num_train_epochs=2,
                    per_device_train_batch_size=8,
                    eval_strategy="epoch",
                    save_strategy="epoch",
                    logging_steps=1,
                    learning_rate=1e-2,
                    seed=seed,
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=True,
                )
                trainer = Trainer(
                    BertForSequenceClassification(config),
                    arguments,
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
    """Rows come from train_samples or from what is logged; models and seeds from the folders."""
    for value, pick in (("last", lambda each: each[-1]), ("best", max)):
        table = read_runs(trained, "accuracy", value=value)
        assert table.names == ("tiny-16", "tiny-32") and table.sizes.tolist() == [16, 32]
        assert table.metric == "accuracy" and table.noise is not None
        for row, width in enumerate((16, 32)):
            for column, count in enumerate((16, 32)):
                homes = [trained / f"tiny-{width}" / str(count) / f"seed{seed}" for seed in (0, 1)]
                a, b = (pick(evaluations(home)) for home in homes)
                assert len(evaluations(homes[0])) == 2
                assert table.losses[row, column] == pytest.approx(1 - (a + b) / 2)
                assert table.noise[row, column] == pytest.approx(abs(a - b) / 2)


def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def test_what_trainer_runs_do_not_tell_is_asked_for(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="measurements 'eval_accuracy', 'eval_loss'; say which"):
        read_runs(trained)
    with pytest.raises(TableError, match=r"'tiny-16/16/seed0' has no 'f1'.*ignore="):
        read_runs(trained, "f1")
    runs = copied(trained, tmp_path)
    for path in runs.rglob("train_results.json"):
        path.unlink()
    for path in runs.rglob("all_results.json"):
        path.unlink()
    with pytest.raises(TableError, match=r"of the run 'tiny-16/16/seed0' is not known: .*size="):
        read_runs(runs, "loss")
    expected = read_runs(trained, "loss").losses
    for size in (
        r"/(\d+)/",
        lambda name: name.split("/")[1],
        {path.relative_to(runs).as_posix(): int(path.parts[-2]) for path in runs.glob("*/*/*")},
    ):
        np.testing.assert_array_equal(read_runs(runs, "loss", size=size).losses, expected)
    for size, words in (
        (r"/\d+/", "no parameter of the run .* with one group"),
        (r"(", "is no regular expression"),
        (r"x(\d+)", "matches no part of its name"),
        (3, "size is 3; expected a parameter's name, a regular expression"),
        ({"a": 1}, "size has no entry for the run 'tiny-16/16/seed0'"),
        (r"(seed)", "of the run 'tiny-16/16/seed0', 'seed' is no number of training"),
    ):
        with pytest.raises(TableError, match=words):
            read_runs(runs, "loss", size=size)


def test_a_model_whose_name_holds_a_number_of_rows(trained: Path, tmp_path: Path) -> None:
    flat, bare = tmp_path / "flat", tmp_path / "bare"
    for path in trained.glob("*/*/*"):
        model, count, seed = path.relative_to(trained).parts
        shutil.copytree(path, flat / f"{model}-{count}-{seed}")
        shutil.copytree(path, bare / f"{model}-{'few' if count == '16' else 'many'}-{seed}")
    assert read_runs(flat, "loss").names == ("tiny-16", "tiny-32")  # the last 32 is the size
    names = [f"tiny-{width}-{word}" for width in (16, 32) for word in ("few", "many")]
    assert read_runs(bare, "loss").names == tuple(names)  # here none is


def test_repeats_must_share_their_recipe(trained: Path, tmp_path: Path) -> None:
    runs = copied(trained, tmp_path)
    state = runs / "tiny-16" / "16" / "seed1" / "trainer_state.json"
    content = json.loads(state.read_text())
    content["num_train_epochs"] = 3
    state.write_text(json.dumps(content))
    with pytest.raises(TableError, match="not known"):  # its rows do not follow from it any more
        read_runs(runs, "loss")
    with pytest.raises(
        TableError, match=r"'tiny-16/16/seed0' and 'tiny-16/16/seed1'.*epochs is 2 and 3"
    ):
        read_runs(runs, "loss", size=r"/(\d+)/")
    table = read_runs(runs, "loss", size=r"/(\d+)/", ignore=["tiny-16/16/seed1"])
    assert table.noise is not None and np.isnan(table.noise).tolist() == [
        [True, False],
        [False] * 2,
    ]


def test_the_model_of_a_config_or_an_adapter(trained: Path, tmp_path: Path) -> None:
    runs = copied(trained, tmp_path)
    for path in runs.rglob("config.json"):
        name = "org/wide" if "tiny-32" in str(path) else "org/narrow"
        if name == "org/wide":
            path.write_text(json.dumps({"_name_or_path": name}))  # as transformers 4 wrote it
        else:
            path.unlink()
            (path.parent / "adapter_config.json").write_text(
                json.dumps({"base_model_name_or_path": name})
            )
    assert read_runs(runs, "loss").names == ("org/narrow", "org/wide")


def test_rows_by_what_trainer_logs(tmp_path: Path) -> None:
    """train_samples_per_second is rows · epochs / train_runtime; not where max_steps ended it."""
    end = {"train_runtime": 20.0, "train_samples_per_second": 300.15, "epoch": 3.0}
    for number, name in enumerate(("a", "b")):
        state = {
            "num_train_epochs": 3,
            "global_step": 9,
            "log_history": [{"eval_loss": 1.0 + number}, end],
        }
        path = tmp_path / name / "trainer_state.json"
        path.parent.mkdir()
        path.write_text(json.dumps(state))
    model = {"a": "a", "b": "b"}
    assert read_runs(tmp_path, model=model).sizes.tolist() == [2001]
    for change in (
        {"epoch": 2.5},  # max_steps
        {"train_samples_per_second": 300.19},  # 2001.27 rows
        {"train_runtime": 0.002, "train_samples_per_second": 3001500.0},  # rounded too much
    ):
        state["log_history"] = [{"eval_loss": 2.0}, end | change]
        path.write_text(json.dumps(state))
        with pytest.raises(TableError, match="of the run 'b' is not known"):
            read_runs(tmp_path, model=model)


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
    for name in ("a", "b"):
        for place, log in checkpoints.items():
            write_state(tmp_path / name / place, log, int(place.partition("-")[2]))
            path = tmp_path / name / place / "config.json"
            path.write_text(json.dumps({"_name_or_path": "right" if log != OTHER else "stale"}))
        if own is not None:
            write_state(tmp_path / name, own, 10)
    sizes = {"a": 1, "b": 2}
    if counted is None:
        with pytest.raises(TableError, match="a holds checkpoints of several runs; remove"):
            read_runs(tmp_path, "loss", size=sizes)
        return
    table = read_runs(tmp_path, "loss", size=sizes, model={"a": "a", "b": "b"})
    assert np.diag(table.losses).tolist() == [counted[-1]["eval_loss"]] * 2
    if OTHER not in checkpoints.values():
        assert read_runs(tmp_path, "loss", size=sizes, fewest=1).names == ("right",)
    else:  # a stale config.json does not tell the model
        with pytest.raises(TableError, match="do not tell which are of one model"):
            read_runs(tmp_path, "loss", size=sizes)


def test_results_of_another_training(tmp_path: Path) -> None:
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        write_state(tmp_path / name, [{"eval_loss": 1.0}, {"train_runtime": 2.0}])
        results = {"train_runtime": seconds, "train_samples": 5, "eval_loss": 0.5}
        (tmp_path / name / "all_results.json").write_text(json.dumps(results))
    with pytest.raises(TableError, match=r"results in .*b are of another training"):
        read_runs(tmp_path, "loss", model={"a": "a", "b": "b"})


def test_events_of_two_runs_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for number, steps in enumerate((9, 4)):
        with SummaryWriter(str(tmp_path / "a"), filename_suffix=".new") as writer:
            for step in range(steps):
                writer.add_scalar("eval/loss", 1.0, step)
        (written,) = (tmp_path / "a").glob("*.new")
        written.rename(tmp_path / "a" / f"events.out.tfevents.{number}")
    with pytest.raises(TableError, match=r"steps of eval/loss in .*a go back"):
        read_runs(tmp_path)


def test_files_that_are_no_states(tmp_path: Path) -> None:
    path = tmp_path / "a" / "trainer_state.json"
    path.parent.mkdir()
    path.write_text("[1]")
    with pytest.raises(TableError, match="is no state of transformers' Trainer"):
        read_runs(tmp_path, "loss")
    end = {"train_runtime": "s", "train_samples_per_second": 1, "epoch": 1}
    for damaged in (
        {"log_history": None},
        {"log_history": [1]},
        {"log_history": [], "global_step": None},
        {"log_history": [end], "num_train_epochs": 1},
    ):
        path.write_text(json.dumps(damaged))
        with pytest.raises(TableError, match="is not as its tool writes it, or damaged"):
            read_runs(tmp_path, "loss")
    path.write_text('{"log_history": []}')
    (path.parent / "config.json").write_text("[]")
    with pytest.raises(TableError, match="a is not as its tool writes it, or damaged"):
        read_runs(tmp_path, "loss")
    path.write_text('{"log_history": [')
    with pytest.raises(ValueError, match=r"trainer_state\.json"):
        read_runs(tmp_path, "loss")


# MLflow -----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with zipfile.ZipFile(FILES / "mlruns.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "mlruns"


def test_an_mlflow_store(store: Path) -> None:
    with pytest.raises(TableError, match=r"'died' has no 'eval_accuracy'.*ignore=\['died'\]"):
        read_runs(store)
    check(read_runs(store, ignore=["died"]))
    check(read_runs(store, "accuracy", model="model_name_or_path", ignore=["died"]))
    earlier = read_runs(store, ignore=["died"])
    assert earlier.metric == "eval_accuracy"
    for path in store.rglob("meta.yaml"):
        if "run_name: died" in path.read_text():
            path.write_text(path.read_text().replace("stage: active", "stage: deleted"))
    check(read_runs(store))
    with pytest.raises(TableError, match="has no run 'died' to ignore; it has 'large-100'"):
        read_runs(store, ignore=["died"])


def test_a_damaged_mlflow_store(store: Path) -> None:
    for path in store.rglob("eval_accuracy"):
        path.write_text("1700000000 0.5")  # cut off before the step: whole enough
    assert read_runs(store, ignore=["died"]).losses.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    for path in store.rglob("eval_accuracy"):
        path.write_text("1700000000")
    with pytest.raises(TableError, match="is not as its tool writes it, or damaged"):
        read_runs(store, ignore=["died"])


def test_what_an_mlflow_store_says_of_runs(store: Path) -> None:
    """The last step counts, whatever the order of the lines; of a run that failed, nothing."""
    for path in store.rglob("eval_accuracy"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    check(read_runs(store, ignore=["died"]))
    for path in store.rglob("meta.yaml"):
        if "run_name: large-400" in path.read_text():
            path.write_text(path.read_text().replace("status: 3", "status: 4"))
    with pytest.raises(TableError, match=r"'large-400' has no 'eval_accuracy' .*did not finish"):
        read_runs(store, ignore=["died"])


def test_mlflow_search_runs() -> None:
    path = FILES / "mlflow_search_runs.csv"
    for source in (path, str(path), pd.read_csv(path)):
        with pytest.raises(TableError, match="'died' has no 'eval_accuracy'"):
            read_runs(source)
        check(read_runs(source, ignore=["died"]))
    frame = pd.read_csv(path)
    frame.loc[frame["tags.mlflow.runName"] == "small-400", "status"] = "RUNNING"
    with pytest.raises(TableError, match="'small-400' has no 'eval_accuracy'"):
        read_runs(frame, ignore=["died"])


def test_what_mlflow_writes_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.create_experiment("choosing")
    for (model, rows), accuracy in ACCURACIES.items():
        for seed in (0, 1):
            run = client.create_run(experiment, run_name=f"{model} {rows} {seed}").info.run_id
            for name, value in (("model", model), ("train_size", rows), ("seed", seed)):
                client.log_param(run, name, value)
            for step, value in enumerate((0.1, accuracy + 0.01 * (2 * seed - 1))):
                client.log_metric(run, "val/acc", value, step=step)
            client.set_terminated(run)
    table = read_runs(tmp_path / "mlruns", "acc")
    check(table)
    np.testing.assert_allclose(table.noise, 0.01)  # type: ignore[arg-type]


# TensorBoard ------------------------------------------------------------------------------------


def test_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for (model, rows), accuracy in ACCURACIES.items():
        writer = SummaryWriter(str(tmp_path / f"{model}_n={rows}_seed=0"))
        for step, value in enumerate((0.1, accuracy)):
            writer.add_scalar("eval/accuracy", value, step)
            writer.add_scalar("train/epoch", step, step)
        writer.add_hparams({"lr": 0.1}, {"hparam/accuracy": 0.0})  # a folder of its own inside
        writer.close()
    check(read_runs(tmp_path))
    check(read_runs(tmp_path, "eval_accuracy", model="^([a-z]+)", size=r"n=(\d+)", seed=r"=(\d)$"))
    with SummaryWriter(str(tmp_path / "x_n=9")) as writer:
        writer.add_scalar("train/loss", 1.0)
    with pytest.raises(TableError, match="measurements 'eval/accuracy', 'train/loss'; say which"):
        read_runs(tmp_path)
    with pytest.raises(TableError, match="'x_n=9' has no 'eval/accuracy'"):
        read_runs(tmp_path, "eval/accuracy")


def test_csv_files_of_tensorboards_page(tmp_path: Path) -> None:
    for (model, rows), accuracy in ACCURACIES.items():
        path = tmp_path / f"run-{model}_n={rows}-tag-eval_accuracy.csv"
        path.write_text(f"Wall time,Step,Value\n1700000000.5,10,0.1\n1700000009.5,20,{accuracy}\n")
    check(read_runs(tmp_path, "eval_accuracy"))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    check(read_runs(tmp_path))


# W&B --------------------------------------------------------------------------------------------


def test_the_table_of_wandb(tmp_path: Path) -> None:
    path = FILES / "wandb_runs.csv"
    with pytest.raises(TableError, match="measurements 'eval/accuracy', 'eval/loss', 'train/loss'"):
        read_runs(path)
    with pytest.raises(TableError, match=r"'late-dew-6' has no 'eval/accuracy'.*ignore="):
        read_runs(path, "accuracy")
    for source in (path, pd.read_csv(path)):
        table = read_runs(source, "accuracy", ignore=["late-dew-6"])
        assert table.names == ("small", "large") and table.sizes.tolist() == [100, 400]
        np.testing.assert_allclose(table.losses, [[0.49, 0.25], [0.4, 0.2]])
        assert table.noise is not None and table.noise[0, 0] == pytest.approx(0.01)
    frame = pd.read_csv(path)
    frame.loc[2, "State"] = "crashed"  # its numbers are those of some step before the last
    with pytest.raises(TableError, match="'calm-fog-3' has no 'eval/accuracy'"):
        read_runs(frame, "accuracy", ignore=["late-dew-6"])
    frame = pd.read_csv(path).assign(learning_rate=[1e-5, *[2e-5] * 5])
    with pytest.raises(TableError, match=r"no repeats: learning_rate is 1e-05 and 2e-05"):
        read_runs(frame, "accuracy", ignore=["late-dew-6"])
    with pytest.raises(TableError, match="'small' at size 100 with seed 0 twice"):
        read_runs(frame.assign(learning_rate=0, seed=0), "accuracy", ignore=["late-dew-6"])


def test_the_frame_of_wandbs_api(tmp_path: Path) -> None:
    """As W&B's guide to exporting makes it: lists of summaries, configs and names."""
    rows = [
        (
            {"eval/f1": value, "_step": 10, "_wandb": {"runtime": 9}, "note": "x"},
            {"model": model, "n_train": size, "lr": 0.1},
            f"run{n}",
        )
        for n, ((model, size), value) in enumerate(ACCURACIES.items())
    ]
    frame = pd.DataFrame(rows, columns=["summary", "config", "name"])
    check(read_runs(frame), ("small", "large"))
    frame.to_csv(tmp_path / "project.csv")
    check(read_runs(tmp_path / "project.csv"), ("small", "large"))
    with pytest.raises(TableError, match="summary or config of the run 'run0' is no dict"):
        read_runs(frame.assign(config="[1"))


# Others -----------------------------------------------------------------------------------------


def test_other_tables_are_read_by_read_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "learner,amount,eval_acc\n"
        + "".join(f"{model},{size},{value}\n" for (model, size), value in ACCURACIES.items())
    )
    check(read_runs(path, model="learner", size="amount"), ("small", "large"))
    with pytest.raises(TableError, match="expected a column's name"):
        read_runs(path, model={"a": "b"})
    with pytest.raises(TableError, match="value is 'mean'; expected 'last' or 'best'"):
        read_runs(path, value="mean")
    with pytest.raises(TableError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")


def test_names_that_do_not_tell_the_model() -> None:
    frame = pd.DataFrame(
        {"Name": ["sun", "sea"], "State": "finished", "rows": [1, 2], "loss": [2.0, 1.0]}
    )
    with pytest.raises(TableError, match=r"'sun', 'sea'.* do not tell which are of one model"):
        read_runs(frame)
    table = read_runs(frame, model={"sun": "a", "sea": "b"})
    assert table.names == ("a", "b") and np.isnan(table.losses).sum() == 2
    with pytest.raises(TableError, match="measurements 'eval_loss', 'val_loss'; say which"):
        read_runs(frame.assign(eval_loss=1.0, val_loss=1.0).drop(columns="loss"), "loss")
    with pytest.raises(TableError, match="'rows', 'n', any of which may be the number"):
        read_runs(frame.assign(n=[3, 4]), model={"sun": "a", "sea": "b"})


def test_the_last_of_two_numbers_in_a_name_is_the_size() -> None:
    names = [f"8-{model}-{rows}" for model in "ab" for rows in (8, 9)]
    frame = pd.DataFrame({"Name": names, "State": "finished", "rows": [8, 9] * 2, "loss": 1.0})
    assert read_runs(frame).names == ("8-a", "8-b")


def test_nothing_is_written(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    read_runs(store, ignore=["died"])
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert not os.path.exists("mlruns")
