"""Selections on small synthetic tables: what is printed is what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import selection
from benchmarks.forecast_scores import cross_entropy, pear_corr
from jachess_ext.scaling import read_table, select
from jachess_ext.scaling.blend import forecasts
from jachess_ext.scaling.constants import CONSTANTS, Constants
from python_tests.scaling import tables


def test_budgets_are_what_select_gives(tmp_path: Path) -> None:
    table = tables.population(3, models=12)[0]
    path = tables.write_csv(tmp_path / "t.csv", table)
    given = ["budgets", str(path), "--results", str(tmp_path), "--fractions", "32"]
    selection.main(given)
    written = pd.read_csv(tmp_path / "selection.csv").set_index(["fraction", "method"])
    assert len(written) == len(selection.METHODS)
    expected, truth = select(table, 51200, 1638400, "ats", tau=1.0), table.losses_at(1638400)
    row = written.loc[(32, "ats tau=1")]
    correlation = pear_corr(expected.predicted_losses, truth)
    assert row.pear_corr == pytest.approx(correlation, rel=1e-4)
    assert row.flops_share == pytest.approx(expected.flops / expected.full_flops, rel=1e-4)
    ours, blend = written.loc[(32, "blend")], select(table, 51200, 1638400)
    used = table.up_to(51200)
    (undrawn,) = forecasts(used.trained, used.trained_losses, [1638400.0])
    correlation = np.corrcoef(np.exp(undrawn.extrapolation), truth)[0, 1] * 100
    assert ours.pear_corr == pytest.approx(correlation, rel=1e-4)
    surprise = -np.log(blend.best_probabilities[truth.argmin()])
    assert ours.minus_log_p == pytest.approx(surprise, rel=1e-4)
    assert np.isnan(written.loc[(32, "subtuning")].minus_log_p)
    assert np.isnan(written.loc[(32, "zeroshot")].coverage)


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


def llm_file(folder: Path) -> Path:
    """Two tasks of three models, whose largest size none of them has."""
    rows = ["task,model,metric,50,100,200,500,1000,5000,9000"]
    for task in ("x", "y"):
        for place, model in enumerate("abc"):
            scores = [0.5, 0.6, 0.65 - 0.01 * place, 0.7, 0.75, 0.9 - 0.02 * place]
            rows.append(f"{task},{model},accuracy," + ",".join(map(str, scores)) + ",")
    path = folder / "llm.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_families_are_read_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FEW_TABLES", 1)
    flan = tables.write_csv(tmp_path / "flan.csv", tables.population(3, models=12)[0])
    llm = llm_file(tmp_path)
    cases = list(selection.lcdb_cases(lcdb_folder(tmp_path), "A", None))
    assert len(cases) == 6 and cases[0].table.losses.shape == (9, 8)
    assert [case.source for case in selection.lcdb_cases(tmp_path, "B", None)] == ["5"] * 3
    assert cases[0].budgets == (256.0, 64.0)
    few = selection.lcdb_cases(tmp_path, "A", None, ("auc",), every=2)
    assert [(case.family, case.source) for case in few] == [("lcdb auc", "2")]
    given = ["--flan", str(flan), "--llm", str(llm), "--lcdb", str(tmp_path)]
    chosen = ["--methods", "blend", "subtuning", "--results", str(tmp_path)]
    judged = selection.main(["families", *given, *chosen]).set_index(["family", "method"])
    of_llm = judged.loc["llm", "blend"]
    assert all(sum(said) == pytest.approx(1) for said in [*of_llm.said, *of_llm.true])
    for _, row in of_llm.iterrows():
        place = int(np.argmax(row.true))
        assert row["−ln P"] == pytest.approx(-np.log(row.said[place]))
        assert row["top said"] == max(row.said) and row.alike == pytest.approx(np.log(3))
        assert row["top true"] == row.true[int(np.argmax(row.said))]
    x = next(iter(selection.llm_cases(llm, "A")))
    found = select(x.table, 500.0, 5000.0)
    logs = np.log(found.predicted_losses)
    power = np.exp(-2.4 * (logs - logs.mean()) / np.std(logs))
    first = of_llm.iloc[0]
    assert first["softmax"] == pytest.approx(-np.log(power[0] / power.sum()))
    assert first["softmax top"] == pytest.approx(power.max() / power.sum())
    t = (np.log(x.table.losses_at(5000.0)) - found.forecast.predictive.location) / (
        found.forecast.predictive.scale
    )
    # Student's density with four degrees of freedom, written out
    density = 3 / 8 / (1 + t**2 / 4) ** 2.5 / found.forecast.predictive.scale
    assert first["log score"] == pytest.approx(-np.log(density).mean())
    order = sorted(range(3), key=lambda place: -first.said[place])
    count = next(k for k in (1, 2, 3) if sum(first.said[place] for place in order[:k]) >= 0.9)
    assert first["kept"] == pytest.approx(100 * count / 3)
    assert first["kept true"] == 100.0 * sum(first.true[place] for place in order[:count])
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
    one, other = (list(selection.flan_cases(flan, half)) for half in "AB")
    assert not set(one[0].table.names) & set(other[0].table.names)
    with pytest.raises(SystemExit, match="no tables"):
        selection.main(["families"])


def test_each_constant_is_changed_and_put_back(tmp_path: Path) -> None:
    """Families are pretraining tables; a wider prior of errors leaves the choices as they are."""
    lines = ["family,table,model,size,loss"]
    for number, family in enumerate(("corpora", "corpora", "rates")):
        table = tables.population(number, models=4)[0]
        losses = table.trained_losses[:, :7]
        lines += [
            f"{family},{number},{name},{size:.0f},{loss}"
            for name, row in zip(table.names, losses, strict=True)
            for size, loss in zip(table.trained[:7], row, strict=True)
        ]
    path = tmp_path / "pretraining.csv"
    path.write_text("\n".join(lines) + "\n")
    cases = list(selection.pretraining_cases(path))
    assert [case.family for case in cases] == ["corpora", "corpora", "rates"]
    assert all(case.table.sizes[-1] / case.budgets[-1] == 16 for case in cases)
    words = [
        "constants",
        "--pretraining",
        str(path),
        "--names",
        "width",
        "--results",
        str(tmp_path),
    ]
    shown = selection.main(words)
    assert Constants() == CONSTANTS and shown.value.tolist() == ["", "0.5", "2"]
    assert shown.RelAcc.nunique() == 1
    assert float(shown["90 %"][1]) <= float(shown["90 %"][0]) <= float(shown["90 %"][2])
    judged = [list(selection.judge_case(case, "blend")) for case in cases]
    means = [
        np.mean([row["RelAcc"] for row in rows]) for rows in (judged[0] + judged[1], judged[2])
    ]
    assert float(shown.RelAcc[0]) == pytest.approx(np.mean(means), abs=1e-3)
    assert "| width | 2 |" in (tmp_path / "selection_constants.md").read_text()


def test_cross_entropy_of_shares() -> None:
    chances = np.array([0.5, 0.3, 0.2, 0.0])
    with np.errstate(divide="ignore"):
        logs = np.log(chances) + 7.0  # up to a constant
    assert cross_entropy(logs, [0, 1, 0, 0]) == pytest.approx(-np.log(0.3))
    assert cross_entropy(logs, [0.5, 0.5, 0, 0]) == pytest.approx(-np.log(0.15) / 2)


def test_comparisons_count_families_alike() -> None:
    """Two tables of a and one of b: means by hand, and bounds that are those of two tables."""
    tried = [("a", "1", 90.0, 80.0), ("a", "2", 70.0, 80.0), ("b", "1", 60.0, 30.0)]
    rows = [
        {"family": family, "source": source, "budget": 1.0, "method": method, "RelAcc": value}
        for family, source, ours, other in tried
        for method, value in (("blend", ours), ("ats", other))
    ]
    frame = selection.compared(pd.DataFrame(rows).assign(**{"RMSE ln L": 1.0}))
    assert frame.iloc[0].tolist() == [
        *("RelAcc", "ats", "+0.0 [-10.0, +10.0]", "+30.0", "+15.0 [+10.0, +20.0]")
    ]
    lcdb = [{**row, "family": "lcdb auc", "source": "1"} for row in rows[:2]]
    both = [{**row, "family": "lcdb accuracy"} for row in lcdb] + lcdb + rows[4:]
    frame = selection.compared(pd.DataFrame(both).assign(**{"RMSE ln L": 1.0}))
    assert frame.iloc[0].tolist() == ["RelAcc", "ats", "+10.0", "+30.0", "+20.0 [+20.0, +20.0]"]


def test_plain_halving_by_hand() -> None:
    """Five models; b leads at 10, d at 15 and 20, e at 40; halves of five are two, of two one."""
    sizes = np.array([10.0, 15.0, 20.0, 40.0])
    losses = np.array([[5, 5, 5, 1], [1, 9, 3, 3], [2, 8, 2, 2], [3, 1, 1, 9], [4, 7, 6, 0.5]])
    prices = np.array([1.0, 1.0, 2.0, 1.0, 1.0])
    np.testing.assert_array_equal(selection.doubling(sizes), [0, 2, 3])
    assert selection.halving(losses, sizes, prices, 59.0) == (1, 60.0), "at least the smallest"
    first = 10 * 6 + 20 * 3  # all, then b and c
    assert selection.halving(losses, sizes, prices, first) == (2, first)
    second = 15 * 6 + 40 * 2  # all, then d and a, at 40
    assert selection.halving(losses, sizes, prices, second - 1) == (2, first)
    assert selection.halving(losses, sizes, prices, second) == (0, second)
    everything = 40 * 6
    assert selection.halving(losses, sizes, prices, everything) == (4, everything)


def test_regret_is_a_share_of_a_loss_and_points_of_a_score() -> None:
    truth = np.array([0.2, 0.5])
    assert selection.regrets(truth, truth, "flan") == pytest.approx([0, 100 * np.log(2.5)])
    assert selection.regrets(truth, truth, "lcdb auc") == pytest.approx([0, 30])


def test_development(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Means by family, of the families and by sizes; what is switched off, and then on again."""
    for name in ("FEW_TABLES", "COIN_TABLES"):
        monkeypatch.setattr(selection, name, 1)
    monkeypatch.setattr(selection, "COINS", ((2, 3), (10, 4)))
    monkeypatch.setitem(selection._SHARES, "flan", (8, 64, 512))
    flan = tables.write_csv(tmp_path / "flan.csv", tables.population(3, models=6)[0])
    given = ["--flan", str(flan), "--llm", str(llm_file(tmp_path)), "--results", str(tmp_path)]
    shown = selection.main(["development", *given]).set_index(["variant", "group"])
    assert "without the families of --lcdb, --pretraining" in capsys.readouterr().err
    written = pd.read_csv(tmp_path / "selection_development.csv")
    assert len(written) == len(shown) and Constants() == CONSTANTS
    today = shown.loc["as it is"]
    assert today.cases[["flan", "llm", *selection.FEW]].tolist() == [3, 6, 4, 4]
    for figure in ("RelAcc", "−ln P", "regret said", "go on"):  # FLAN's few are not counted
        assert today[figure]["mean"] == pytest.approx(today[figure][["flan", "llm"]].mean())
    assert today.cases[[*selection.SIZES]].sum() == today.cases["mean"] == 9
    bins = today[today.index.str.startswith("P(best)")]
    assert (bins.cases * bins["P said"]).sum() == pytest.approx(9)
    assert today["no signal"]["coins, 10 models, 4 sizes"] > 0
    whole = read_table(flan)
    target = float(whole.sizes[-1])
    truth, found = (
        whole.losses_at(target),
        [select(whole, target / 2**k, target) for k in (3, 6, 9)],
    )
    chosen = np.array([selected.scores.argmin() for selected in found])
    assert today["regret true"]["flan"] == pytest.approx(
        100 * np.log(truth[chosen] / truth.min()).mean()
    )
    last = [whole.losses_at(target / 2**k).argmin() for k in (3, 6, 9)]
    of_last = 100 * (truth.max() - truth[last]).mean() / np.ptp(truth)
    assert today["last"]["flan"] == pytest.approx(of_last)
    undrawn = shown.loc["no draw to the last losses"]
    for of_drawn, of_undrawn in (("RMSE ln L", "RMSE, undrawn"), ("PearCorr", "PearCorr, undrawn")):
        assert undrawn[of_drawn]["flan"] == pytest.approx(today[of_undrawn]["flan"])
        assert today[of_drawn]["flan"] != pytest.approx(today[of_undrawn]["flan"])
    forecasts = [shown["RMSE, undrawn"][variant, "flan"] for variant in selection.VARIANTS]
    assert len({round(rmse, 9) for rmse in forecasts}) == 3, "the draw changes no extrapolation"
    with pytest.raises(SystemExit, match="no tables"):
        selection.main(["development"])


