"""Tables from records made by hand: every number can be worked out on paper."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from jachess_ext.evaluation.report import Table
from jachess_ext.evaluation.statistics import holm_bonferroni
from jachess_ext.experiment import tables
from jachess_ext.experiment.report import narrowed, pooled, print_report, sections, write_report
from jachess_ext.experiment.store import RESULTS, read_results
from jachess_ext.experiment.tables import MARK, Results
from jachess_ext.tasks.examples import DataError

from .records import record

PLAIN = [0.50, 0.51, 0.52, 0.53, 0.54]
BETTER = [0.60, 0.61, 0.62, 0.63, 0.64]
SAME = [0.505, 0.515, 0.525, 0.535, 0.545]


def results(**extra: list[float]) -> Results:
    found = {"none": PLAIN, "sam": BETTER, "l2": SAME} | extra
    return Results.of(
        [
            record(method, task, seed, score + shift)
            for task, shift in (("a", 0.0), ("b", 0.2))
            for method, scores in found.items()
            for seed, score in enumerate(scores)
        ]
    )


def rows(table: tables.Table) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in table.rows}


def test_scores_averages_and_marks() -> None:
    table = tables.score_table(results())
    assert list(table.header) == ["method", "a (accuracy)", "b (accuracy)", "average"]
    got = rows(table)
    assert got["none"] == ["52.0 ± 1.6", "72.0 ± 1.6", "62.0 ± 1.6"]
    assert got["sam"] == [f"62.0 ± 1.6{MARK}", f"82.0 ± 1.6{MARK}", f"72.0 ± 1.6{MARK}"]
    assert got["l2"] == ["52.5 ± 1.6", "72.5 ± 1.6", "62.5 ± 1.6"]


def test_p_values_are_scipys_holm_adjusted_within_a_column() -> None:
    column = tables.Column("x", {"none": PLAIN, "sam": BETTER, "l2": SAME})
    raw = [stats.mannwhitneyu(v, PLAIN).pvalue for v in (BETTER, SAME)]
    assert list(column.p_values().values()) == pytest.approx(holm_bonferroni(raw))
    assert raw[0] == pytest.approx(2 / 252) and column.p_values()["sam"] == pytest.approx(4 / 252)


def test_three_seeds_are_never_marked() -> None:
    few = Results.of(
        [
            record(method, "a", seed, score)
            for method, scores in (("none", PLAIN), ("sam", BETTER))
            for seed, score in enumerate(scores[:3])
        ]
    )
    assert MARK not in rows(tables.score_table(few))["sam"][0]


def test_averages_take_the_seeds_that_have_all_tasks() -> None:
    found = Results.of(
        [
            *(record("none", "a", seed, score) for seed, score in ((0, 0.2), (1, 0.4), (2, 0.9))),
            *(record("none", "b", seed, score) for seed, score in ((1, 0.6), (0, 0.8), (2, None))),
        ]
    )
    got = found.average_by_seed("none", ["a", "b"], lambda r: r["score"])
    assert got == pytest.approx({0: 0.5, 1: 0.5})
    assert rows(tables.score_table(found))["none"] == ["50.0 ± 36.1", "70.0 ± 14.1", "50.0 ± 0.0"]


def test_corruption_and_its_drop() -> None:
    first, _, average = tables.corruption_tables(results())
    assert list(first.header) == ["method", "clean", "5%", "20%", "drop at 20%"]
    assert rows(first)["none"] == ["52.0 ± 1.6", "51.0 ± 1.6", "42.0 ± 1.6", "10.0 ± 0.0"]
    assert rows(average)["none"][2] == "52.0 ± 1.6"


def test_domain_shift() -> None:
    shifted = Results.of(
        [
            record("none", "a", seed, 0.5, shift={"t": {"score": score, "brier": 0, "ece": 0}})
            for seed, score in enumerate((0.1, 0.3))
        ]
    )
    table = tables.shift_table(shifted)
    assert table is not None and list(table.header) == ["method", "a → t"]
    assert rows(table)["none"] == ["20.0 ± 14.1"]
    assert tables.shift_table(results()) is None


def test_calibration_leaves_regression_out() -> None:
    found = Results.of(
        [
            record("none", "a", 0, 0.5, brier=0.25, ece=0.125),
            record("none", "numbers", 0, 0.5, brier=None, ece=None),
        ]
    )
    brier, ece = tables.calibration_tables(found)
    assert list(brier.header) == ["method", "a"]
    assert (rows(brier)["none"], rows(ece)["none"]) == (["0.250"], ["0.125"])


def test_smoothness() -> None:
    jacobian, hessian = tables.smoothness_tables(results())
    assert list(jacobian.header) == ["method", "a", "b", "average"]
    assert rows(jacobian)["none"] == ["3 ± 0"] * 3 and rows(hessian)["none"] == ["7 ± 0"] * 3
    unmeasured = record("none", "a", 0, 0.5, jacobian=None, hessian=[None, 1.0])
    assert tables.smoothness_tables(Results.of([unmeasured])) == []


def test_ablations_compare_what_differs_in_nothing_else() -> None:
    methods = [
        "jachess-train,weights=norm",
        "jachess-train,weights=uniform",
        "jachess-train,weights=norm,dimensions=5",
        "jachess-unlab,weights=norm",
    ]
    found = Results.of([record(m, "a", 0, 0.1 * i) for i, m in enumerate(methods)])
    strategy, dimensions = tables.ablation_tables(found)
    assert rows(strategy) == {"norm": ["0.0", "0.0"], "uniform": ["10.0", "10.0"]}
    assert rows(dimensions) == {"10": ["0.0", "0.0"], "5": ["20.0", "20.0"]}
    assert strategy.caption.startswith("jachess-train:")


def test_ablations_compare_given_strengths_as_settings_and_chosen_ones_not() -> None:
    softmax, weaker, uniform = (
        "jachess-unlab,unlab_lr_ratio=0.03",
        "jachess-unlab,unlab_lr_ratio=0.01",
        "jachess-unlab,weights=uniform,unlab_lr_ratio=0.03",
    )
    given = Results.of(
        [record(m, "a", 0, 0.1 * i) for i, m in enumerate((softmax, weaker, uniform))]
    )
    (table,) = tables.ablation_tables(given)
    assert rows(table) == {"softmax": ["0.0", "0.0"], "uniform": ["20.0", "20.0"]}
    chosen = Results.of([record(m, "a", 0, 0.3, value=0.03) for m in (weaker, uniform)])
    (table,) = tables.ablation_tables(chosen)
    assert list(rows(table)) == ["softmax", "uniform"]


def test_chosen_values_and_failures() -> None:
    found = Results.of(
        [
            record("l2", "a", 0, 0.5, value=0.1),
            record("none", "a", 0, None, error="the loss is not finite"),
            record("l2", "a", 0, 0.5, kind="tuning", value=0.3),
        ]
    )
    chosen, failed = tables.chosen_table(found), tables.failed_table(found)
    assert chosen is not None and rows(chosen)["l2"] == ["0.1"]
    assert failed is not None
    assert list(failed.rows[0]) == ["none", "a", "0", "the loss is not finite"]
    assert rows(tables.score_table(found))["none"] == ["–"]


def test_pooled_reliability_weighs_by_examples() -> None:
    one = {"edges": [0, 0.5, 1], "confidence": [None, 0.6], "accuracy": [None, 1.0]}
    two = {"edges": [0, 0.5, 1], "confidence": [0.4, 0.9], "accuracy": [0.0, 0.5]}
    got = pooled([one | {"counts": [0, 1]}, two | {"counts": [2, 3]}])
    assert got.counts.tolist() == [2, 4]
    np.testing.assert_allclose(got.confidence, [0.4, (0.6 + 2.7) / 4])
    np.testing.assert_allclose(got.accuracy, [0.0, (1.0 + 1.5) / 4])


HOSTILE = "sam<script>alert(1)</script>"


class Page(HTMLParser):
    """Tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]


