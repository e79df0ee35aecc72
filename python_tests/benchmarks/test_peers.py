"""Programs beside ours: timed where they are right, named with the reason where not."""

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_micro, peers
from benchmarks.bench_micro import TANGENT_LOSS, WAYS, Mask, written_out

QUICK = ["--quick", "--repeats", "1", "--threads", "1"]
MASKED = "-mask0.76"
OTHERS = (peers.PLAIN, "math backend", peers.FLASH)


def refuse(*_: Tensor, causal: bool, mask: Mask) -> Tensor:
    raise ImportError("there is no Triton\nhere")


def inexact(*x: Tensor, causal: bool, mask: Mask) -> Tensor:
    return 1.1 * written_out(*x, causal=causal, mask=mask)


def unmasked(*x: Tensor, causal: bool, mask: Mask) -> Tensor:
    return written_out(*x, causal=causal)


@pytest.mark.parametrize(
    ("flash", "why"),
    [
        (written_out, ""),
        (refuse, "ImportError: there is no Triton"),
        (inexact, "off by 1.0e-01"),
    ],
)
def test_a_row_for_each(
    flash: Callable[..., Tensor],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(bench_micro.PROGRAMS, peers.FLASH, flash)
    monkeypatch.setattr(peers.metadata, "version", lambda package: f"of {package}")
    rows = peers.main([*QUICK, "--results", str(tmp_path)])
    shape = "attention-B1-H2-T{}-D16{}".format
    programs = {
        *((shape(32, ""), way, other) for way in (WAYS[0], WAYS[2]) for other in OTHERS),
        (shape(32, ""), WAYS[1], peers.PLAIN),
        *((shape(64, MASKED), WAYS[0], other) for other in OTHERS),
        *((shape(64, MASKED), TANGENT_LOSS, other) for other in OTHERS[:2]),
    }
    assert {(row.shape, row.figure, row.baseline) for row in rows} == {
        (shape, f"jx.jvp, {way}", f"{other}, {way}") for shape, way, other in programs
    }
    assert f"{MASKED}, {TANGENT_LOSS}: without {peers.FLASH}" in capsys.readouterr().out
    for row in rows:
        assert 0 < row.p20 <= row.p50 <= row.p80
        missing = why and row.baseline.startswith(peers.FLASH)
        assert math.isnan(row.ratio) if missing else row.ratio > 0
        package = peers.FLASH if row.baseline.startswith(peers.FLASH) else "torch"
        assert row.note.endswith(why if missing else f"{package} of {package}")
    with (tmp_path / "peers.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == len(programs) == 12


def test_ours_has_to_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (inexact, unmasked):
        monkeypatch.setattr(bench_micro, "fused", wrong)
        with pytest.raises(RuntimeError, match=r"jx\.jvp, forward, .*: off by "):
            peers.main(QUICK)


def test_the_mask_of_the_first_shape() -> None:
    sizes = peers.SIZES[0]
    mask = peers.make_mask(sizes, torch.device("cpu"))
    assert mask is not None and mask.shape == (1670, 1670) and mask.dtype == torch.bool
    assert abs(float(mask.float().mean()) - 0.76) < 0.005
    assert peers.make_mask(sizes._replace(masked=False), torch.device("cpu")) is None


def test_a_loss_on_the_tangent_is_of_the_tangent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[Tensor] = []
    results = torch.tensor(math.nan), torch.tensor(3.0)
    monkeypatch.setattr(bench_micro, "attention_jvp", lambda *_: results)
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, leaves: losses.append(loss))
    bench_micro.attention_step("ours", TANGENT_LOSS, 2, {})()
    assert losses == [9.0]