@pytest.mark.slow
def test_advice_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FEW_TABLES", 1)
    flan = tables.write_csv(tmp_path / "flan.csv", tables.population(3, models=12)[0])
    given = ["--flan", str(flan), "--results", str(tmp_path)]
    searched = selection.main(["advice", *given]).set_index(["family", "budget", "method"])
    case = next(iter(selection.flan_cases(flan, "A")))
    table, target = case.table, 1638400.0
    budget, truth = target / 64, case.table.losses_at(target)
    found, row = select(table, budget, target), selection.follow(case, budget)
    assert row is not None and row["named"] == len(found.shortlist)
    full = dict(zip(found.names, found.full_costs, strict=True))
    cost = sum(full[name] for name in found.shortlist) / sum(full.values())
    true = min(truth[table.names.index(name)] for name in found.shortlist) / truth.min()
    assert row["cost"] == pytest.approx(cost) and row["true"] == pytest.approx(100 * np.log(true))
    assert row["said"] == 100 * found.expected_regret[row["named"] - 1]
    last = np.argsort(table.losses_at(budget))[:2]
    assert row["last 2"] == pytest.approx(100 * np.log(truth[last].min() / truth.min()))
    equal = searched.loc["flan", budget, "equal"]
    best = found.scores.argmin()
    assert equal.RelAcc == pytest.approx(100 * (truth.max() - truth[best]) / np.ptp(truth))
    costs = searched.groupby("method").cost.mean()
    assert (searched.cost <= 1 + 1e-9).all() and costs["equal"] == 1
    assert costs["dropping, same sizes"] < min(costs["dropping"], 0.9)
    text = (tmp_path / "selection_advice_A.md").read_text()
    assert "| flan | equal | " in text and "less that of" in text


