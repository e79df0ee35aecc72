"""Differences seed by seed: every number can be worked out on paper."""

from __future__ import annotations

from typing import Any

from jachess_ext.experiment.paired import (
    best_control_table,
    cost_table,
    is_control,
    overall_tables,
    paired_tables,
)
from jachess_ext.experiment.tables import Results

from .records import record
from .test_tables import results, rows


def test_differences_are_of_the_same_seed() -> None:
    average, *of_tasks = paired_tables(results(sam=[0.51, 0.52, 0.53, 0.54, 0.50]))
    got = rows(average)
    assert got["l2"][0] == "+0.50 ± 0.00 (5/5)"
    # four of +1, one of -4: standard error 1, times t(0.975, 4 degrees)
    assert got["sam"][0] == "+0.00 ± 2.78 (4/5)"
    assert got["l2"][1:3] == ["+0.0000 ± 0.0000 (0/5)"] * 2, "as good is not better"
    assert [rows(table) for table in of_tasks] == [got, got]
    assert [table.caption.split(":")[0] for table in of_tasks] == ["a", "b"]


def test_seeds_and_tasks_that_both_have() -> None:
    found = Results.of(
        [
            *(record("none", "a", seed, 0.5, brier=0.4) for seed in (0, 1, 2)),
            *(record("sam", "a", seed, 0.6, brier=0.3 + seed / 100) for seed in (3, 2, 0)),
            *(record("l2", "a", seed, None) for seed in (0, 1)),
            *(record(name, "b", 0, 0.2, brier=None, ece=None) for name in ("none", "sam")),
            record("none", "b", 2, 0.2, brier=None, ece=None),
            record("sam", "b", 2, 0.1, brier=None, ece=None),
        ]
    )
    average, first, second = map(rows, paired_tables(found))
    assert average["sam"][0] == "+2.50 ± 31.77 (1/2)", "seeds 0 and 2, mean of the tasks"
    assert average["sam"][1] == "-0.0900 ± 0.1271 (2/2)", "of the task that has one"
    assert average["l2"] == ["–"] * 4
    assert first["sam"][:2] == ["+10.00 ± 0.00 (2/2)", "-0.0900 ± 0.1271 (2/2)"]
    assert second["sam"][:3] == ["-5.00 ± 63.53 (0/2)", "–", "–"]


def pairs_of(score: dict[str, dict[str, list[float]]], **more: Any) -> Results:
    """method → task → score by seed."""
    return Results.of(
        [
            record(method, task, seed, value, **more.get(method, {}))
            for method, tasks in score.items()
            for task, values in tasks.items()
            for seed, value in enumerate(values)
        ]
    )


def test_one_test_over_all_pairs() -> None:
    """Two tasks, three seeds: 5 of 6 better; 2 of 8 flips of seeds, 2 of 4 of tasks, as far."""
    found = pairs_of(
        {
            "none": {"a": [0.5] * 3, "b": [0.5] * 3},
            "sam": {"a": [0.52, 0.53, 0.54], "b": [0.51, 0.51, 0.49]},
        }
    )
    first = overall_tables(found)[0]
    assert first.header == ["method", "mean", "better", "p, sign", "p, seeds", "p, tasks"]
    assert first.rows == [["sam", "+1.67", "5/6", "0.219", "0.25", "0.5"]]


def test_the_best_control_of_no_higher_cost() -> None:
    scores = {
        "none": [0.5, 0.5],
        "sam": [0.60, 0.62],
        "r-drop": [0.55, 0.59],
        "label-smoothing": [0.54, 0.56],
        "jachess-train": [0.58, 0.58],
        "jachess-train,placebo=yes": [0.4, 0.4],
    }
    costs = {"none": 10.0, "sam": 40.0, "r-drop": 20.0}
    found = pairs_of(
        {method: {"a": values} for method, values in scores.items()},
        **{m: {"seconds": {"processor": costs.get(m, 20.0)}} for m in scores},
    )
    table = best_control_table(found)
    assert table is not None and table.rows[0] == [
        *("jachess-train", "score × 100", "r-drop", "+1.00 ± 25.41 (1/2)")
    ]
    assert {row[0] for row in table.rows} == {"jachess-train"}, "a placebo is a control"
    costed = cost_table(found)
    assert costed is not None
    assert costed.rows[:3] == [["none", "1.00"], ["sam", "4.00"], ["r-drop", "2.00"]]


def test_early_stopping_is_a_method_of_its_own() -> None:
    def point(epoch: int, score: float, held: float, nll: float) -> dict:
        scaled = {"brier": score / 8, "temperature": 1.0}
        held_out = {"score": held, "nll": nll}
        figures = {"score": score, "brier": score / 4, "ece": 0.1, "scaled": scaled}
        return {"epoch": epoch, **figures, "validation": held_out}

    curve = [point(1, 0.6, 0.7, 0.4), point(2, 0.8, 0.9, 0.6), point(3, 0.7, 0.9, 0.5)]
    found = Results.of([record("none", "a", 0, 0.65, curve=curve), record("sam", "a", 0, 0.9)])
    assert found.methods == ["none", "sam", *(f"none, best epoch by {n}" for n in ("score", "NLL"))]
    by_score, by_nll = found.records[2:]
    assert (by_score["score"], by_score["brier"], by_score["recipe"]["epochs"]) == (0.7, 0.175, 3)
    assert (by_nll["score"], by_nll["scaled"]["brier"]) == (0.6, 0.075)
    assert "corrupted" not in by_score and "curve" not in by_score
    assert is_control(found, "none, best epoch by NLL")


def test_nothing_to_compare_with() -> None:
    assert paired_tables(Results.of([record("sam", "a", 0, 0.5)])) == []
    assert paired_tables(Results.of([record("none", "a", 0, 0.5)])) == []