def test_the_page_holds_everything_and_runs_nothing(tmp_path: Path) -> None:
    found = results()
    hostile = [record(HOSTILE, "a", 0, 0.5), record("none", "<b>task", 0, 0.5)]
    write_report(tmp_path / "r.html", [*found.records, *hostile])
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags and "b" not in page.tags
    assert "http" not in text and "@import" not in text
    titles = re.findall(r"<h2>([^<]*)</h2>", text)
    assert titles == [
        *("In short", "Scores", "Token corruption", "Calibration"),
        *("Seed by seed", "Over all tasks and seeds"),
        *("Embedding noise", "Smoothness", "Settings"),
    ]
    # three tasks' curves twice, four methods' diagrams in one picture, and differences of the
    # score and of the Brier score on the two tasks that have a plain run of the same seed
    assert page.tags.count("img") == 3 + 3 + 1 + 2 * 2
    assert all(link.startswith("data:image/png;base64,") for link in page.links)


def test_sections_without_runs_of_a_kind() -> None:
    bare = [
        record("none", "a", 0, 0.5, corrupted={}, noisy={}, jacobian=[], hessian=[])
        | {"reliability": None, "brier": None, "ece": None}
    ]
    assert [s.title for s in sections(bare)] == ["Scores", "Settings"]


def test_tables_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(results().records, width=100)
    shown = capsys.readouterr().out
    assert "62.0 ± 1.6†" in shown and "Holm–Bonferroni" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("width", [60, 80])
def test_nothing_is_cut_on_a_narrow_terminal(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every cell of every table is there whole, in the first column of every part too."""
    names = ("none", "jachess-train", "jachess-unlab", "cross-holder-unlab")
    scores = (0.5, 0.6125, 0.7375, 0.8)
    records = [
        record(name, f"task{task}", seed, score + seed / 100)
        for name, score in zip(names, scores, strict=True)
        for task in range(4)
        for seed in range(3)
    ]
    print_report(records, width=width)
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    cells = {cell.strip() for line in shown.splitlines() for cell in line.split("│")}
    for table in (t for section in sections(records) for t in section.tables):
        for row in table.rows:
            assert {row[0], *row[1:]} <= cells, (table.caption, row)


def test_a_narrowed_table_has_each_column_once() -> None:
    table = Table("c", ["m", *"abcd"], [["x" * 10, *["y" * 10] * 4], ["z", *"1234"]])
    parts = narrowed(table, 45)
    assert [part.header for part in parts] == [["m", "a", "b"], ["m", "c", "d"]]
    assert [part.rows[1] for part in parts] == [["z", "1", "2"], ["z", "3", "4"]]
    assert [part.caption for part in parts] == ["", "c"]
    assert narrowed(table, 200) == [table]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty: no run has finished"),
        ("{", "line 1 is not JSON"),
        ("{}\n", "line 1 is no record"),
        ("[1]\n", "line 1 is no record"),
    ],
)
def test_bad_results_files(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / RESULTS).write_text(content)
    with pytest.raises(DataError, match=words):
        read_results(tmp_path)


def test_missing_results(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_results(tmp_path)
