"""The page of a selection: its words and figures are those of the selection, and can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext._text import number_text, percent, scientific_text
from jachess_ext.lab.live import report
from jachess_ext.scaling import LossTable, Selection, read_table, select
from python_tests.browser import assert_shown
from python_tests.lab.compare.pages import HOSTILE, Page, assert_legible
from python_tests.scaling import tables

BUDGET, TARGET = 25600.0, 1638400.0


def losses(models: int = 6, names: tuple[str, ...] = ()) -> LossTable:
    """Return a table of the sizes 0, 400, 1600 … the target."""
    table = tables.population(0, models=models)[0]
    table = replace(table, sizes=table.sizes[::2], losses=table.losses[:, ::2])
    return replace(table, names=names or table.names)


def page_of(path: Path, selection: Selection, **given: Any) -> str:
    settings = {"settings": {"table": "losses.csv"}, **given}
    report.write_selection(path, selection, "Which model", ["Read."], **settings)
    return path.read_text(encoding="utf-8")


def test_the_ranking_is_that_of_the_selection(tmp_path: Path) -> None:
    selection = select(losses(), BUDGET, TARGET, tokens=1)
    text = page_of(tmp_path / "page.html", selection)
    cells = [re.findall(r"<t[hd]>([^<]*)<", row) for row in text.split("<tr>")[1:]]
    found = pd.DataFrame(cells[1 : 1 + len(selection.names)], columns=cells[0])
    frame = selection.to_frame()
    assert found["model"].tolist() == frame["name"].tolist()
    assert found["loss"].tolist() == list(map(number_text, frame["predicted"]))
    ends = [
        f"{number_text(low)} … {number_text(high)}"
        for low, high in zip(frame["low"], frame["high"], strict=True)
    ]
    assert found["90 % interval"].tolist() == ends
    assert found["P(best)"].tolist() == list(map(percent, frame["prob_best"]))
    assert found["of all in full"].map(unescape).tolist() == list(map(percent, frame["cost"]))
    assert cells[0][:3] == ["", "model", "P(best)"], "what a narrow screen shows first"
    assert selection.advice in text and "losses.csv" in text
    assert len(selection.notes) == 1 and selection.notes[0] in text
    assert found["measured"].tolist() == list(map(number_text, frame["measured"]))


WAVE = np.random.default_rng(1).normal(0, 1, 20)


@pytest.mark.parametrize(("gap", "noise"), [(0.0, 0.0), (0.01, 0.02), (3.0, 0.0)])
def test_the_answer_is_as_sure_as_its_advice(gap: float, noise: float, tmp_path: Path) -> None:
    table = replace(losses(2), noise=None)
    first = table.losses[0]
    second = first * np.exp(gap + noise * WAVE[: len(first)])
    selection = select(replace(table, losses=np.stack([first, second])), BUDGET, TARGET)
    text = page_of(tmp_path / "page.html", selection)
    best, decided = selection.ranking[0], selection.is_decided
    assert (f"{best} is the model to fine-tune on 1,638,400 examples" in text) == decided
    chance = percent(selection.best_probabilities.max())
    undecided = f"{best} is most likely the best on 1,638,400 examples ({chance}"
    assert (undecided in text) == (selection.has_signal and not decided)
    assert ("No model is known to be better than another" in text) == (gap == 0)
    assert decided == (gap == 3)


@pytest.mark.parametrize("method", ["blend", "zeroshot", "modelsize", "subtuning"])
def test_methods_with_and_without_forecasts(method: str, tmp_path: Path) -> None:
    selection = select(losses(), BUDGET, TARGET, method)
    text = page_of(tmp_path / "page.html", selection)
    assert f"by the method {method}" in text
    assert text.count("<svg") == (selection.forecast.predicted is not None)
    assert ("90 % interval</th>" in text) == selection.has_intervals
    assert (", with its 90 % interval." in text) == selection.has_intervals


def test_scores_are_shown_as_scores(tmp_path: Path) -> None:
    table = losses()
    scores = pd.DataFrame(100 - 10 * table.losses, list(table.names), table.sizes)
    selection = select(read_table(scores, metric="accuracy"), BUDGET, TARGET)
    text = page_of(tmp_path / "page.html", selection)
    plain = select(table, BUDGET, TARGET)
    assert selection.ranking == plain.ranking
    assert number_text(100 - 10 * plain.predicted_losses.min()) in text


def test_costs_are_shares_of_the_last_and_stops_have_reasons(tmp_path: Path) -> None:
    selection = select(losses(), BUDGET, TARGET, tokens=1)
    text = page_of(
        tmp_path / "page.html",
        selection,
        costs=[("judging", 2e9), ("all in full", 8e10)],
        stops={"a": "failed at 8 rows: <not finite>"},
    )
    assert "<td>2.00 × 10⁹</td><td>2.5 %</td>" in text and "<td>100 %</td>" in text
    assert "failed at 8 rows: &lt;not finite&gt;" in text
    assert "Cost</h2>" in text and "runs ended</h2>" in text
    assert "Cost</h2>" not in page_of(tmp_path / "page.html", selection)
    selection = select(losses(), BUDGET, TARGET)  # FLOPs are not known
    costs = [("a", 2e9), ("in full", 8e10)]
    text = page_of(tmp_path / "page.html", selection, costs=costs, in_flops=False)
    assert "<td>2.5 %</td>" in text and "FLOPs" not in text


@pytest.mark.parametrize("count", [2, 14])
def test_figures_can_be_read(count: int) -> None:
    names = tuple(f"organisation-{n}/a-model-with-a-very-long-name-{n}" for n in range(count))
    figure = report._curves(select(losses(count, names), BUDGET, TARGET))
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(set(shown)) == count and all(len(name) <= 28 for name in shown)
    assert_legible(figure)


def test_every_text_of_the_user_is_escaped(tmp_path: Path) -> None:
    names = tuple(f"{n} {HOSTILE}" for n in range(3))
    selection = select(losses(3, names), BUDGET, TARGET)
    given = {"stops": dict.fromkeys(names, HOSTILE), "settings": {"a": HOSTILE}}
    page = Page(page_of(tmp_path / "page.html", selection, **given))
    assert "script" not in page.tags
    assert all(page.text.count(name) >= 2 for name in names)


@pytest.mark.parametrize("end", [np.inf, np.nan])
def test_intervals_without_an_end(end: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that leaves the target open: the interval is left out, the rest is drawn."""
    ends = Selection.interval_ends

    def without(selection: Selection, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        low, high = ends(selection, level)
        return low, np.array([end, *high[1:]])

    monkeypatch.setattr(Selection, "interval_ends", without)
    assert_legible(report._curves(select(losses(), BUDGET, TARGET)))


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    names = tuple(f"model <b>{n}</b>" for n in range(9))
    page_of(tmp_path / "r.html", select(losses(9, names), BUDGET, TARGET))
    assert assert_shown(tmp_path / "r.html", tmp_path) == 1


def test_texts() -> None:
    assert report._letters("$a$") == r"\$a\$"
    assert (
        report._letters("x" * 40, 11) == "xxxxx…xxxxx" and report._letters("x" * 11, 11) == "x" * 11
    )
    shares = (0.0, 1e-5, 0.004, 0.314, 0.99, 0.9987, 1.0, np.nan)
    expected = ["0.0 %", "< 0.1 %", "0.4 %", "31 %", "99 %", "99.9 %", "100.0 %", "–"]
    assert [percent(p) for p in shares] == expected
    assert [number_text(x) for x in (0.25, 1500, 2e4, np.inf)] == ["0.2500", "1,500", "20,000", "–"]
    powers = {1.234e15: "1.23 × 10¹⁵", 9.999e-4: "1.00 × 10⁻³", 0.0: "0", 1.0: "1.00 × 10⁰"}
    assert {value: scientific_text(value) for value in powers} == powers
