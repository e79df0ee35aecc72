"""The scaling benchmarks on small synthetic tables: what they print is what they say."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    bench_laws,
    law_errors,
    selection,
    selection_families,
    selection_halves,
    selection_judging,
)
from jachess_ext.scaling import LossTable, fit, pear_corr, select
from jachess_ext.scaling.laws import LAWS
from python_tests.scaling import tables


@pytest.mark.parametrize("baseline", ["least_squares", "published"])
def test_law_fits_are_as_good_as_scipys(baseline: str) -> None:
    sizes, losses = bench_laws.make_curves(1)
    fitted: Any = fit(
        sizes, losses, "rectified", huber_delta=bench_laws.DELTA, starts=bench_laws.STARTS
    )
    loop = bench_laws.ScipyLoop(LAWS["rectified"](), sizes, losses)
    assert getattr(loop, baseline)() / fitted.objective > 0.999


@pytest.fixture(scope="module")
def table() -> LossTable:
    return tables.population(3, models=12)[0]


def test_selection_writes_what_select_gives(table: LossTable, tmp_path: Path) -> None:
    path = tables.write_csv(tmp_path / "t.csv", table)
    arguments = ["--table", str(path), "--results", str(tmp_path), "--fractions", "32", "128"]
    rows = selection.main(arguments)
    assert {(row.fraction, row.method) for row in rows} == {
        (fraction, method) for fraction in (32, 128) for method in selection.METHODS
    }
    with (tmp_path / "selection.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows)
    found = {(row["fraction"], row["method"]): row for row in written}
    expected = select(table, 51200, 1638400, "ats", tau=1.0)
    truth = table.losses_at(1638400)
    row = found[("32", "ats tau=1")]
    assert float(row["pear_corr"]) == pytest.approx(
        pear_corr(expected.predicted_losses, truth), rel=1e-4
    )
    assert float(row["flops_share"]) == pytest.approx(
        expected.flops / expected.full_flops, rel=1e-4
    )
    ours, blend = found[("32", "blend")], select(table, 51200, 1638400)
    assert float(ours["pear_corr"]) == pytest.approx(
        np.corrcoef(blend.predicted_losses, truth)[0, 1] * 100, rel=1e-4
    )
    assert 0 <= float(ours["coverage_referenced"]) <= 100
    assert found[("32", "zeroshot")]["coverage"] == ""


def test_folds_partition_the_models(table: LossTable) -> None:
    folds = selection._folds(table)
    np.testing.assert_array_equal(np.sort(np.concatenate(folds)), np.arange(12))


def test_halves_are_shares(table: LossTable, tmp_path: Path) -> None:
    path = tables.write_csv(tmp_path / "t.csv", table)
    arguments = ["--table", str(path), "--results", str(tmp_path), "--fractions", "128"]
    one, mean = selection_halves.main([*arguments, "--halves", "2"])
    assert one == mean
    assert all(value in (0.0, 50.0, 100.0) for value in one[:5]) and 0 <= one[5] <= 100
    assert one[2] + one[3] <= 100


def lcdb_folder(folder: Path, sizes: Sequence[int] = tuple(2**k for k in range(4, 12))) -> Path:
    """Two even data sets and an odd one: ten learners, two splits; one learner stops early."""
    generator = np.random.default_rng(0)
    for measure in ("logloss", "accuracy", "auc"):
        lines = ["openmlid,learner,size_train,outer_seed,score_test"]
        for number in (2, 4, 5):
            for learner in range(10):
                for size in sizes[: 6 if learner == 9 else 8]:
                    for seed in (0, 1):
                        error = 0.1 + (1 + 0.1 * learner) / size**0.3 * generator.uniform(0.9, 1.1)
                        score = error if measure == "logloss" else 1 - error / 2
                        lines.append(f"{number},l{learner},{size},{seed},{score}")
        (folder / f"database-{measure}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_families_are_read_and_judged(tmp_path: Path) -> None:
    flan = tables.write_csv(tmp_path / "flan.csv", tables.population(3, models=12)[0])
    llm = tmp_path / "llm.csv"
    rows = ["task,model,metric,50,100,200,500,1000,5000,9000"]
    for task in ("x", "y"):
        for place, model in enumerate("abc"):
            scores = [0.5, 0.6, 0.65 - 0.01 * place, 0.7, 0.75, 0.9 - 0.02 * place]
            rows.append(f"{task},{model},accuracy," + ",".join(map(str, scores)) + ",")
    llm.write_text("\n".join(rows) + "\n")
    cases = list(selection_families.lcdb_cases(lcdb_folder(tmp_path), None))
    assert [(case.family, case.half) for case in cases[:2]] == [
        ("lcdb logloss", "B"),
        ("lcdb logloss", "A"),
    ]
    assert len(cases) == 6 and cases[0].table.losses.shape == (9, 8)
    assert cases[0].budgets == (256.0, 64.0)
    given = ["--flan", str(flan), "--llm", str(llm), "--lcdb", str(tmp_path)]
    chosen = ["--methods", "blend", "subtuning", "--results", str(tmp_path)]
    found = selection_families.main([*given, *chosen])
    one = found[("llm", "A", "blend")]
    assert len(one.rel_acc) == 2 and len(one.said) == len(one.true) == 6
    assert sum(one.said) == pytest.approx(2) and sum(one.true) == pytest.approx(2)
    whole = found[("flan", "A", "subtuning")]
    table, target = selection_families.read_table(flan), 1638400.0
    forecasts = [select(table, target / 2**k, target).predicted_losses for k in range(3, 10)]
    expected = [100 * np.corrcoef(x, table.losses_at(target))[0, 1] for x in forecasts]
    assert found[("flan", "A", "blend")].pear_corr == pytest.approx(expected)
    by_hand = [
        pear_corr(table.losses_at(target / 2**k), table.losses_at(target)) for k in range(3, 10)
    ]
    assert whole.pear_corr == pytest.approx(by_hand)
    written = (tmp_path / "selection_families.md").read_text()
    assert f"| {np.mean(by_hand):.1f} |" in written and "| llm | B | blend | 2 |" in written


def test_verdicts_say_what_is_missed() -> None:
    def figures(acc: float, corr: list[float], half: float, most: float) -> Any:
        return selection_families.Figures(
            rel_acc=[acc, acc], pear_corr=corr, cover_50=[half], cover_90=[most]
        )

    found = {
        ("x", "A", "blend"): figures(90.0, [50.0, np.nan], 60.0, 95.0),
        ("x", "A", "ats"): figures(80.0, [40.0, 45.0], 0.0, 0.0),
        ("x", "A", "subtuning"): selection_families.Figures(rel_acc=[90.2, 90.6]),
        ("x", "B", "blend"): figures(90.0, [50.0, 60.0], 42.0, 84.0),
        ("x", "B", "ats"): figures(90.3, [55.0, 45.0], 0.0, 0.0),
    }
    _, *rows = selection_families.verdicts_of(found)
    assert rows == [
        ["x", "A", "**-0.4 (subtuning)**", "1 of 2", "**60.0**", "95.0"],
        ["x", "B", "-0.3 (ats)", "1 of 2", "42.0", "**84.0**"],
    ]


def test_bins_compare_what_was_said_with_what_was_true() -> None:
    figures = selection_families.Figures(said=[0.1, 0.9, 1.0, 0.85], true=[0.0, 1.0, 1.0, 0.0])
    head, *rows = selection_families.bins_of({("llm", "B", "blend"): figures})
    assert len(head) == 8 and [row[2] for row in rows] == ["all", "llm"]
    assert rows[0][3] == "0.10 0.00 (1)" and rows[0][7] == "**0.92 0.67 (3)**"
    assert rows[1][7] == "0.92 0.67 (3)", "of single families nothing is asked"


def test_judged_rows_are_wrong_as_often_as_they_should_be() -> None:
    errors = np.array([[0.5, 0.2], [0.4, 0.0]])
    draws = [selection_judging.seen(errors, 50, np.random.default_rng(k)) for k in range(400)]
    found = np.array(draws)
    np.testing.assert_allclose(found.mean(0), np.maximum(errors, 0.01), atol=0.02)
    assert (found >= 0.01).all() and np.ptp(found[:, 1, 1]) == 0
    together = np.corrcoef(found[:, 0, 0], found[:, 1, 0])[0, 1]
    assert 0.2 < together < np.corrcoef(found[:, 0, 0], found[:, 0, 1])[0, 1] < 0.95


def test_designs_of_judging(tmp_path: Path) -> None:
    folder = lcdb_folder(tmp_path, (16, 32, 45, 64, 91, 128, 512, 1024))
    given = ["--lcdb", str(folder), "--draws", "1", "--results", str(tmp_path)]
    rows = selection_judging.main(given)
    assert len(rows) == len(selection_judging.DESIGNS) and {row.tables for row in rows} == {1}
    table = next(
        case.table
        for case in selection_families.lcdb_cases(folder, None, ("accuracy",))
        if case.half == "A"
    )
    truth = table.losses_at(1024)
    assert rows[0].judged is None and rows[0].cost == pytest.approx(189 / 1024)
    known = LossTable(
        table.names,
        np.array([16.0, 45.0, 128.0]),
        np.stack([table.losses_at(size) for size in (16, 45, 128)], -1),
        None,
    )
    scores = select(known, 128, 1024).scores
    assert rows[0].lost == pytest.approx(100 * (truth[scores.argmin()] - truth.min()))
    with (tmp_path / "selection_judging.csv").open() as file:
        assert [row["judged"] for row in csv.DictReader(file)][:2] == ["", "200"]


def test_laws_are_judged_where_they_say(tmp_path: Path) -> None:
    """Rectified curves: the law is exact on all sizes and beyond; the power law is not."""
    sizes = np.concatenate([[0.0], 200.0 * 2.0 ** np.arange(14)])
    levels = np.array([[40.0], [60.0], [90.0]])
    losses = levels / (30.0 + sizes**0.4) + np.array([[0.5], [0.8], [1.1]])
    names = ("gpt2", "t5-base", "another")
    path = tables.write_csv(tmp_path / "t.csv", LossTable(names, sizes, losses, np.ones(3)))
    *rows, mean = law_errors.main(["--table", str(path), "--results", str(tmp_path)])
    for row in rows:
        assert max(row.rectified, row.rectified_without_zero, row.rectified_ahead) < 0.02
        assert row.power > 0.1 and row.power_ahead > 0.05
    assert rows[0].published_lensllm == 0.30 and rows[2].published_lensllm is None
    assert mean.model == "mean of 2" and mean.published_rectified == pytest.approx(1.245)
    assert mean.power == pytest.approx((rows[0].power + rows[1].power) / 2)
    kept = fit(sizes[1:12], losses[:, 1:12], "power").predict(sizes[12:])
    by_hand = 10 * np.sqrt(((np.asarray(kept) - losses[:, 12:]) ** 2).mean(1))
    assert [row.power_ahead for row in rows] == pytest.approx(by_hand.tolist())
    read = law_errors.errors(LossTable(names, sizes, losses, None), "power", False, 204_800.0)
    np.testing.assert_allclose(read, by_hand)
