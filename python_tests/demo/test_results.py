"""The table's rows and words, from figures made by hand."""

from __future__ import annotations

import html
import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jachess_ext.compare.metrics import reliability
from jachess_ext.demo.finetune import Log
from jachess_ext.demo.judge import DELTAS
from jachess_ext.demo.main import print_table
from jachess_ext.demo.options import Method
from jachess_ext.demo.results import Outcome, Run, in_short, table
from jachess_ext.demo.write import write_outcome

PROBABILITIES = np.array([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]])
LABELS = np.array([0, 1, 1])


def judgement(score: float, brier: float) -> dict[str, Any]:
    return {
        "score": score,
        "brier": brier,
        "ece": 0.1,
        "corrupted": {"0.1": score - 0.1, "0.2": score - 0.2},
        "noisy": {str(d): score - 0.1 * n for n, d in enumerate(DELTAS)},
        "jacobian": [10.0, 20.0],
        "hessian": [30.0, 40.0],
        "reliability": vars(reliability(PROBABILITIES, LABELS)),
    }


def run(method: Method, seed: int, score: float, brier: float, seconds: list[float]) -> Run:
    return Run(method, seed, Log([{"task": 1.0}] * len(seconds), seconds), judgement(score, brier))


@pytest.fixture
def outcome() -> Outcome:
    runs = [
        run("none", 0, 0.5, 0.6, [1.0, 2.0, 1.0]),
        run("train", 0, 0.6, 0.5, [4.0, 4.0, 3.0]),
        run("none", 1, 0.7, 0.4, [1.0, 1.0, 1.0]),
        run("train", 1, 0.6, 0.3, [3.0, 5.0, 4.0]),
        run("none", 2, 0.6, 0.5, [1.0, 1.0, 1.0]),
        run("train", 2, 0.7, 0.2, [4.0, 4.0, 4.0]),
    ]
    return Outcome("<b>task</b> & more", "accuracy", runs, ([1.0, 2.0], [3.0, 4.0]), 0.5, {"a": 1})


def test_cells_are_mean_and_sample_spread(outcome: Outcome) -> None:
    rows = {row.title: row for row in table(outcome)}
    assert rows["accuracy"].cell("none") == "0.600 ± 0.100"
    assert rows["Brier score"].cell("train") == "0.333 ± 0.153"
    assert rows["accuracy, 10% tokens unknown"].values["none"] == pytest.approx([0.4, 0.6, 0.5])
    assert rows["accuracy, noise δ = 1 rms"].values["none"] == pytest.approx([0.3, 0.5, 0.4])
    assert rows["Σ‖J‖, before 3"].values["train"] == [30.0, 30.0, 30.0]
    assert rows["Σ‖H‖, before 7"].values["train"] == [70.0, 70.0, 70.0]


def test_ratio_is_the_median_over_turns(outcome: Outcome) -> None:
    rows = {row.title: row for row in table(outcome)}
    assert rows["seconds per step"].values == {"none": [1, 1, 1], "train": [4, 4, 4]}
    assert rows["ratio to plain"].values["train"] == pytest.approx([3.0, 4.0, 4.0])
    assert rows["ratio to plain"].values["none"] == [1.0, 1.0, 1.0]


def test_what_was_found_comes_first(outcome: Outcome, tmp_path: Path) -> None:
    """Differences .1 −.1 .1 of the score, −.1 −.1 −.3 of Brier; t of two degrees is 4.303."""
    score, brier, cost = in_short(outcome, table(outcome))
    half = 4.303 * np.std([10, -10, 10], ddof=1) / 3**0.5
    assert score.startswith("Score × 100, the task, 3 seeds: not told apart from the plain model: ")
    assert f"JacHess-train (+3.3 ± {half:.1f})" in score
    half = 4.303 * np.std([0.1, 0.1, 0.3], ddof=1) / 3**0.5
    assert f"not told apart from the plain model: JacHess-train (−0.167 ± {half:.3f})" in brier
    assert cost == "A step took 3.7 (JacHess-train) times as long as a plain one."
    page = write_outcome(outcome, tmp_path)[0].read_text(encoding="utf-8")
    places = [page.index(html.escape(text)) for text in (score, brier, cost)]
    assert places == sorted(places) and places[-1] < page.index("<table>")
    assert page.index("<figure>") < page.index("<table>"), "the forests"


def test_without_plain_runs_nothing_is_compared(outcome: Outcome, tmp_path: Path) -> None:
    alone = replace(outcome, runs=outcome.of("train"))
    assert in_short(alone, table(alone)) == []
    assert "Seed by seed" not in write_outcome(alone, tmp_path)[0].read_text(encoding="utf-8")


def test_seeds_to_the_better(outcome: Outcome) -> None:
    rows = {row.title: row for row in table(outcome)}
    assert rows["accuracy"].compared("train").startswith("2 of 3, p ")
    assert rows["Brier score"].compared("train").startswith("3 of 3, p ")
    assert rows["Σ‖J‖, before 3"].compared("train") == "0 of 3, p 1.00", "none is lower"


def test_p_values_are_mann_whitney(outcome: Outcome) -> None:
    rows = {row.title: row for row in table(outcome)}
    # Brier .5 .3 .2 against .6 .4 .5 with one tie: far from significant, as three seeds must be
    assert 0.1 <= rows["Brier score"].p["train"] <= 1.0
    assert rows["seconds per step"].p == {}


def test_written_files(outcome: Outcome, tmp_path: Path) -> None:
    written = write_outcome(outcome, tmp_path / "new" / "out")
    names = {"report.html", "results.json", "reliability.png", "score_over_noise.png", "norms.png"}
    assert {path.name for path in written} == names == {p.name for p in written[0].parent.iterdir()}
    page = written[0].read_text(encoding="utf-8")
    assert "&lt;b&gt;task&lt;/b&gt; &amp; more" in page and "<b>task" not in page
    found = json.loads((written[0].parent / "results.json").read_text(encoding="utf-8"))
    assert [run["score"] for run in found["runs"]] == [0.5, 0.6, 0.7, 0.6, 0.6, 0.7]
    assert found["table"][0]["values"] == {"none": [0.5, 0.7, 0.6], "train": [0.6, 0.6, 0.7]}


def test_table_fits_eighty_columns(outcome: Outcome) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        print_table(outcome, width=80)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("0.600 ± 0.100" in line for line in lines)
    words = " ".join(line.strip() for line in lines)
    assert all(text in words for text in in_short(outcome, table(outcome)))
