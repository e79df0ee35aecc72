"""The trial: replayed choices against figures worked out by hand; a small one from end to end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModel

from benchmarks import selection_trial
from benchmarks.selection_trial import COLUMNS, PARTS, ROWS, SIZES, Replay
from jachess_ext.live import choice
from python_tests.live.tiny import save_model, write_rows

NAMES = ("good", "bad", "worse")
TRUTH = {"good": 0.2, "bad": 0.4, "worse": 0.5}


def _runs(crossing: bool = False) -> pd.DataFrame:
    """Three models, 6 FLOPs a row and 3 for judging; `crossing`: the best is last at first."""
    made = []

    def add(name: str, rows: int, part: float, loss: float, **more: float) -> None:
        flops = 6.0 * rows * part
        given = ["d", 0, name, 10, rows, part, loss, 0.5, flops, 3.0, 0.0]
        made.append(dict(zip(COLUMNS, given, strict=False)) | more)

    for name in NAMES:
        scores = {f"{of}{score}": TRUTH[name] for of in ("", "ranker_") for score in ("logme",)}
        rest = {
            f"{of}{score}": -TRUTH[name] for of in ("", "ranker_") for score in ("hscore", "knn")
        }
        add(name, 0, 1.0, 0.7, features_flops=5.0, exponent=9 - TRUTH[name], **scores, **rest)
        for size in SIZES:
            add(name, size, 1.0, TRUTH[name] + 2 / size)
        for part in PARTS:
            early = 1.0 - TRUTH[name] if crossing and part < 1 / 4 else TRUTH[name]
            true = {"true_loss": TRUTH[name], "true_accuracy": 1 - TRUTH[name]}
            add(name, ROWS, part, early + 1 - part, **(true if part == 1 else {}))
    return pd.DataFrame(made, columns=COLUMNS)


def _choices(replay: Replay) -> list[Any]:
    return list(pd.DataFrame(selection_trial.choices(replay)).itertuples())


def test_costs_and_regrets_are_those_of_the_definition() -> None:
    full = 3 * (6 * ROWS + 3)
    found = {(c.method, c.budget): c for c in _choices(Replay(_runs()))}
    for size in SIZES:
        one = found["subtuning", str(size)]
        assert one.chosen == "good" and one.regret == 0 and one.accuracy_lost == 0
        assert one.cost == pytest.approx(3 * (6 * size + 3) / full)
        assert one.cost_with_winner == pytest.approx(one.cost + 1 / 3)
    for method in ("blend", "ats"):
        one = found[method, "1/8"]
        assert one.cost == pytest.approx(3 * (6 * (17 + 41 + 100) + 9) / full)
        assert one.chosen == "good"
    read = 3 * (6 * (17 + 41 + 100) + 9 + 3)
    assert found["rectified", "1/8"].cost == pytest.approx(read / full)
    assert found["logme", ""].chosen == "worse", "the higher the better"
    assert found["logme", ""].regret == pytest.approx(150)
    assert found["logme", ""].accuracy_lost == pytest.approx(30)
    assert found["logme", ""].cost == pytest.approx(15 / full)
    assert found["TransformerRanker knn", ""].chosen == "good"
    assert found["nlpmetrics", ""].chosen == "worse", "the lowest exponent"
    assert found["nlpmetrics", ""].cost == 0
    two = 3 * (6 * 158 + 9)  # three models on 17, 41, 100 rows, two of them on 200
    assert found["blend, promotion", "100 rows"].cost == pytest.approx(two / full)
    two += 2 * (6 * 200 + 3)
    assert found["blend, promotion", "200 rows"].cost == pytest.approx(two / full)


def test_asha_stops_what_is_behind() -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    replay = Replay(_runs())
    found = [c for c in _choices(replay) if c.method == "asha, factor 2"]
    assert len(found) == selection_trial.ORDERS and {c.chosen for c in found} == {"good"}
    full = 3 * (6 * ROWS + 3)
    first = 6 * ROWS * PARTS[0] + 3
    whole = 6 * ROWS + 3 * len(PARTS)
    # In the order good, bad, worse all but the first stop at the first rung.
    assert min(c.cost for c in found) == pytest.approx((whole + 2 * first) / full)
    assert all(c.cost == c.cost_with_winner for c in found), "the winner has been trained"


def test_asha_loses_what_starts_slowly() -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    found = _choices(Replay(_runs(crossing=True)))
    asha = [c.regret for c in found if c.method == "asha, factor 4"]
    assert max(asha) == pytest.approx(150), "the worst of all had the lowest loss at first"


def test_accuracies_choose_as_well() -> None:
    """Every model's accuracy is .5 on the way, and what is missing of it is forecast."""
    replay = Replay(_runs(), "accuracy")
    assert replay.height("bad", 41) == 0.5
    assert replay.best.tolist() == [True, False, False]
    assert replay.forecast == pytest.approx([0.2, 0.4, 0.5])


