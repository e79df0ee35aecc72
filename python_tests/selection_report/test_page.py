"""The page: its words and figures, escaped, whole, and the same in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jachess_ext.evaluation.report import Section, to_html
from jachess_ext.scaling import coverage, log_rmse, pear_corr, rel_acc, select
from jachess_ext.selection_report.from_table import study_of_table
from jachess_ext.selection_report.page import (
    advice,
    answer,
    ranking_table,
    scientific,
    sections,
    write_page,
)
from jachess_ext.selection_report.study import Study
from python_tests.browser import assert_shown
from python_tests.evaluation.test_report import Page
from python_tests.selection_report import studies


@pytest.fixture(scope="module")
def study() -> Study:
    return studies.full_study()


def titles(study: Study) -> list[str]:
    return [section.title for section in sections(study)]


def find(study: Study, title: str) -> Section:
    return next(section for section in sections(study) if section.title == title)


def test_everything_is_there(study: Study) -> None:
    assert titles(study) == [
        *("Answer", "Predictions", "Curves", "Ranking quality and cost", "Cost", "Kernels"),
        *("Why each model's runs ended", "More", "Settings"),
    ]


def test_every_text_of_the_user_is_escaped() -> None:
    names = tuple(f"{n} {studies.HOSTILE}" for n in range(3))
    made = studies.full_study(names)
    made = replace(made, data=studies.HOSTILE, stop=studies.HOSTILE, settings=studies.HOSTILE)
    page = Page(to_html(made.title, sections(made)))
    assert "script" not in page.tags
    assert all(page.text.count(name) >= 4 for name in names)
    assert all(link.startswith("data:image/png;base64,") for link in page.links) and page.links


def test_the_answer(study: Study) -> None:
    best = study.candidates[0]
    text = answer(study)
    assert text.startswith(f"{best.label} is the model to fine-tune on 1,638,400 examples")
    assert f"{best.predicted:#.4g} (90 % interval {best.low:#.4g} to {best.high:#.4g})" in text
    lowest = min(study.candidates, key=lambda one: one.truth)
    expected = "it is the best" if lowest is best else f"{lowest.label} is the best"
    assert f"Measured in full, {expected}" in text
    chances = {one.label: one.prob_best for one in study.candidates[1:]}
    for label, chance in chances.items():
        assert (f"{label} (" in text.partition("Measured")[0]) == (chance >= 0.05)


def test_the_advice_follows_from_what_is_known(study: Study) -> None:
    first, second, *_ = study.candidates
    sizes = first.sizes

    def text(ahead: bool = True, chance: float = 0.7, **more: Any) -> str:
        one = replace(first, losses=np.full(len(sizes), 1.0), sizes=sizes, prob_best=chance)
        other = replace(second, losses=np.full(len(sizes), 1.1 if ahead else 0.9), sizes=sizes)
        given = replace(study, candidates=[one, other], stop=None, **more)
        return advice(given)[0]

    assert "too: the choice does not hang" in text()
    assert f"{second.label} is ahead: the choice hangs on" in text(ahead=False)
    assert "No model is clearly" in text(chance=0.49) and "No model is clearly" not in text()
    spent, *_, full = study.spending
    assert f"This cost {100 * spent.flops / full.flops:.3g} % of" in text()
    assert "rough guide" not in text()
    live = replace(study, stop="every planned size was run")
    assert "rough guide" in advice(live)[0] and advice(live)[0] == sections(live)[0].paragraphs[1]
    none = replace(first, predicted=None, low=None, high=None, prob_best=None)
    assert advice(replace(study, candidates=[none], spending=())) == []


def test_rivals_come_most_probable_first(study: Study) -> None:
    chances = (0.5, 0.06, 0.3, 0.04, 0.07, 0.03)
    pairs = zip(study.candidates, chances, strict=True)
    rows = [replace(one, prob_best=chance, label=f"m{chance}") for one, chance in pairs]
    text = answer(replace(study, candidates=rows))
    assert "probability 50 %; also in question: m0.3 (30 %), m0.07 (7 %), m0.06 (6 %)." in text


def test_the_ranking_is_that_of_the_selection(study: Study) -> None:
    losses = studies.table()
    found = select(losses, studies.BUDGET, studies.TARGET)
    shown = ranking_table(study)
    for place, (row, record) in enumerate(zip(shown.rows, found.rows(0.9), strict=True), start=1):
        cells = dict(zip(shown.header, row, strict=True))
        assert cells["model"] == f"{place}. {record['name']}"
        assert cells["at 1,638,400"] == f"{record['predicted']:#.4g}"
        assert cells["90 % interval"] == f"{record['low']:#.4g} … {record['high']:#.4g}"
        truth = losses.losses_at(studies.TARGET)[losses.names.index(record["name"])]
        assert cells["measured"] == f"{truth:#.4g}"


def test_the_selection_is_judged_by_the_metrics(study: Study) -> None:
    losses = studies.table()
    truth = losses.losses_at(studies.TARGET)
    found = select(losses, studies.BUDGET, studies.TARGET)
    (row,) = find(study, "Ranking quality and cost").tables[0].rows
    assert list(row) == [
        "blend",
        f"{pear_corr(found.predicted_losses, truth):.1f}",
        f"{rel_acc(found.scores, truth):.1f}",
        f"{log_rmse(found.predicted_losses, truth):.3f}",
        f"{coverage(*found.interval_ends(0.9), truth):.0f} %",
    ]


def test_a_missing_interval_is_a_dash(study: Study) -> None:
    rows = [replace(study.candidates[0], low=None, high=None), *study.candidates[1:]]
    made = replace(study, candidates=rows)
    judged = find(made, "Ranking quality and cost").tables[0]
    assert "RMSE of ln loss" in judged.header and len(judged.header) == 4
    assert "interval" not in answer(made).partition(", by the method")[0]
    rows = [*study.candidates[:-1], replace(study.candidates[-1], low=None, high=None)]
    assert "– … –" in ranking_table(replace(study, candidates=rows)).rows[-1]


def test_the_cost_is_that_of_the_selection(study: Study) -> None:
    found = select(studies.table(), studies.BUDGET, studies.TARGET)
    rows = find(study, "Cost").tables[0].rows
    assert [row[1] for row in rows] == [
        scientific(found.flops),
        scientific(found.full_flops * studies.BUDGET / studies.TARGET),
        scientific(found.full_flops),
    ]
    assert rows[1][2] == f"{100 * studies.BUDGET / studies.TARGET:.3g} %" and rows[2][2] == "100 %"


def test_losses_beyond_the_budget_change_no_forecast() -> None:
    losses = studies.table()
    hidden = losses.losses.copy()
    hidden[:, losses.sizes > studies.BUDGET] = np.nan
    blind = studies.of(replace(losses, losses=hidden))
    assert "How early the ranking settled" in titles(blind)
    assert "measured" not in ranking_table(blind).header
    for one, other in zip(blind.candidates, studies.study().candidates, strict=True):
        assert (one.name, one.predicted, one.low) == (other.name, other.predicted, other.low)
        assert one.truth is None and other.truth is not None
        assert one.forecast is not None and other.forecast is not None
        np.testing.assert_array_equal(one.forecast.middle, other.forecast.middle)
        assert len(one.kept_aside[0]) == 0 and len(other.kept_aside[0]) == 3


def test_a_forecast_ends_at_the_prediction() -> None:
    for method in ("blend", "ats", "rectified"):
        for one in studies.study(method=method).candidates:
            band = one.forecast
            assert band is not None and band.low is not None and band.high is not None
            ends = (band.middle[-1], band.low[-1], band.high[-1])
            assert ends == (one.predicted, one.low, one.high)
            assert (np.diff(band.high / band.low) > 0).all(), "farther is less sure"


@pytest.mark.parametrize("method", ["zeroshot", "modelsize", "subtuning"])
def test_methods_without_forecasts(method: str) -> None:
    made = studies.study(method=method)
    assert all(one.forecast is None for one in made.candidates)
    assert ("Predictions" in titles(made)) == (method != "modelsize")
    assert "interval" not in answer(made) and method in answer(made)


def test_references_move_the_target_alone() -> None:
    losses = studies.table()
    names = losses.names[:3]
    found = select(losses, studies.BUDGET, studies.TARGET, references=names)
    made = study_of_table(losses, found, "losses.csv", references=names)
    assert all(one.forecast is None and one.low is not None for one in made.candidates)
    assert "Curves" in titles(made) and names[0] in made.settings


def test_a_table_with_little_in_it() -> None:
    """Two sizes, no parameters, no size 0: no law, no cost, but a page."""
    losses = replace(studies.table(2), parameters=None)
    few = replace(losses, sizes=losses.sizes[1:3], losses=losses.losses[:, 1:3])
    found = select(few, 1600.0, 5000.0, "ats")
    made = study_of_table(few, found, "few.csv")
    assert "Cost" not in titles(made) and "Curves" in titles(made)
    assert all(one.law is None for one in made.candidates)
    assert "parameters" not in ranking_table(made).header


@pytest.mark.parametrize(
    "value, text",
    [(1.234e15, "1.23 × 10¹⁵"), (9.999e-4, "1.00 × 10⁻³"), (0.0, "0"), (1.0, "1.00 × 10⁰")],
)
def test_powers_of_ten(value: float, text: str) -> None:
    assert scientific(value) == text


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    write_page(
        tmp_path / "r.html", studies.full_study(tuple(f"model <b>{n}</b>" for n in range(9)))
    )
    assert assert_shown(tmp_path / "r.html", tmp_path) == 5, "predictions, curves, history, Θ"
