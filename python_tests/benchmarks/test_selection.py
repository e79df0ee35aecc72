"""The scaling benchmarks on small synthetic tables: what they print is what they say."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import bench_micro, selection
from benchmarks.forecast_scores import pear_corr
from jachess_ext.scaling import LossTable, fit, select
from jachess_ext.scaling.laws import LAWS
from python_tests.scaling import tables


@pytest.mark.parametrize("baseline", ["least_squares", "published"])
def test_law_fits_are_as_good_as_scipys(baseline: str) -> None:
    sizes, losses = bench_micro.make_curves(1)
    fitted: Any = fit(
        sizes, losses, "rectified", huber_delta=bench_micro.DELTA, starts=bench_micro.STARTS
    )
    loop = bench_micro.ScipyLoop(LAWS["rectified"](), sizes, losses)
    assert getattr(loop, baseline)() / fitted.objective > 0.999


@pytest.fixture(scope="module")
def table() -> LossTable:
    return tables.population(3, models=12)[0]


def test_selection_writes_what_select_gives(table: LossTable, tmp_path: Path) -> None:
    path = tables.write_csv(tmp_path / "t.csv", table)
    arguments = ["--table", str(path), "--results", str(tmp_path), "--fractions", "32", "128"]
    rows = selection.main(["budgets", *arguments])
    assert set(zip(rows.fraction, rows.method, strict=True)) == {
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
    folds = selection.folds(table)
    np.testing.assert_array_equal(np.sort(np.concatenate(folds)), np.arange(12))


def test_halves_are_shares(table: LossTable, tmp_path: Path) -> None:
    path = tables.write_csv(tmp_path / "t.csv", table)
    arguments = ["--table", str(path), "--results", str(tmp_path), "--fractions", "128"]
    frame = selection.main(["halves", *arguments, "--halves", "2"])
    assert frame.budget.tolist() == ["1/128", "mean"]
    *shares, covered = frame.iloc[0, 4:]
    assert frame.iloc[1, 4:].tolist() == [*shares, covered]
    assert set(shares) <= {0.0, 50.0, 100.0} and 0 <= covered <= 100
    assert shares[2] + shares[3] <= 100


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
    cases = list(selection.lcdb_cases(lcdb_folder(tmp_path), "A", None))
    assert [(case.family, case.source) for case in cases[:2]] == [
        ("lcdb logloss", "2"),
        ("lcdb logloss", "4"),
    ]
    assert len(cases) == 6 and cases[0].table.losses.shape == (9, 8)
    assert [case.source for case in selection.lcdb_cases(tmp_path, "B", None)] == ["5"] * 3
    assert cases[0].budgets == (256.0, 64.0)
    given = ["--flan", str(flan), "--llm", str(llm), "--lcdb", str(tmp_path)]
    chosen = ["--methods", "blend", "subtuning", "--results", str(tmp_path)]
    judged = selection.main(["families", *given, *chosen]).set_index(["family", "method"])
    llm = judged.loc["llm", "blend"]
    assert len(llm) == 2
    assert all(sum(said) == pytest.approx(1) for said in [*llm.said, *llm.true])
    table, target = selection.read_table(flan).rows(np.arange(0, 12, 2)), 1638400.0
    forecasts = [select(table, target / 2**k, target).predicted_losses for k in range(3, 10)]
    expected = [100 * np.corrcoef(x, table.losses_at(target))[0, 1] for x in forecasts]
    assert judged.loc["flan", "blend"].PearCorr.tolist() == pytest.approx(expected)
    by_hand = [
        pear_corr(table.losses_at(target / 2**k), table.losses_at(target)) for k in range(3, 10)
    ]
    assert judged.loc["flan", "subtuning"].PearCorr.tolist() == pytest.approx(by_hand)
    written = (tmp_path / "selection_families_A.md").read_text()
    assert f"| {np.mean(by_hand):.1f} |" in written and "| llm | blend | 2 |" in written
    assert (judged.xs("blend", level="method")["first"] == 100).all()
    one, other = (list(selection.flan_cases(flan, half)) for half in "AB")
    assert not set(one[0].table.names) & set(other[0].table.names)
    assert len(one) == len(other) == 25


def test_comparisons_count_families_alike() -> None:
    """Two tables of a and one of b: means by hand, and bounds that are those of two tables."""
    rows = [
        {"family": family, "source": source, "budget": 1.0, "method": method, "RelAcc": value}
        for family, source, ours, other in (
            ("a", "1", 90, 80),
            ("a", "2", 70, 80),
            ("b", "1", 60, 30),
        )
        for method, value in (("blend", float(ours)), ("ats", float(other)))
    ]
    frame = selection.compared(pd.DataFrame(rows).assign(**{"RMSE ln L": 1.0}))
    assert frame.iloc[0].tolist() == [
        *("RelAcc", "ats", "+0.0 [-10.0, +10.0]", "+30.0", "+15.0 [+10.0, +20.0]")
    ]
    lcdb = [{**row, "family": "lcdb auc", "source": "1"} for row in rows[:2]]
    both = [{**row, "family": "lcdb accuracy"} for row in lcdb] + lcdb + rows[4:]
    frame = selection.compared(pd.DataFrame(both).assign(**{"RMSE ln L": 1.0}))
    assert frame.iloc[0].tolist() == ["RelAcc", "ats", "+10.0", "+30.0", "+20.0 [+20.0, +20.0]"]


def test_bins_compare_what_was_said_with_what_was_true() -> None:
    said, true = [0.1, 0.9, 1.0, 0.85], [0.0, 1.0, 1.0, 0.0]
    case = {"family": "llm", "method": "blend", "said": said, "true": true}
    bins = selection.best_bins(pd.DataFrame([case]))
    rows = bins.to_numpy().tolist()
    assert bins.shape[1] == 7 and [row[1] for row in rows] == ["all", "llm"]
    for row in rows:
        assert row[2] == "0.10 0.00 (1)" and row[6] == "0.92 0.67 (3)"


def test_laws_are_judged_where_they_say(tmp_path: Path) -> None:
    """Rectified curves: the law is exact on all sizes and beyond; the power law is not."""
    sizes = np.concatenate([[0.0], 200.0 * 2.0 ** np.arange(14)])
    levels = np.array([[40.0], [60.0], [90.0]])
    losses = levels / (30.0 + sizes**0.4) + np.array([[0.5], [0.8], [1.1]])
    names = ("gpt2", "t5-base", "another")
    path = tables.write_csv(tmp_path / "t.csv", LossTable(names, sizes, losses, np.ones(3)))
    frame = selection.main(["laws", "--table", str(path), "--results", str(tmp_path)])
    rows, mean = frame.iloc[:3], frame.iloc[3]
    exact = rows[["rectified", "rectified_without_zero", "rectified_ahead"]]
    assert exact.to_numpy().max() < 0.02
    assert (rows.power > 0.1).all() and (rows.power_ahead > 0.05).all()
    assert rows.published_lensllm[0] == 0.30 and np.isnan(rows.published_lensllm[2])
    assert mean.model == "mean of 2" and mean.published_rectified == pytest.approx(1.245)
    assert mean.power == pytest.approx((rows.power[0] + rows.power[1]) / 2)
    kept = fit(sizes[1:12], losses[:, 1:12], "power").predict(sizes[12:])
    by_hand = 10 * np.sqrt(((np.asarray(kept) - losses[:, 12:]) ** 2).mean(1))
    assert rows.power_ahead.tolist() == pytest.approx(by_hand.tolist())
    read = selection.law_errors(
        LossTable(names, sizes, losses, None), "power", zero=False, budget=204_800.0
    )
    np.testing.assert_allclose(read, by_hand)


def test_the_default_law_is_judged_beside_the_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, sizes, losses = next(selection.synthetic_curves())
    losses = losses[:3]
    monkeypatch.setattr(selection, "synthetic_curves", lambda: iter([(name, sizes, losses)]))
    frame = selection.main(["default_law", "--results", str(tmp_path), "--half", "A"])
    frame = frame.set_index(["fraction", "law"])
    assert set(frame.half) == {"A"} and (frame.curves == 3).all()
    truth = np.log(losses[:, -1])
    forecast = np.asarray(fit(sizes[:11], losses[:, :11], "power").predict(sizes[-1]))
    error = np.abs(np.log(forecast) - truth)
    row = frame.loc[8, "power"]
    assert row.rms == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6)
    assert row["median"] == pytest.approx(np.median(error), rel=1e-6)
    took = [f"took {law}" for law in selection.NAMED]
    assert (frame[took].sum(1) == 3).all() and row["took power"] == 3
    assert (frame.xs("default, one for all", level="law")[took].max(1) == 3).all()
    fits = [fit(sizes[:9], each) for each in losses[:, :9]]
    error = np.abs(np.log([each.predict(sizes[-1]) for each in fits]) - truth)
    assert frame.loc[32, "default"].rms == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6)
    for level in (50, 90):
        ends = np.array([each.interval(sizes[-1], level / 100) for each in fits])
        inside = (ends[:, 0] <= losses[:, -1]) & (losses[:, -1] <= ends[:, 1])
        assert frame.loc[32, "default"][f"{level} %"] == pytest.approx(100 * inside.mean())
    assert (tmp_path / "default_law.csv").exists()


def test_halves_of_the_default_law_share_no_table(tmp_path: Path) -> None:
    """Of FLAN the rows, of LCDB the numbers by their remainder."""
    draw = np.random.default_rng(0)
    rows = [
        {"openmlid": number, "learner": f"l{place}", "size_train": size, "score_test": score}
        for number in (4, 6, 7, 9)
        for place in range(8)
        for size, score in zip((16, 1024), number / 10 + draw.uniform(0, 0.05, 2), strict=True)
    ]
    for measure in ("logloss", "accuracy"):
        pd.DataFrame(rows).to_csv(tmp_path / f"database-{measure}.csv", index=False)
    losses = np.arange(1.0, 6.0)[:, None] / np.array([1.0, 1.2, 1.5])
    table = LossTable(tuple("abcde"), np.array([1.0, 2.0, 4.0]), losses, np.ones(5))
    flan = tables.write_csv(tmp_path / "flan.csv", table)
    given = argparse.Namespace(flan=flan, lcdb=tmp_path, llm=None, most=None, half=["A", "B"])
    first: dict[tuple[str, str], list[float]] = {}
    for family, half, _, values in selection.law_tables(given):
        first.setdefault((family, half), []).extend(values[:, 0])
    assert first["flan", "A"] == [1, 3, 5] and first["flan", "B"] == [2, 4]
    for half, tenths in (("A", {4, 6}), ("B", {7, 9})):
        assert {int(10 * loss) for loss in first["lcdb logloss", half]} == tenths
        assert {int(10 * (1 - loss)) for loss in first["lcdb accuracy", half]} == tenths
    given.half = ["B"]
    assert {half for _, half, _, _ in selection.law_tables(given)} == {"B"}
