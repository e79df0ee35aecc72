"""Live selections: figures worked out by hand; a small run; recorded runs give their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import live_selection, quoted
from benchmarks.live_selection import COLUMNS, PARTS, ROWS, SIZES, Replay
from jachess_ext.lab.live import LiveSettings, choice
from jachess_ext.lab.workbench.settings import Recipe
from python_tests.lab.live.tiny import save_decoder, save_model, write_rows

TRUTH = {"a": 0.2, "b": 0.3, "c": 0.5}


@pytest.mark.parametrize("name", ["live_choice", "selection_trial", "model_sweep", "word_attack"])
def test_recorded_runs_give_the_recorded_page(name: str) -> None:
    """`python -m benchmarks.quoted --update` makes them so."""
    if name == "selection_trial":
        pytest.importorskip("optuna", reason="optuna is not installed")
    assert quoted.PAGES[name]() == (quoted.RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_choices_have_the_figures_of_the_definition() -> None:
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
    runs = pd.DataFrame([shared | more | row for row in rows], columns=COLUMNS)
    found = {row["method"]: row for row in live_selection.judged(runs, "loss")}
    full = 3 * (9600 + 3)
    last, blend = found["subtuning"], found["blend"]
    assert last["chosen"] == "c" and last["best"] == "a" and last["place"] == 3
    assert last["regret"] == pytest.approx(150) and "said" not in last
    assert last["cost"] == pytest.approx(3 * (6 * 400 + 3) / full)
    assert blend["cost"] == pytest.approx(3 * (6 * 700 + 9) / full)
    assert 0 <= blend["inside_50"] <= blend["inside_90"] <= 3 and 0 < blend["said"] < 1
    assert found["modelsize"]["cost"] == 0
    lower = runs.replace({"true_accuracy": 0.8}, 0.6)
    found = {row["method"]: row for row in live_selection.judged(lower, "accuracy")}
    assert found["subtuning"]["chosen"] == "a" and found["subtuning"]["best"] == "b"
    assert found["subtuning"]["regret"] == pytest.approx(10) and found["subtuning"]["place"] == 2


def recorded(crossing: bool = False) -> Replay:
    """A trial, 6 FLOPs a row and 3 for judging; `crossing`: the best is last at first."""
    made: list[dict[str, Any]] = []
    for name, true in TRUTH.items():
        shared = {"data": "d", "seed": 0, "model": name, "parameters": 10, "accuracy": 0.5}
        scores = {"logme": true, "hscore": -true, "knn": -true}
        scores |= {f"ranker_{name}": -value for name, value in scores.items()}
        for size in (0, *SIZES):
            loss = true + 2 / size if size else 0.7
            row = {"rows": size, "part": 1.0, "dev_loss": loss, "training_flops": 6.0 * size}
            made.append(shared | row | {"features_flops": 5.0, "exponent": 9 - true} | scores)
        for part in PARTS:
            early = 1.0 - true if crossing and part < 1 / 4 else true
            row = {"rows": ROWS, "part": part, "dev_loss": early + 1 - part}
            known = {"true_loss": true, "true_accuracy": 1 - true} if part == 1 else {}
            made.append(shared | row | {"training_flops": 6.0 * ROWS * part} | known)
    return Replay(pd.DataFrame(made).assign(judging_flops=3.0))


def test_costs_and_regrets_of_the_trial_are_those_of_the_definition() -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    rows = [pd.Series(row) for row in live_selection.choices(recorded())]
    found = {(row.method, row.budget): row for row in rows}
    full = 3 * (6 * ROWS + 3)
    for size in SIZES:
        one = found["subtuning", str(size)]
        assert one.chosen == "a" and one.regret == 0 and one.accuracy_lost == 0
        assert one.cost == pytest.approx(3 * (6 * size + 3) / full)
        assert one.cost_with_winner == pytest.approx(one.cost + 1 / 3)
    assert found["blend", "1/8"].cost == pytest.approx(3 * (6 * (17 + 41 + 100) + 9) / full)
    read = 3 * (6 * (17 + 41 + 100) + 9 + 3)
    assert found["rectified", "1/8"].cost == pytest.approx(read / full)
    score = found["logme", ""]
    assert score.chosen == "c", "the higher the better"
    assert score.regret == pytest.approx(150) and score.accuracy_lost == pytest.approx(30)
    assert score.cost == pytest.approx(15 / full)
    assert found["TransformerRanker logme", ""].chosen == "a"
    assert found["nlpmetrics", ""].chosen == "c", "the lowest exponent"
    two = 3 * (6 * 158 + 9)  # three models on 17, 41, 100 rows, two of them on 200
    assert found["blend, promotion", "100 rows"].cost == pytest.approx(two / full)
    two += 2 * (6 * 200 + 3)
    assert found["blend, promotion", "200 rows"].cost == pytest.approx(two / full)
    asha = [row for row in rows if row.method == "asha, factor 2"]
    assert len(asha) == live_selection.ORDERS and {row.chosen for row in asha} == {"a"}
    # In the order a, b, c all but the first stop at the first rung.
    first, whole = 6 * ROWS * PARTS[0] + 3, 6 * ROWS + 3 * len(PARTS)
    assert min(row.cost for row in asha) == pytest.approx((whole + 2 * first) / full)
    assert all(row.cost == row.cost_with_winner for row in asha), "the winner has been trained"
    rows = [pd.Series(row) for row in live_selection.choices(recorded(crossing=True))]
    worst = max(row.regret for row in rows if row.method == "asha, factor 4")
    assert worst == pytest.approx(150), "the worst of all had the lowest loss at first"


@pytest.mark.slow
def test_from_models_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "zoo" / "encoder", 8, 1)
    save_decoder(tmp_path / "zoo" / "decoder", 8, 2, 20)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.csv", 130, 0)
    write_rows(tmp_path / "data" / "dev.csv", 30, 1)
    recipe = Recipe(epochs=1, batch_size=2, lr=5e-3, max_length=16)
    for name in ("CLASSES", "TEXT"):
        settings = LiveSettings(target=128, recipe=recipe, budget=0.5)
        monkeypatch.setattr(live_selection, name, settings)
    places = {"zoo": tmp_path / "zoo", "out": tmp_path / "out", "results": tmp_path / "results"}
    folders = (tmp_path / "data",)
    live_selection.main(**places, data=folders)
    live_selection.main(**places, text=folders)
    runs = pd.read_csv(tmp_path / "results" / "live_choice_runs.csv")
    text = runs[runs.data == "data as text"]
    assert set(text.model) == {"decoder", "random-decoder"} and set(text.rank_by) == {"bpb"}
    assert set(runs[runs.rank_by == "loss"].model) == {"encoder", "decoder"}, "earlier rows stay"
    truth = runs[runs.true_loss.notna()]
    assert (truth["rows"] == 128).all() and len(truth) == 4 and np.isfinite(truth.true_loss).all()
    page = (tmp_path / "results" / "live_choice.md").read_text(encoding="utf-8")
    assert page.count("of 2 truths") == 6
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("a finished run was repeated"))
    live_selection.main(**places, text=folders)
    assert (tmp_path / "results" / "live_choice.md").read_text(encoding="utf-8") == page
