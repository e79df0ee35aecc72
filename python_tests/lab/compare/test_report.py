"""The pages of a comparison and of a judged model, their figures, and the tables on a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats

from jachess_ext.lab.compare.metrics import reliability
from jachess_ext.lab.compare.records import RunRecord
from jachess_ext.lab.compare.report import (
    answer,
    forest_figure,
    forests,
    pool_reliability,
    print_report,
    reliability_figure,
    sections,
    write_report,
)
from jachess_ext.lab.compare.tables import methods_of, to_frame
from jachess_ext.lab.workbench.page import (
    Picture,
    Section,
    Table,
    break_name,
    styles_of,
    to_html,
    to_text,
)
from python_tests.browser import assert_shown

from .pages import HOSTILE, Page
from .records import by_method, record

PLAIN = (0.50, 0.60, 0.55)


def results(**changes: tuple[float, ...]) -> list[RunRecord]:
    """Return runs of methods whose scores differ from the plain ones by these, on two tasks."""
    records = [record("none", task, s, PLAIN[s], brier=0.3) for task in "ab" for s in range(3)]
    return records + [
        record(name, task, s, PLAIN[s] + change, brier=0.3 - change)
        for name, by in changes.items()
        for task in "ab"
        for s, change in enumerate(by)
    ]


def half(values: tuple[float, ...]) -> float:
    """Return half of Student's interval, by scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, scale=stats.sem(values))
    return float((high - low) / 2)


# --- the answer


def test_better_worse_and_neither() -> None:
    """The seeds' luck (PLAIN) is larger than the differences, and is taken out."""
    up, down, open_ = (0.03, 0.032, 0.028), (-0.05, -0.04, -0.045), (0.05, -0.05, 0.01)
    score, brier = answer(to_frame(results(sam=up, l2=down, r3f=open_)))[:2]
    assert score.startswith("Accuracy on 10 dev rows, per cent, 2 tasks, 3 seeds: ")
    assert f"better than the plain model: sam (+3.0 ± {100 * half(up):.1f})" in score
    assert f"worse than the plain model: l2 (−4.5 ± {100 * half(down):.1f})" in score
    assert f"not told apart from it: r3f (+0.3 ± {100 * half(open_):.1f})" in score
    assert "not adjusted for the number of methods" in score
    # less of the Brier score is better
    assert f"better than the plain model: sam (−0.030 ± {half(up):.3f})" in brier
    assert "worse than the plain model: l2 (+0.045" in brier


def test_many_methods_a_zero_and_fewer_seeds() -> None:
    names = ("l2", "sam", "r3f", "tapt", "gradient-norm")
    changes = {name: (0.01 * i, -0.01 * i, 0.0001) for i, name in enumerate(names)}
    text = answer(to_frame(results(**changes)))[0]
    assert "not told apart from the plain model: 5 methods, the largest difference" in text
    assert "(+0.0 ± 0.0)" in answer(to_frame(results(l2=(-1e-6, 0.0, 1e-6))))[0]
    score = answer(to_frame(results(sam=(0.03, 0.032, 0.028), l2=(0.05, 0.05))))[0]
    assert score.startswith("Accuracy on 10 dev rows, per cent, 2 tasks, 3 seeds: ")
    assert re.search(r"sam \(\+3.0 ± [\d.]+\), l2 \(\+5.0 ± 0.0, 2 seeds\)", score)


def test_costs_and_a_single_seed() -> None:
    seconds = {"none": 10.0, "sam": 21.0, "l2": 11.0}
    scores = {"none": [0.5], "sam": [0.6], "l2": [0.6]}
    more = {m: {"seconds": {"processor": of}} for m, of in seconds.items()}
    runs = to_frame(by_method(scores, **more))
    first = answer(runs)[0]
    assert "One seed cannot tell a difference from chance." in first and "sam (+10.0)" in first
    assert sections(by_method(scores, **more))[0].tables[0].rows == [
        ["none", "1.00"],
        ["sam", "2.10"],
        ["l2", "1.10"],
    ]
    assert answer(runs[1:]) == [] == answer(runs[:1])