def test_recorded_runs_give_the_recorded_tables(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    shutil.copy(selection_trial.RESULTS / "selection_trial_runs.csv", tmp_path)
    selection_trial.main(["--results", str(tmp_path)])
    for name in ("selection_trial.csv", "selection_trial.md"):
        assert (tmp_path / name).read_text() == (selection_trial.RESULTS / name).read_text()


def test_planned_costs_are_rows_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of six words and two marks: a row is judged for a third of its training, an epoch."""
    monkeypatch.setattr(selection_trial, "_ENCODERS", ((1, False), (1, True)))
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.csv", 1600, 0)
    write_rows(tmp_path / "data" / "dev.csv", 300, 1)
    encoder = save_model(tmp_path / "encoder", 8, 0)
    given = ["--plan", "--encoder", str(encoder), "--data", str(tmp_path / "data")]
    folders = ["--out", str(tmp_path / "out"), "--results", str(tmp_path)]
    found = list(selection_trial.main([*given, *folders]).itertuples())
    assert (tmp_path / "selection_cost.csv").is_file()
    assert [(one.rows, one.epochs) for one in found] == [(1600, 5.0), (800, 5.0), (800, 3.0)]
    for one in found:
        sizes = list(map(int, one.sizes.split()))
        judging = one.judged / (3 * one.epochs)
        full = one.rows + judging
        assert one.training == pytest.approx(sum(sizes) / full, rel=1e-4)
        assert one.cost == pytest.approx((sum(sizes) + len(sizes) * judging) / full, rel=1e-4)
        assert one.cost < 0.2 and not (tmp_path / "out" / "data-0").exists()


@pytest.mark.slow
def test_from_models_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    pytest.importorskip("transformer_ranker", reason="transformer-ranker is not installed")
    monkeypatch.setattr(selection_trial, "ROWS", 512)
    monkeypatch.setattr(selection_trial, "SIZES", (16, 32, 64))
    monkeypatch.setattr(selection_trial, "LADDERS", {"1/8": (16, 32, 64)})
    monkeypatch.setattr(selection_trial, "_ENCODERS", ((1, False), (1, True)))
    for name, width in (("narrow", 8), ("wide", 16)):
        save_model(tmp_path / "zoo" / name, width, width)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.csv", 520, 0)
    write_rows(tmp_path / "data" / "dev.csv", 300, 1)
    encoder = tmp_path / "zoo" / "wide"
    arguments = [
        *("--zoo", str(tmp_path / "zoo"), "--encoder", str(encoder)),
        *("--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")),
        *("--epochs", "1", "--batch-size", "2", "--lr", "5e-3", "--max-length", "16"),
        *("--results", str(tmp_path / "results")),
    ]
    found = selection_trial.main(arguments)
    cut = AutoModel.from_pretrained(tmp_path / "out" / "candidates" / "minilm-1")
    whole = AutoModel.from_pretrained(encoder)
    assert all(map(torch.equal, cut.parameters(), whole.parameters())), "one layer of one"
    drawn = AutoModel.from_pretrained(tmp_path / "out" / "candidates" / "random-1")
    assert not torch.equal(drawn.embeddings.word_embeddings.weight, next(whole.parameters()))
    runs = list(pd.read_csv(tmp_path / "results" / "selection_trial_runs.csv").itertuples())
    assert len(runs) == 4 * (1 + 3 + len(PARTS))
    last = next(run for run in runs if run.rows == 512 and run.part == 1)
    half = next(run for run in runs if run.rows == 512 and run.part == 1 / 2)
    assert half.training_flops == pytest.approx(last.training_flops / 2, rel=1e-3)
    assert abs(last.true_loss - last.dev_loss) < 0.2
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("a finished run was repeated"))
    again = selection_trial.main(["--results", str(tmp_path / "results")])
    assert again.chosen.tolist() == found.chosen.tolist()
    assert "Chosen by accuracy" in (tmp_path / "results" / "selection_trial.md").read_text("utf-8")
