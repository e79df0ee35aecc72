"""Tables from records made by hand: every number can be worked out on paper or by scipy."""

from __future__ import annotations

from typing import Any

import pandas
import pytest

from jachess_ext._io import DataError
from jachess_ext.lab.compare import tables
from jachess_ext.lab.compare.tables import CALIBRATION, to_frame
from jachess_ext.lab.workbench.page import Table

from .records import by_method, record

PLAIN = [0.50, 0.51, 0.52, 0.53, 0.54]
BETTER = [0.60, 0.61, 0.62, 0.63, 0.64]
SAME = [0.505, 0.515, 0.525, 0.535, 0.545]


def results(**extra: list[float]) -> Any:
    """Return three methods and more on two tasks, of which b is .2 easier."""
    scores = {"none": PLAIN, "sam": BETTER, "l2": SAME} | extra
    easier = {method: [score + 0.2 for score in of] for method, of in scores.items()}
    return to_frame([*by_method(scores, "a"), *by_method(easier, "b")])


def rows(table: Table) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in table.rows}


def test_scores_and_averages() -> None:
    table = tables.score_tables(results())[0]
    assert list(table.header) == ["method", "a (accuracy)", "b (accuracy)", "average"]
    got = rows(table)
    assert got["none"] == ["52.0 ± 1.6", "72.0 ± 1.6", "62.0 ± 1.6"]
    assert got["sam"] == ["62.0 ± 1.6", "82.0 ± 1.6", "72.0 ± 1.6"]
    assert got["l2"] == ["52.5 ± 1.6", "72.5 ± 1.6", "62.5 ± 1.6"]


def test_differences_of_a_table_of_ones_own() -> None:
    rows = [("none", 0, 0.5), ("sam", 0, 0.75), ("none", 1, 0.5), ("sam", 1, 0.5)]
    runs = pandas.DataFrame(rows, columns=["method", "seed", "score"]).assign(task="a")
    assert tables.differences(runs, "score").loc["sam", "mean"] == 0.125


def test_averages_take_the_seeds_that_have_all_tasks() -> None:
    runs = to_frame(
        [
            *(record("none", "a", seed, score) for seed, score in ((0, 0.2), (1, 0.4), (2, 0.9))),
            *(record("none", "b", seed, score) for seed, score in ((1, 0.6), (0, 0.8), (2, None))),
        ]
    )
    got = tables.by_seed(runs, "score")["none"].dropna()
    assert got.to_dict() == pytest.approx({0: 0.5, 1: 0.5})
    cells = rows(tables.score_tables(runs)[0])["none"]
    assert cells == ["50.0 ± 36.1", "70.0 ± 14.1", "50.0 ± 0.0"]


def test_corruption_and_its_drop() -> None:
    first, _, average = tables.condition_tables(results(), "corruption")
    assert list(first.header) == ["method", "clean", "5 %", "20 %", "drop at 20 %"]
    assert rows(first)["none"] == ["52.0 ± 1.6", "51.0 ± 1.6", "42.0 ± 1.6", "10.0 ± 0.0"]
    assert rows(average)["none"][2] == "52.0 ± 1.6"


def test_accuracy_stands_under_noise_and_on_changed_texts_where_it_is_known() -> None:
    known = {"accuracies": {"noisy 1.0": 0.7, "typos": 0.6}, "perturbed": {"typos": 0.3}}
    (noise,) = tables.condition_tables(to_frame([record("none", "a", 0, 0.5, **known)]), "noise")
    assert noise.header[1:] == ["δ = 0.0", "δ = 1.0"] and rows(noise)["none"] == ["50.0", "70.0"]
    (texts,) = tables.condition_tables(to_frame([record("none", "a", 0, 0.5, **known)]), "texts")
    assert rows(texts)["none"] == ["60.0"]
    old = to_frame([record("none", "a", 0, 0.5, perturbed={"typos": 0.25})])
    assert rows(tables.condition_tables(old, "texts")[0])["none"] == ["25.0"]


def test_domain_shift() -> None:
    shifted = to_frame(
        [
            record("none", "a", seed, 0.5, shift={"t": {"score": score, "brier": 0, "ece": 0}})
            for seed, score in enumerate((0.1, 0.3))
        ]
    )
    (table,) = tables.shift_tables(shifted)
    assert list(table.header) == ["method", "a → t"] and rows(table)["none"] == ["20.0 ± 14.1"]
    assert tables.shift_tables(results()) == []


def test_calibration_leaves_regression_out() -> None:
    runs = to_frame(
        [
            record("none", "a", 0, 0.5, brier=0.25, ece=0.125),
            record("none", "numbers", 0, 0.5, brier=None, ece=None),
        ]
    )
    brier, ece = tables.task_tables(runs, CALIBRATION)
    assert list(brier.header) == ["method", "a"]
    assert (rows(brier)["none"], rows(ece)["none"]) == (["0.250"], ["0.125"])


def test_failures() -> None:
    runs = to_frame(
        [
            record("l2", "a", 0, 0.5, value=0.1),
            record("none", "a", 0, None, error="the loss is not finite"),
            record("l2", "a", 0, 0.5, kind="tuning", value=0.3),
        ]
    )
    (failed,) = tables.failed_tables(runs)
    assert list(failed.rows[0]) == ["none", "a", "0", "the loss is not finite"]
    assert rows(tables.score_tables(runs)[0])["none"] == ["–"]


