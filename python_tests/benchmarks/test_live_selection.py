"""The live-selection benchmark on two tiny models: its figures are those of the definitions."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import live_selection
from jachess_ext.live import choice
from jachess_ext.scaling import rel_acc
from python_tests.live.tiny import save_model, write_rows

SIZES = (8, 16, 32)


def test_every_method_is_judged_by_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, width in (("narrow", 8), ("wide", 16)):
        save_model(tmp_path / "zoo" / name, width, width)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.csv", 96, 0)
    write_rows(tmp_path / "data" / "dev.csv", 30, 1)
    arguments = [
        *("--zoo", str(tmp_path / "zoo"), "--data", str(tmp_path / "data")),
        *("--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")),
        *("--sizes", *map(str, SIZES), "--target", "64", "--seeds", "0", "--probe", "4"),
        *("--epochs", "3", "--lr", "5e-3", "--max-length", "16"),
    ]
    rows = live_selection.main(arguments)
    with (tmp_path / "results" / "live_selection_losses.csv").open() as file:
        losses = list(csv.DictReader(file))
    assert len(losses) == 2 * (1 + len(SIZES) + 1)
    loss = {(row["model"], int(row["size"])): float(row["dev_loss"]) for row in losses}
    truth = {name: loss[name, 64] for name in ("narrow", "wide")}
    paid = ("training_flops", "judging_flops")
    cost = {(r["model"], int(r["size"])): sum(float(r[part]) for part in paid) for r in losses}
    start = sum(float(r["judging_flops"]) for r in losses if r["size"] == "0")
    full = sum(cost[name, 64] for name in truth)
    for row in rows.itertuples():
        assert row.best == min(truth, key=lambda name: truth[name])
        scores = [0.0 if name == row.chosen else 1.0 for name in truth]
        assert row.rel_acc == pytest.approx(rel_acc(scores, list(truth.values())))
        assert abs(row.pear_corr) == pytest.approx(100.0), "two models"
    found = {(row.budget, row.method): row for row in rows.itertuples()}
    for budget in SIZES:
        chosen = min(truth, key=lambda name: loss[name, budget])
        assert found[budget, "subtuning"].chosen == chosen
        share = sum(cost[name, budget] for name in truth) / full
        assert found[budget, "subtuning"].flops_share == pytest.approx(share, rel=1e-3)
        errors = [np.log(loss[name, budget] / truth[name]) for name in truth]
        expected = np.sqrt(np.mean(np.square(errors)))
        assert found[budget, "subtuning"].log_rmse == pytest.approx(expected, rel=1e-3)
    assert (16, "blend") not in found and (32, "blend") in found, "three sizes are needed"
    below = sum(cost[name, size] for name in truth for size in SIZES)
    assert found[32, "blend"].flops_share == pytest.approx(below / full, rel=1e-3)
    for law in ("rectified", live_selection.FREE):
        assert found[32, law].flops_share == pytest.approx((below + start) / full, rel=1e-3)
    probes = sum(float(r["probe_flops"]) for r in losses if int(r["size"]) < 64)
    expected = pytest.approx((below + start + probes) / full, rel=1e-3)
    assert found[32, "lensllm"].flops_share == expected
    assert found[32, "logme"].flops_share > 0, "frozen features are charged"
    assert set(rows.method[rows.budget == 32]) == set(live_selection.JUDGED) - {"power"}
    again = live_selection.main(["--results", str(tmp_path / "results")])
    names = ["budget", "method", "chosen", "best"]
    assert again[names].equals(rows[names])
    for name in ("rel_acc", "log_rmse", "flops_share"):  # of five digits in the files
        figures = [frame[name].to_numpy(float) for frame in (again, rows)]
        assert figures[0] == pytest.approx(figures[1], rel=2e-3, abs=2e-3, nan_ok=True)
    unprobed = live_selection.main([*arguments, "--out", str(tmp_path / "plain"), "--probe", "0"])
    without = {(row.budget, row.method): row for row in unprobed.itertuples()}
    probed = ("lensllm", live_selection.FREE, live_selection.CONTROL)
    kernel = {(budget, name) for budget in SIZES for name in probed}
    assert without.keys() == found.keys() - kernel
    assert without[32, "blend"].flops_share == found[32, "blend"].flops_share
    monkeypatch.setattr(choice, "run", lambda job: pytest.fail("a finished run was repeated"))
    assert live_selection.main(arguments).rel_acc.tolist() == rows.rel_acc.tolist()


def test_the_control_finds_a_curve_of_its_own() -> None:
    """Losses of B/(‖r‖²/(1 + c t) + D^β) + E, and what that is at the target."""
    square, b, beta, floor, c = 30.0, 40.0, 0.7, 0.1, 0.05

    def loss(size: float) -> float:
        return b / (square / (1 + c * size / 2) + size**beta) + floor

    sizes = np.array([0, 25, 50, 100, 200, 400, 1600])
    rows = pd.DataFrame(
        {
            "data": "d",
            "seed": 0,
            "model": "m",
            "parameters": 100,
            "size": sizes,
            "t": sizes / 2,
            "dev_loss": [loss(size) for size in sizes],
            "residual_square": square,
            "training_flops": 6.0 * sizes,
            "probe_flops": 0.0,
            "judging_flops": 1.0,
        }
    )
    search = live_selection.search_of(pd.concat([rows, rows.assign(model="n")]))
    assert len(search.curve("m")) == 6, "the target is kept aside"
    runs = live_selection.Runs(search, rows)
    assert live_selection.control_forecast(runs, "m", 400) == pytest.approx(loss(1600), rel=1e-3)


def test_recorded_runs_are_judged_as_before(tmp_path: Path) -> None:
    for name in ("live_selection.csv", "live_selection_losses.csv"):
        shutil.copy(live_selection.RESULTS / name, tmp_path)
    live_selection.main(["--results", str(tmp_path)])
    before, after = (
        pd.read_csv(folder / "live_selection.csv").drop(columns=["date", "commit"])
        for folder in (live_selection.RESULTS, tmp_path)
    )
    pd.testing.assert_frame_equal(after, before, rtol=1e-4)