def test_the_level_of_chance_comes_first() -> None:
    """One answer to all rows is right on 60 % of 150: standard error 4 %, two are 8 %."""
    settings = {"constant": 0.6, "rows": (10, 10, 150)}
    by = dict.fromkeys(("none", "sam"), settings)
    for best, is_chance in ((0.679, True), (0.681, False)):
        runs = to_frame(by_method({"none": [0.5], "sam": [best]}, **by))
        first = answer(runs)[0]
        assert first.startswith("At the level of chance, a: ") == is_chance
        assert (f"{100 * best:.1f}, is within two standard errors (8.0)" in first) == is_chance
    one_task = [record("none", "b", 0, 0.9, **settings), record("sam", "b", 0, 0.9, **settings)]
    sentences = answer(to_frame(by_method({"none": [0.5], "sam": [0.6]}, **by) + one_task))
    assert ["chance, a" in text for text in sentences] == [True, False, False]
    # a correlation of one answer to all rows is 0, and its standard error 1 / √n
    for best, is_chance in ((0.19, True), (0.21, False)):
        settings = {"constant": 0.0, "rows": (10, 10, 100), "metric": "Spearman correlation"}
        runs = to_frame(by_method({"none": [best], "sam": [0.0]}, none=settings, sam=settings))
        assert ("level of chance" in answer(runs)[0]) == is_chance
        assert any("Spearman correlation × 100 on 100 dev rows, a, 1" in x for x in answer(runs))


# --- figures


def test_forests() -> None:
    runs = to_frame(results(sam=(0.1, 0.1, 0.1), l2=(0.0, 0.1, 0.2)))
    pictures = forests(runs, styles_of(methods_of(runs)))
    titles = [picture.caption.split(":")[0] for picture in pictures]
    score = "accuracy on 10 dev rows, per cent"
    assert titles == [f"a, {score}", f"b, {score}", "a, Brier score", "b, Brier score"]
    assert "95 % interval over seeds; better to the right." in pictures[0].caption
    assert "better to the left" in pictures[2].caption
    (panel,) = pictures[0].draw().axes
    means = [container.lines[0].get_xdata()[0] for container in panel.containers]
    assert means == pytest.approx([10.0, 10.0])
    bars = [container.lines[2][0].get_segments()[0][:, 0] for container in panel.containers]
    assert np.diff(bars, axis=1).ravel() / 2 == pytest.approx([0, 100 * half((0.0, 0.1, 0.2))])
    alone = forests(to_frame(results(sam=(0.1,))), styles_of(["sam"]))
    assert alone[0].caption == f"a, {score}: the one seed's difference; better to the right."
    figure = alone[0].draw()
    assert figure.get_supxlabel() == f"{score},\ndifference from the plain model"
    figure.draw_without_rendering()
    assert figure._supxlabel.get_window_extent().width < figure.bbox.width, "it is not cut"


def test_long_names_leave_room_for_the_differences() -> None:
    """The methods' names are broken into lines: the panel keeps at least half of the width."""
    name = "smart,adv_steps=2,adv_lr=2,smoothing=0.3,strength=3"
    broken = ["smart,adv_steps=2,", "adv_lr=2,smoothing=0.3,", "strength=3"]
    assert break_name(name).splitlines() == broken
    assert break_name("a method, in a few words") == "a method, in a few words"
    apart = pandas.DataFrame({"mean": [1.0], "±": [0.5]}, index=[name])
    figure = forest_figure(apart, "score, difference", styles_of([name]))
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.5


def test_twelve_methods_stay_apart() -> None:
    looks = [tuple(style.values()) for style in styles_of([*map(str, range(144))]).values()]
    assert len(set(looks)) == 144
    colours, markers = zip(*looks[:12], strict=True)
    assert len(set(colours)) == len(set(markers)) == 12


def test_pooled_reliability_weighs_by_examples() -> None:
    first = {"edges": [0, 0.5, 1], "confidence": [None, 0.6], "accuracy": [None, 1.0]}
    second = {"edges": [0, 0.5, 1], "confidence": [0.4, 0.9], "accuracy": [0.0, 0.5]}
    got = pool_reliability([first | {"counts": [0, 1]}, second | {"counts": [2, 3]}])
    assert got.counts.tolist() == [2, 4]
    np.testing.assert_allclose(got.confidence, [0.4, (0.6 + 2.7) / 4])
    np.testing.assert_allclose(got.accuracy, [0.0, (1.0 + 1.5) / 4])


# --- the page


