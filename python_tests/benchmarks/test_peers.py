"""Programs beside ours: timed where they are right, named with the reason where not."""

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks import bench_micro, peers
from benchmarks.bench_micro import WAYS, written_out

QUICK = ["--quick", "--repeats", "1", "--threads", "1"]
OTHERS = (peers.PLAIN, "math backend", peers.FLASH)


def refuse(*_: Tensor, causal: bool) -> Tensor:
    raise ImportError("there is no Triton\nhere")


@pytest.mark.parametrize(
    ("flash", "why"),
    [
        (written_out, ""),
        (refuse, "ImportError: there is no Triton"),
        (lambda *x, causal: 1.1 * written_out(*x, causal=causal), "off by 1.0e-01"),
    ],
)
def test_a_row_for_each(
    flash: Callable[..., Tensor], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench_micro.PROGRAMS, peers.FLASH, flash)
    monkeypatch.setattr(peers.metadata, "version", lambda package: f"of {package}")
    rows = peers.main([*QUICK, "--results", str(tmp_path)])
    both = {(way, other) for way in (WAYS[0], WAYS[2]) for other in OTHERS}
    assert {(row.figure, row.baseline) for row in rows} == {
        (f"jx.jvp, {way}", f"{other}, {way}") for way, other in both | {(WAYS[1], peers.PLAIN)}
    }
    for row in rows:
        assert 0 < row.p20 <= row.p50 <= row.p80
        missing = why and row.baseline.startswith(peers.FLASH)
        assert math.isnan(row.ratio) if missing else row.ratio > 0
        package = peers.FLASH if row.baseline.startswith(peers.FLASH) else "torch"
        assert row.note.endswith(why if missing else f"{package} of {package}")
    with (tmp_path / "peers.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 7


def test_ours_has_to_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_micro, "fused", lambda *x, causal: 1.1 * written_out(*x, causal))
    with pytest.raises(RuntimeError, match=r"jx\.jvp, forward, .*: off by 1\.0e-01"):
        peers.main(QUICK)
