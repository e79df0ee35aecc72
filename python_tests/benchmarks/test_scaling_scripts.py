"""The scaling benchmarks on small synthetic tables: what they print is what they say."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks import law_fits, selection, selection_halves
from jachess_ext.scaling import LossTable, pear_corr, select
from python_tests.scaling import tables


def test_law_fits_are_as_good_as_scipys(tmp_path: Path) -> None:
    size = ["--quick", "--repeats", "1", "--threads", "1", "--curves", "1"]
    rows = law_fits.main([*size, "--published", "--laws", "rectified", "--results", str(tmp_path)])
    assert len(rows) == 2
    for row in rows:
        worst = float(row.note.split("worst ")[1].split()[0])
        assert worst > 0.999  # scipy's objective over ours
        assert row.ratio > 0


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
    bayes = found[("32", "bayes")]
    assert 0 <= float(bayes["coverage_referenced"]) <= 100
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
