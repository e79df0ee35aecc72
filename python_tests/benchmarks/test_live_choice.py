"""Default selections of tiny models: figures against those of the definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import live_choice
from jachess_ext.compare.settings import Recipe
from jachess_ext.live import LiveSettings, choice
from python_tests.live.tiny import save_decoder, save_model, write_rows

TRUTH = {"a": 0.2, "b": 0.3, "c": 0.5}


def recorded() -> pd.DataFrame:
    """Losses of 100, 200 and 400 rows, 6 FLOPs a row and 3 for judging; c is the best below."""
    rows: list[dict[str, Any]] = []
    for name, true in TRUTH.items():
        for size in (100, 200, 400):
            loss = true + 20 / size if name != "c" else 0.1
            row = {"model": name, "rows": size, "loss": loss, "accuracy": 1 - true}
            rows.append(row | {"training_flops": 6.0 * size})
        row = {"model": name, "rows": 1600, "true_loss": true, "true_accuracy": 1 - true}
        rows.append(row | {"training_flops": 9600.0})
    shared = {"data": "d", "seed": 0, "rank_by": "loss", "judged": 80, "target": 1600}
    more = {"parameters": 10, "judging_flops": 3.0, "seconds": 1.0, "commit": "x"}
    return pd.DataFrame([shared | more | row for row in rows], columns=live_choice.COLUMNS)


def test_figures_are_those_of_the_definition() -> None:
    found = {row["method"]: row for row in live_choice.judged(recorded(), "loss")}
    full = 3 * (9600 + 3)
    last = found["subtuning"]
    assert last["chosen"] == "c" and last["best"] == "a" and last["place"] == 3
    assert last["regret"] == pytest.approx(150) and "said" not in last
    assert last["cost"] == pytest.approx(3 * (6 * 400 + 3) / full)
    blend = found["blend"]
    assert blend["cost"] == pytest.approx(3 * (6 * 700 + 9) / full)
    assert 0 <= blend["inside_50"] <= blend["inside_90"] <= 3 and 0 < blend["said"] < 1
    assert found["modelsize"]["cost"] == 0
    found = {row["method"]: row for row in live_choice.judged(recorded(), "accuracy")}
    assert {row["regret"] for row in found.values()} == {0.0} and found["blend"]["inside_90"] == 3
    found = {
        row["method"]: row
        for row in live_choice.judged(recorded().replace({"true_accuracy": 0.8}, 0.6), "accuracy")
    }
    assert found["subtuning"]["chosen"] == "a" and found["subtuning"]["best"] == "b"
    assert found["subtuning"]["regret"] == pytest.approx(10) and found["subtuning"]["place"] == 2


def test_from_models_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "zoo" / "encoder", 8, 1)
    save_decoder(tmp_path / "zoo" / "decoder", 8, 2, 20)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.csv", 130, 0)
    write_rows(tmp_path / "data" / "dev.csv", 30, 1)
    recipe = Recipe(epochs=1, batch_size=2, lr=5e-3, max_length=16)
    for name in ("CLASSES", "TEXT"):
        settings = LiveSettings(target=128, recipe=recipe, budget=0.5)
        monkeypatch.setattr(live_choice, name, settings)
    where = ["--zoo", str(tmp_path / "zoo"), "--out", str(tmp_path / "out")]
    results = ["--results", str(tmp_path / "results")]
    live_choice.main([*where, *results, "--data", str(tmp_path / "data")])
    frame = live_choice.main([*where, *results, "--text", str(tmp_path / "data")])
    assert frame.data.unique().tolist() == ["data", "data as text"], "earlier rows stay"
    runs = pd.read_csv(tmp_path / "results" / "live_choice_runs.csv")
    text = runs[runs.data == "data as text"]
    assert set(text.model) == {"decoder", "random-decoder"} and set(text.rank_by) == {"bpb"}
    assert set(runs[runs.rank_by == "loss"].model) == {"encoder", "decoder"}
    truth = runs[runs.true_loss.notna()]
    assert (truth["rows"] == 128).all() and len(truth) == 4 and np.isfinite(truth.true_loss).all()
    page = (tmp_path / "results" / "live_choice.md").read_text(encoding="utf-8")
    assert page.count("of 2 truths") == 6
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("a finished run was repeated"))
    again = live_choice.main(results)
    assert again.chosen.tolist() == frame.chosen.tolist()


def test_recorded_runs_give_the_recorded_tables(tmp_path: Path) -> None:
    runs = pd.read_csv(live_choice.RESULTS / "live_choice_runs.csv")
    live_choice.redraw(runs, tmp_path)
    for name in ("live_choice.csv", "live_choice.md"):
        assert (tmp_path / name).read_text() == (live_choice.RESULTS / name).read_text()
