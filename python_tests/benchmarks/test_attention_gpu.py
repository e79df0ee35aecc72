"""The benchmark of attention on a GPU runs, on tiny shapes on the CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import attention_gpu


@pytest.mark.parametrize("part", [False, True])
def test_a_dry_run_writes_a_row_for_each_way_and_part(part: bool, tmp_path: Path) -> None:
    options = ["--dry-run", "--results", str(tmp_path), *(["--parts"] if part else [])]
    with pytest.raises(SystemExit) as end:
        attention_gpu.main(options)
    assert not end.value.code
    (file,) = tmp_path.iterdir()
    rows = list(csv.DictReader(file.open()))
    assert all(row["commit"] and float(row["ms"]) > 0 for row in rows)
    if part:
        products = {(r["part"], r["dtype"], r["width"]) for r in rows if not r["streams"]}
        assert len(products) == 3 * 2 * 3  # kinds, dtypes and widths
        assert {r["streams"] for r in rows if r["part"] == "softmax backward"} == {"2", "3", "4"}
    else:
        ways = {(r["way"], r["streams"], r["direction"]) for r in rows}
        assert len(ways) == len(rows) == 2 + 2 * 2 * 3
        assert {way for way, *_ in ways} == {"torch", "fused", "composite"}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attention_gpu, "REFERENCE", lambda *jets, q: 1.2 * sum(jets))
    with pytest.raises(SystemExit, match="nothing was timed"):
        attention_gpu.main(["--dry-run", "--results", str(tmp_path)])
    assert not list(tmp_path.iterdir())