def test_user_text_is_escaped_everywhere() -> None:
    diagram, styles = {HOSTILE: reliability([[0.3, 0.7]], [1])}, styles_of([HOSTILE])
    table = Table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, "1"]], frozenset({0}))
    section = Section(
        HOSTILE,
        [HOSTILE],
        [table],
        [Picture(HOSTILE, lambda: reliability_figure(diagram, styles))],
        [HOSTILE],
    )
    page = Page(to_html(HOSTILE, [section]))
    assert "script" not in page.tags
    # title, h1, h2, p, caption, th, td, figcaption, pre
    assert page.text.count(HOSTILE) == 9


def test_the_page_holds_everything_and_needs_nothing(tmp_path: Path) -> None:
    scores = {"none": [0.5, 0.51, 0.52], "sam": [0.6, 0.61, 0.62], "l2": [0.5, 0.52, 0.51]}
    hostile = [record("sam<script>alert(1)</script>", "a", 0, 0.5), record("none", "<b>", 0, 0.5)]
    write_report(tmp_path / "r.html", [*by_method(scores, "ab"), *hostile])
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert text.endswith("</html>\n") and "script" not in page.tags and "b" not in page.tags
    assert "http" not in text and "@import" not in text
    assert not {"link", "iframe", "img"} & set(page.tags)
    assert 'name="viewport" content="width=device-width' in text
    assert all(link.startswith("#") for link in page.links), "within a figure"
    assert re.findall(r"<h2>([^<]*)</h2>", text) == [
        *("In short", "Scores", "Token corruption", "Calibration"),
        *("Seed by seed", "Over all tasks and seeds"),
        *("Embedding noise", "Smoothness", "Settings"),
    ]
    # four methods' diagrams in one picture, and differences of the score and of the Brier score on
    # the two tasks that have a plain run of the same seed
    assert page.tags.count("svg") == 1 + 2 * 2


def test_sections_without_runs_of_that_sort() -> None:
    nothing = {"corrupted": {}, "noisy": {}, "jacobian": [], "hessian": []}
    bare = record("none", "a", 0, 0.5, **nothing, reliability=None, brier=None, ece=None)
    assert [section.title for section in sections([bare])] == ["Scores", "Settings"]


def test_notes_explain_the_columns_that_are_there() -> None:
    def note(records: list[RunRecord]) -> str:
        (section,) = (s for s in sections(records) if s.title == "Seed by seed")
        return " ".join(section.paragraphs)

    bare = {"corrupted": {}, "brier": None}
    few = note(by_method({"none": [0.5], "sam": [0.6]}, none=bare, sam=bare))
    assert few.startswith("Mean differences from the unregularised model") and "±" not in few
    assert not any(word in few for word in ("Brier", "Scaled", "Corrupted", "Attacked", "†"))
    scores = {"none": [0.50, 0.51, 0.52, 0.53], "sam": [0.70, 0.71, 0.72, 0.73]}
    more = note(by_method(scores))
    assert "±: half" in more and "Brier: " in more and "Corrupted: " in more and "†: p <" in more
    assert "Scaled" not in more and "Attacked" not in more


def test_nothing_is_cut_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell of every table is there whole, in the first column of every part too."""
    scores = {"none": 0.5, "jachess-train": 0.6125, "cross-holder-unlab": 0.8}
    records = [
        record(name, f"task{task}", seed, score + seed / 100)
        for name, score in scores.items()
        for task in range(3)
        for seed in range(2)
    ]
    drawn, width = [table for section in sections(records) for table in section.tables], 60
    print_report(records, width=width)
    shown = capsys.readouterr().out
    assert "…" not in shown and "..." not in shown
    assert "sign test over pairs" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= width
    for table in drawn:
        text = to_text(table, width)
        assert text in shown
        for row in table.rows:
            assert all(cell in text for cell in row), (table.caption, row)


def test_a_wide_table_repeats_its_first_column() -> None:
    table = Table("c.", ["m", *"abcd"], [["x" * 10, *["y" * 10] * 4]])
    text = to_text(table, 45)
    assert text.count("x" * 10) == 2 and text.count("y" * 10) == 4
    assert text.endswith("\nc.\n")
    assert to_text(table, 200).count("x" * 10) == 1


@pytest.mark.slow
def test_the_pages_in_a_browser(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", by_method({"none": PLAIN, "sam": PLAIN[::-1]}, "ab"))
    assert assert_shown(tmp_path / "r.html", tmp_path) == 1 + 4