def test_one_larger_run_at_the_same_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that double: all up to b cost 2 b less the smallest, so that 2 b is the next."""
    monkeypatch.setattr(selection, "FEW_TABLES", 1)
    flan = tables.write_csv(tmp_path / "flan.csv", tables.population(0, models=12)[0])
    judged = selection.main(["larger", "--flan", str(flan), "--results", str(tmp_path)])
    case = next(iter(selection.flan_cases(flan, "A")))
    table, target = case.table, 1638400.0
    truth, rows = table.losses_at(target), judged[judged.family == "flan"]
    assert len(rows) == len(case.budgets) and (rows["size"] == 2).all()
    for budget, row in zip(case.budgets, rows.to_dict("records"), strict=True):
        choice = select(table, budget, target)
        places = choice.scores.argmin(), table.losses_at(2 * budget).argmin()
        forecast, run = (100 * (truth.max() - truth[at]) / np.ptp(truth) for at in places)
        assert (row["forecast"], row["one run"]) == pytest.approx((forecast, run))
        assert row["cost"] == pytest.approx(2 * budget / (2 * budget - table.trained[0]))
    assert (abs(rows["forecast"] - rows["one run"]) > 1).any(), "one of the two is better"
    assert "| flan | 7 | " in (tmp_path / "selection_larger_A.md").read_text()


@pytest.mark.slow
def test_a_history_is_judged_against_none(tmp_path: Path) -> None:
    paths = []
    for seed in range(3):
        table = tables.population(seed, 6)[0]
        paths.append(tables.write_csv(tmp_path / f"{seed}.csv", table))
    judged = selection.history(tables=tuple(paths), results=tmp_path)
    assert judged.groupby("tables", sort=False).size().to_dict() == {"1": 21, "all": 21}
    row = judged[(judged.source == "1") & (judged.tables == "all")].iloc[0]
    whole, others = read_table(paths[1]), [read_table(paths[0]), read_table(paths[2])]
    budget, target = float(row.budget), float(whole.sizes[-1])
    truth = whole.losses_at(target)
    today = select(whole, budget, target)
    moved = select(whole, budget, target, history=others)
    for choice, suffix in ((today, ", today"), (moved, "")):
        rmse = np.sqrt(np.mean(np.log(choice.predicted_losses / truth) ** 2))
        assert row["RMSE ln L" + suffix] == pytest.approx(rmse, rel=1e-9)
        chance = choice.best_probabilities[truth.argmin()]
        assert row["−ln P" + suffix] == pytest.approx(-np.log(chance), rel=1e-9)
    logs = [np.log(other.losses[:, -1]) for other in others]
    alone = sum((log - log.mean()) / log.std() for log in logs).argmin()
    assert row["RelAcc, alone"] == pytest.approx(100 * (truth.max() - truth[alone]) / np.ptp(truth))
    text = (tmp_path / "selection_history_A.md").read_text(encoding="utf-8")
    assert "| tables | all | 21 |" in text
