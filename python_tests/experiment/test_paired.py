"""Differences seed by seed: every number can be worked out on paper."""

from __future__ import annotations

from jachess_ext.experiment.paired import paired_tables
from jachess_ext.experiment.tables import Results

from .records import record
from .test_tables import results, rows


def test_differences_are_of_the_same_seed() -> None:
    average, *of_tasks = paired_tables(results(sam=[0.51, 0.52, 0.53, 0.54, 0.50]))
    got = rows(average)
    assert got["l2"][0] == "+0.50 ± 0.00 (5/5)"
    assert got["sam"][0] == "+0.00 ± 1.00 (4/5)"  # four of +1, one of -4: sd √5, over √5
    assert got["l2"][1:] == ["+0.0000 ± 0.0000 (0/5)"] * 2, "as good is not better"
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
    assert average["sam"][0] == "+2.50 ± 2.50 (1/2)", "seeds 0 and 2, mean of the tasks"
    assert average["sam"][1] == "-0.0900 ± 0.0100 (2/2)", "of the task that has one"
    assert average["l2"] == ["–"] * 3
    assert first["sam"][:2] == ["+10.00 ± 0.00 (2/2)", "-0.0900 ± 0.0100 (2/2)"]
    assert second["sam"] == ["-5.00 ± 5.00 (0/2)", "–", "–"]


def test_nothing_to_compare_with() -> None:
    assert paired_tables(Results.of([record("sam", "a", 0, 0.5)])) == []
    assert paired_tables(Results.of([record("none", "a", 0, 0.5)])) == []
