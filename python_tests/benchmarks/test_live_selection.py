"""The live-selection benchmark on two tiny models: its figures are those of the definitions."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks import live_selection
from jachess_ext.live_selection import measure
from jachess_ext.scaling import rel_acc
from python_tests.live_selection.conftest import save_model, write_rows

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
    cost = {(r["model"], int(r["size"])): float(r["training_flops"]) for r in losses}
    for row in rows:
        assert row.best == min(truth, key=lambda name: truth[name])
        scores = [0.0 if name == row.chosen else 1.0 for name in truth]
        assert row.rel_acc == pytest.approx(rel_acc(scores, list(truth.values())))
        assert abs(row.pear_corr) == pytest.approx(100.0), "two models"
    found = {(row.budget, row.method): row for row in rows}
    for budget in SIZES:
        chosen = min(truth, key=lambda name: loss[name, budget])
        assert found[budget, "subtuning"].chosen == chosen
        share = sum(cost[name, budget] for name in truth) / sum(cost[name, 64] for name in truth)
        assert found[budget, "subtuning"].flops_share == pytest.approx(share, rel=1e-3)
        errors = [np.log(loss[name, budget] / truth[name]) for name in truth]
        expected = np.sqrt(np.mean(np.square(errors)))
        assert found[budget, "subtuning"].log_rmse == pytest.approx(expected, rel=1e-3)
    assert (16, "blend") not in found and (32, "blend") in found, "three sizes are needed"
    assert found[32, "lensllm"].flops_share > found[32, "rectified"].flops_share, "the probes"
    assert {row.method for row in rows if row.budget == 32} == set(live_selection.JUDGED) - {
        "power"
    }
    monkeypatch.setattr(measure, "run", lambda job: pytest.fail("a finished run was repeated"))
    assert [row.rel_acc for row in live_selection.main(arguments)] == [r.rel_acc for r in rows]
