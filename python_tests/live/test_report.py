"""The page of a selection: its words and figures are those of the selection, and can be read."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jachess_ext.compare.report import Section, to_html
from jachess_ext.live.report import (
    SelectionView,
    advice,
    answer,
    curves_figure,
    forecast_figure,
    history_figure,
    letters,
    ranking_table,
    selection_sections,
    size_text,
    view_of_live,
    view_of_table,
    write_selection,
)
from jachess_ext.scaling import (
    LossTable,
    coverage,
    log_rmse,
    pear_corr,
    read_table,
    rel_acc,
    select,
)
from jachess_ext.scaling.advice import number, scientific, share
from python_tests.browser import assert_shown
from python_tests.compare.pages import HOSTILE, Page, assert_legible, lines
from python_tests.scaling import tables

BUDGET, TARGET = 25600.0, 1638400.0
LONG = tuple(f"organisation-{n}/a-model-with-a-very-long-name-{n}" for n in range(14))


def losses(models: int = 6, names: tuple[str, ...] = ()) -> LossTable:
    """Return a table of the sizes 0, 400, 1600 … the target."""
    table = tables.population(0, models=models)[0]
    return replace(
        table,
        names=names or table.names,
        sizes=table.sizes[::2],
        losses=table.losses[:, ::2],
    )


def hidden(table: LossTable) -> LossTable:
    """Return the table without the losses beyond the budget."""
    return replace(table, losses=np.where(table.sizes > BUDGET, np.nan, table.losses))


def view_of(table: LossTable, method: str = "blend") -> SelectionView:
    return view_of_table(table, select(table, BUDGET, TARGET, method), "losses.csv")


@pytest.fixture(scope="module")
def view() -> SelectionView:
    return view_of(losses())


def changed(view: SelectionView, **columns: Any) -> SelectionView:
    return replace(view, candidates=view.candidates.assign(**columns))


def find(view: SelectionView, title: str) -> Section:
    return next(section for section in selection_sections(view) if section.title == title)


def titles(view: SelectionView) -> list[str]:
    return [section.title for section in selection_sections(view)]


# --- the words


def test_everything_is_there(view: SelectionView) -> None:
    assert titles(view) == ["Answer", "Ranking quality and cost", "Cost", "Settings"]
    assert len(find(view, "Answer").pictures) == 2
    assert len(find(view, "Ranking quality and cost").pictures) == 1
    assert "How early the ranking settled" in titles(view_of(hidden(losses())))


def test_the_answer(view: SelectionView) -> None:
    best, text = view.candidates.iloc[0], answer(view)
    assert text.startswith(f"{best.name} is the model to fine-tune on 1,638,400 examples")
    interval = f"(90 % interval {best['low']:#.4g} to {best['high']:#.4g})"
    assert f"{best['predicted']:#.4g} {interval}, by the method blend." in text
    lowest = view.candidates["truth"].idxmin()
    expected = "it is the best" if lowest == best.name else f"{lowest} is the best"
    assert f"Measured in full, {expected}" in text
    for name, chance in view.candidates["prob_best"].iloc[1:].items():
        assert (f"{name} (" in text.partition("Measured")[0]) == (chance >= 0.05)


def test_rivals_come_most_probable_first(view: SelectionView) -> None:
    chances = [0.5, 0.06, 0.3, 0.04, 0.07, 0.03]
    text = answer(changed(view, prob_best=chances))
    first, second, third = (view.candidates.index[place] for place in (2, 4, 1))
    named = f"{first} (30 %), {second} (7 %), {third} (6 %)."
    assert f"probability 50 %; also in question: {named}" in text


def test_the_advice_follows_from_what_is_known(view: SelectionView) -> None:
    best, other = view.candidates.index[:2]
    short = replace(view, candidates=view.candidates.iloc[:2].assign(prob_best=0.7))
    known = view.losses[view.losses["name"].isin([best, other])]

    def text(ahead: bool = True, of: SelectionView = short) -> str:
        lower = 1.0 if ahead else 1.2
        made = known.assign(loss=np.where(known["name"] == best, lower, 1.1))
        return advice(replace(of, losses=made))[0]

    assert "too: the choice does not hang" in text()
    assert f"{other} is ahead: the choice hangs on" in text(ahead=False)
    assert select(losses(), BUDGET, TARGET).advice in text()
    upside_down = replace(short, higher=True)
    assert "too: the choice does not hang" in text(ahead=False, of=upside_down)
    spent, full = view.costs["flops"].iloc[[0, -1]]
    assert f"This cost {100 * spent / full:.3g} % of" in text()
    assert "rough guide" not in text() and "rough guide" in text(of=changed(short, stop="done"))
    nothing = changed(short, predicted=np.nan, low=np.nan, high=np.nan, prob_best=np.nan)
    assert advice(replace(nothing, costs=view.costs[:0])) == [view.advice]


def test_the_ranking_is_that_of_the_selection(view: SelectionView) -> None:
    table = losses()
    frame, shown = select(table, BUDGET, TARGET).to_frame(0.9), ranking_table(view)
    truth = dict(zip(table.names, table.losses_at(TARGET), strict=True))
    for row, of in zip(shown.rows, frame.itertuples(), strict=True):
        cells = dict(zip(shown.header, row, strict=True))
        assert cells["model"] == f"{of.rank}. {of.name}"
        assert cells["at 1,638,400"] == f"{of.predicted:#.4g}"
        assert cells["90 % interval"] == f"{of.low:#.4g} … {of.high:#.4g}"
        assert cells["P(best)"] == share(of.prob_best)
        assert cells["measured"] == f"{truth[of.name]:#.4g}"
        assert cells["largest subset"] == "25,600"


def test_the_selection_is_judged_by_the_metrics(view: SelectionView) -> None:
    truth, of = losses().losses_at(TARGET), select(losses(), BUDGET, TARGET)
    inside = coverage(*of.interval_ends(0.9), truth)
    assert view.judgement == (
        f"blend against the measured losses: PearCorr {pear_corr(of.predicted_losses, truth):.1f} "
        f"%, RelAcc {rel_acc(of.scores, truth):.1f} %, root mean square error of ln loss "
        f"{log_rmse(of.predicted_losses, truth):.3f}, {inside:.0f} % inside their 90 % intervals."
    )
    assert view_of(hidden(losses())).judgement == ""


def test_accuracies_are_shown_as_accuracies() -> None:
    """Ten times the losses of a table as errors in per cent: all numbers are 100 − 10 × theirs."""
    plain, table = view_of(losses()), losses()
    scores = pd.DataFrame(100 - 10 * table.losses, list(table.names), table.sizes)
    view = view_of(read_table(scores, metric="accuracy"))
    assert view.higher and view.loss == "accuracy (per cent)"
    expected = 100 - 10 * plain.candidates[["predicted", "high", "low", "truth"]]
    found = view.candidates[["predicted", "low", "high", "truth"]].to_numpy()
    np.testing.assert_allclose(found, expected.to_numpy(), rtol=1e-9)
    np.testing.assert_allclose(view.losses["loss"], 100 - 10 * plain.losses["loss"], rtol=1e-12)
    assert list(view.candidates.index) == list(plain.candidates.index)
    assert view.judgement == plain.judgement and view.advice == plain.advice
    lowest = plain.candidates["truth"].idxmin()
    assert (
        f"Measured in full, {'it' if lowest == view.candidates.index[0] else lowest} is"
        in answer(view)
    )


def test_the_cost_is_that_of_the_selection(view: SelectionView) -> None:
    of = select(losses(), BUDGET, TARGET)
    rows = find(view, "Cost").tables[0].rows
    flops = (of.flops, of.full_flops * BUDGET / TARGET, of.full_flops)
    assert [row[1] for row in rows] == [scientific(value) for value in flops]
    assert rows[1][2] == f"{100 * BUDGET / TARGET:.3g} %" and rows[2][2] == "100 %"


def test_the_history_is_numpys_correlation_of_what_select_gives(view: SelectionView) -> None:
    table = losses()
    truth = table.losses_at(TARGET)
    for method in ("blend", "ats", "subtuning"):
        steps = view.history[view.history["method"] == method]
        assert len(steps) > 1
        for step in steps.itertuples():
            of = select(table, step.budget, TARGET, method)
            expected = 100 * np.corrcoef(of.predicted_losses, truth)[0, 1]
            assert step.pear_corr == pytest.approx(expected)
            chosen = truth[of.scores.argmin()]
            assert step.rel_acc == pytest.approx(100 * (truth.max() - chosen) / np.ptp(truth))
            assert step.share == pytest.approx(of.flops / of.full_flops)
    for method in ("zeroshot", "modelsize"):
        (step,) = view.history[view.history["method"] == method].itertuples()
        assert (step.budget, step.share) == (0.0, 0.0)


def test_losses_beyond_the_budget_change_nothing_but_what_is_kept_aside(
    view: SelectionView,
) -> None:
    blind = view_of(hidden(losses()))
    given = ["score", "predicted", "low", "high", "prob_best"]
    assert blind.candidates[given].equals(view.candidates[given])
    assert blind.losses["read"].all() and (~view.losses["read"]).sum() == 3 * 6
    assert "measured" not in ranking_table(blind).header
    last = blind.history[blind.history["method"] == "blend"].iloc[-1]
    assert (last["pear_corr"], last["budget"]) == (pytest.approx(100.0), BUDGET)


@pytest.mark.parametrize("method", ["zeroshot", "modelsize", "subtuning"])
def test_methods_without_intervals(method: str) -> None:
    view = view_of(losses(), method)
    assert "interval" not in answer(view) and method in answer(view)
    assert len(find(view, "Answer").pictures) == (1 if method == "modelsize" else 2)
    assert ("score" in ranking_table(view).header) == (method == "modelsize")


def test_references_and_a_table_with_little_in_it() -> None:
    table = losses()
    moved = select(table, BUDGET, TARGET, references=table.names[:3])
    view = view_of_table(table, moved, "losses.csv", references=table.names[:3], gamma=4)
    assert view.settings["references"] == list(table.names[:3]) and view.settings["gamma"] == 4
    few = losses(2)
    few = replace(few, parameters=None, sizes=few.sizes[1:3], losses=few.losses[:, 1:3])
    view = view_of_table(few, select(few, 1600.0, 5000.0, "ats"), "few.csv")
    assert "Cost" not in titles(view) and len(find(view, "Answer").pictures) == 2
    assert "parameters" not in ranking_table(view).header


def test_a_missing_interval_is_a_dash(view: SelectionView) -> None:
    low = [np.nan, *view.candidates["low"].iloc[1:]]
    assert "interval" not in answer(changed(view, low=low)).partition(", by the method")[0]
    low = [*view.candidates["low"].iloc[:-1], np.nan]
    assert "– … " in " ".join(ranking_table(changed(view, low=low)).rows[-1])


# --- a live selection


def live_result(metric: str = "loss", **more: Any) -> Any:
    """Return what the page reads of a live selection, its losses those of a table."""
    table = replace(losses(3, ("zoo/a", "zoo/b", "zoo/c")), metric=metric)
    ask = namedtuple("Ask", ["model", "rows"])
    told = {ask("zoo/a", 400): None, ask("zoo/d", 400): "out of memory"}
    search = SimpleNamespace(
        selection=lambda method="blend", rows=BUDGET: select(table, rows, TARGET, method),
        target=int(TARGET),
        stop="every planned size was run",
        results={run: SimpleNamespace(error=error) for run, error in told.items()},
        state=lambda: {"models": list(table.names), "results": []},
    )
    flops = {"training": 4.0, "judging": 1.0, "probe": 0.0, "features": 0.0, "spent": 5.0}
    return SimpleNamespace(
        **{
            **{"task": "sentiment", "train_rows": 9000, "dev_rows": 200, "rank_by": metric},
            **{"unloadable": {"/nowhere": "there is no model"}, "search": search, "share": 0.125},
            "records": [{"scores": {"accuracy": 0.5}}],
            "stops": dict.fromkeys(table.names, search.stop),
            "flops": flops | {"sub_tuning": 10.0, "full_tuning": 80.0},
        }
        | more
    )


def test_a_live_selection() -> None:
    result = live_result()
    view = view_of_live(result)
    expected = result.search.selection().to_frame()
    assert list(view.candidates.index) == list(expected["name"])
    np.testing.assert_array_equal(view.candidates["predicted"], expected["predicted"])
    best = expected["name"][0].removeprefix("zoo/")
    assert answer(view).startswith(f"{best} is the model") and " nats (90 %" in answer(view)
    assert view.data[1:] == [
        "Stopped: every planned size was run.",
        "Failed: zoo/d on 400: out of memory; /nowhere: there is no model.",
    ]
    rows = find(view, "Cost").tables[0].rows
    assert [row[0] for row in rows] == [
        *("trainings of this selection", "judging", "this selection", "SubTuning", "FullTuning"),
    ]
    assert "This cost 6.25 % of" in advice(view)[0] and "rough guide" in advice(view)[0]
    stops = find(view, "Why each model's runs ended").tables[0].rows
    assert stops[0] == [best, "0, 400, 1,600, 6,400, 25,600", "every planned size was run"]
    last = view.history[view.history["method"] == "blend"].iloc[-1]
    assert (last["budget"], last["pear_corr"]) == (BUDGET, pytest.approx(100.0))


def test_a_live_selection_whose_losses_at_the_target_were_measured_apart() -> None:
    truth = {"zoo/a": 0.6, "zoo/b": 0.5, "zoo/c": 0.7}
    view = view_of_live(live_result(), truth)
    assert view.known and view.candidates["truth"].to_dict() == truth
    aside = view.losses[~view.losses["read"]]
    assert set(aside["size"]) == {TARGET} and len(aside) == 3
    by_score = view_of_live(live_result("accuracy"), truth)
    assert "dev accuracy" in answer(by_score) and by_score.higher
    measured = {"zoo/a": 0.4, "zoo/b": 0.5, "zoo/c": 0.3}
    assert by_score.candidates["truth"].to_dict() == pytest.approx(measured)


# --- the figures


def test_the_forecast_figure(view: SelectionView) -> None:
    (panel,) = forecast_figure(view.candidates, "loss", 0.9, view.labels).axes
    rows = view.candidates
    assert lines(panel, "o") == [(list(rows["predicted"]), list(range(6)))]
    assert lines(panel, "x") == [(list(rows["truth"]), list(range(6)))]
    bars = [path.vertices[:, 0].tolist() for path in panel.collections[0].get_paths()]
    assert bars == rows[["low", "high"]].to_numpy().tolist()
    assert [t.get_text() for t in panel.get_yticklabels()] == list(rows.index)
    assert panel.get_ylim()[0] > panel.get_ylim()[1], "the best is on top"


def test_the_curves_hold_what_was_read_and_kept_aside(view: SelectionView) -> None:
    (panel,) = curves_figure(view, "loss").axes
    table = losses()
    name = view.candidates.index[0]
    row = table.losses[table.names.index(name)]
    read = (table.sizes > 0) & (table.sizes <= BUDGET)
    (solid, hollow) = lines(panel, "o")
    assert solid == (list(table.sizes[read]), list(row[read]))
    assert hollow == (list(table.sizes[table.sizes > BUDGET]), list(row[table.sizes > BUDGET]))
    best = view.candidates.iloc[0]
    assert ([BUDGET, TARGET], [row[read][-1], best["predicted"]]) in lines(panel, "None")
    assert ([TARGET, TARGET], [best["low"], best["high"]]) in lines(panel, "None")


def test_the_history_figure(view: SelectionView) -> None:
    figure = history_figure(view.history, "blend")
    steps = view.history[view.history["method"] == "blend"]
    line = (list(100 * steps["share"]), list(steps["pear_corr"]))
    assert line in lines(figure.axes[0], "o")
    names = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"zeroshot (free)", "modelsize (free)", "blend"} < names
    unpriced = view_of(replace(losses(), parameters=None)).history
    (panel,) = history_figure(unpriced, "blend").axes
    assert "examples" in panel.get_xlabel()
    assert BUDGET in lines(panel, "o")[0][0]


@pytest.mark.parametrize("names", [(), LONG, LONG[:2], LONG[:3]], ids=["6", "14", "2", "3"])
def test_no_text_lies_over_another(names: tuple[str, ...]) -> None:
    for section in selection_sections(view_of(losses(len(names) or 6, names))):
        for picture in section.pictures:
            assert_legible(picture.draw())


@pytest.mark.parametrize("end", [np.inf, np.nan])
def test_intervals_without_an_end(view: SelectionView, end: float) -> None:
    """A law that leaves the target open: the interval is left out, the rest is drawn."""
    high = [end, *view.candidates["high"].iloc[1:]]
    for section in selection_sections(changed(view, high=high)):
        for picture in section.pictures:
            assert_legible(picture.draw())


def test_every_text_of_the_user_is_escaped() -> None:
    names = tuple(f"{n} {HOSTILE}" for n in range(3))
    view = view_of(losses(3, names))
    view = replace(view, data=[HOSTILE], settings={"a": HOSTILE})
    view = changed(view, stop=HOSTILE)
    page = Page(to_html(HOSTILE, selection_sections(view)))
    assert "script" not in page.tags
    assert all(page.text.count(name) >= 2 for name in names)


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    view = view_of(losses(9, tuple(f"model <b>{n}</b>" for n in range(9))))
    write_selection(tmp_path / "r.html", view)
    assert assert_shown(tmp_path / "r.html", tmp_path) == 3


# --- texts


def test_texts() -> None:
    assert letters("$a$") == r"\$a\$"
    assert letters("x" * 40, 11) == "xxxxx…xxxxx" and letters("x" * 11, 11) == "x" * 11
    sizes = (200, 1600, 51200, 1638400, 2.5e9, 0.5)
    texts = ["200", "1.6k", "51.2k", "1.64M", "2.5G", "0.5"]
    assert [size_text(size) for size in sizes] == texts
    shares = (0.0, 1e-5, 0.004, 0.314, 0.99, 0.9987, 1.0, np.nan)
    expected = ["0.0 %", "< 0.1 %", "0.4 %", "31 %", "99 %", "99.9 %", "100.0 %", "–"]
    assert [share(p) for p in shares] == expected
    assert [number(x) for x in (0.25, 1500, 2e4, np.inf)] == ["0.2500", "1,500", "20,000", "–"]
    powers = {1.234e15: "1.23 × 10¹⁵", 9.999e-4: "1.00 × 10⁻³", 0.0: "0", 1.0: "1.00 × 10⁰"}
    assert {value: scientific(value) for value in powers} == powers


@pytest.mark.parametrize(
    "names, labels",
    [
        (["/tmp/zoo/bert", "/tmp/zoo/opt"], ["bert", "opt"]),
        (["/tmp/zoo/bert", "/tmp/other/bert"], ["zoo/bert", "other/bert"]),
        (["gpt2", "org/gpt2"], ["gpt2", "org/gpt2"]),
        (["org/a", "org/a/b"], ["a", "a/b"]),
    ],
)
def test_labels_lose_the_shared_folder(names: list[str], labels: list[str]) -> None:
    view = view_of(losses(2, tuple(names)))
    assert [view.labels[name] for name in names] == labels