def test_differences_are_of_the_same_seed() -> None:
    average, *of_tasks = tables.paired_tables(results(sam=[0.51, 0.52, 0.53, 0.54, 0.50]))
    got = rows(average)
    assert got["l2"][0] == "+0.50 ± 0.00 (5/5)"
    # four of +1, one of -4: standard error 1, times t(0.975, 4 degrees)
    assert got["sam"][0] == "+0.00 ± 2.78 (4/5)"
    assert got["l2"][1:3] == ["+0.0000 ± 0.0000 (0/5)"] * 2, "as good is not better"
    assert [rows(table) for table in of_tasks] == [got, got]
    titles = [table.caption.split(":")[0] for table in (average, *of_tasks)]
    assert titles == ["average over tasks", "a", "b"]


def test_seeds_and_tasks_that_both_have() -> None:
    regression = {"brier": None, "ece": None}
    runs = to_frame(
        [
            *(record("none", "a", seed, 0.5, brier=0.4) for seed in (0, 1, 2)),
            *(record("sam", "a", seed, 0.6, brier=0.3 + seed / 100) for seed in (3, 2, 0)),
            *(record("l2", "a", seed, None) for seed in (0, 1)),
            *(record(name, "b", 0, 0.2, **regression) for name in ("none", "sam")),
            record("none", "b", 2, 0.2, **regression),
            record("sam", "b", 2, 0.1, **regression),
        ]
    )
    average, first, second = map(rows, tables.paired_tables(runs))
    assert average["sam"][0] == "+2.50 ± 31.77 (1/2)", "seeds 0 and 2, mean of the tasks"
    assert average["sam"][1] == "-0.0900 ± 0.1271 (2/2)", "of the task that has one"
    assert average["l2"] == ["–"] * 4
    assert first["sam"][:2] == ["+10.00 ± 0.00 (2/2)", "-0.0900 ± 0.1271 (2/2)"]
    assert second["sam"][:3] == ["-5.00 ± 63.53 (0/2)", "–", "–"]


def test_significance_marks_are_those_of_mann_whitney_and_holm() -> None:
    """Five seeds above five, or below: p = 2/252, times three by Holm, of three methods."""
    runs = results(r3f=[score - 0.2 for score in PLAIN])
    assert tables.significant_methods(runs, "score") == {"sam", "r3f"}
    assert tables.significant_methods(runs, "score", level=2.9 * 2 / 252) == set()
    average = rows(tables.paired_tables(runs)[0])
    assert average["sam"][0] == "+10.00 ± 0.00 (5/5) †" and average["l2"][0].endswith("(5/5)")
    few = to_frame(by_method({"none": [0.5] * 3, "sam": [0.6] * 3}))
    assert tables.significant_methods(few, "score") == set(), "3 against 3: no p below 0.1"


def test_a_test_over_all_pairs() -> None:
    """Two tasks, three seeds: 5 of 6 better; 2 of 8 flips of seeds, 2 of 4 of tasks, as far."""
    runs = to_frame(
        [
            *by_method({"none": [0.5] * 3}, "ab"),
            *by_method({"sam": [0.52, 0.53, 0.54]}, "a"),
            *by_method({"sam": [0.51, 0.51, 0.49]}, "b"),
        ]
    )
    first = tables.overall_tables(runs)[0]
    assert first.header == ["method", "mean", "better", "p, sign", "p, seeds", "p, tasks"]
    assert first.rows == [["sam", "+1.67", "5/6", "0.219", "0.25", "0.5"]]


def test_the_best_control_of_no_higher_cost() -> None:
    scores = {
        "none": [0.5, 0.5],
        "sam": [0.60, 0.62],
        "r3f": [0.55, 0.59],
        "label-smoothing": [0.54, 0.56],
        "jachess-train": [0.58, 0.58],
        "jachess-train,placebo=yes": [0.4, 0.4],
    }
    costs = {"none": 10.0, "sam": 40.0}
    seconds = {m: {"seconds": {"processor": costs.get(m, 20.0)}} for m in scores}
    runs = to_frame(by_method(scores, **seconds))
    (table,) = tables.best_control_tables(runs)
    assert table.rows[0] == ["jachess-train", "score × 100", "r3f", "+1.00 ± 25.41 (1/2)"]
    assert {row[0] for row in table.rows} == {"jachess-train"}, "a placebo is a control"
    (costed,) = tables.cost_tables(runs)
    assert costed.rows[:3] == [["none", "1.00"], ["sam", "4.00"], ["r3f", "2.00"]]


def test_the_plain_models_best_epoch_is_a_column() -> None:
    best = {"epoch": 2.0, "score": 0.7, "nll": 0.4, "brier": 0.2, "brier_scaled": 0.1}
    runs = to_frame(
        [
            record("none", "a", 0, 0.65, best_epoch=best),
            record("none", "a", 1, 0.65, best_epoch=best | {"score": 0.5}),
            record("sam", "a", 0, 0.9),
        ]
    )
    scores, table = tables.score_tables(runs)
    assert tables.methods_of(runs) == list(rows(scores)) == ["none", "sam"]
    assert rows(table) == {"none": ["60.0 ± 14.1"], "sam": ["–"]}


def test_runs_that_choose_strengths_alone_are_no_comparison() -> None:
    with pytest.raises(DataError, match="no run has finished yet, or only runs that choose"):
        to_frame([record("l2", "a", 0, 0.5, kind="tuning", value=0.3)])


def test_nothing_to_compare_with() -> None:
    for name in ("sam", "none"):
        alone = to_frame([record(name, "a", 0, 0.5)])
        assert tables.paired_tables(alone) == tables.overall_tables(alone) == []
        assert tables.best_control_tables(alone) == tables.cost_tables(alone) == []
