"""Ways to a Laplacian: all run at a tiny size, and one that gives another result is refused."""

import csv
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import laplacian
from python_tests.jet.compiling import NEEDS_MODULES_IN_GRAPHS

QUICK = ["--quick", "--repeats", "1", "--threads", "1"]


@pytest.mark.slow
def test_every_way_is_compared(tmp_path: Path) -> None:
    case = laplacian.QUICK[1]
    rows = laplacian.main([*QUICK, "--cases", case, "--results", str(tmp_path)])
    others = [way for way in laplacian.WAYS if way != laplacian.OURS]
    for unit, figures in (("ms", "{}"), ("MiB", "peak, {}")):
        assert {(row.shape, row.figure, row.baseline) for row in rows if row.unit == unit} == {
            (case, figures.format(figure), way) for figure in laplacian.FIGURES for way in others
        }
    for row in rows:
        assert 0 < row.p20 <= row.p50 <= row.p80 and 0 < row.baseline_p50 < math.inf
        assert row.ratio == pytest.approx(row.p50 / row.baseline_p50)
    with (tmp_path / "laplacian.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) > 0


def test_residuals_of_the_heat_and_the_wave_equation() -> None:
    """In float64, of a function with a known one."""
    x = laplacian.CASES[laplacian.QUICK[2]].make()[1]
    t, place = x[:, 0], x[:, 1:]
    heat = -t.sin() * place.sin().sum(1) + t.cos() * place.sin().sum(1)
    for equation, expected in ((laplacian.Heat, heat), (laplacian.Wave, 0 * heat)):
        model = equation(Wave())
        for way in (laplacian.OURS, "double backward"):
            torch.testing.assert_close(laplacian.value(way, model, x), expected)


@NEEDS_MODULES_IN_GRAPHS
def test_the_heat_equation_is_compared_with_double_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    rows = laplacian.main([*QUICK, "--cases", laplacian.QUICK[2]])
    assert {row.dtype for row in rows} == {"float64"}
    found = {row.figure for row in rows if row.baseline == "double backward" and row.unit == "ms"}
    assert found == {f"{f}{how}" for f in laplacian.FIGURES for how in ("", ", compiled")}


def test_float64_beside_float32() -> None:
    """A row for each figure of a function, and the network of a PINN in the dtype of its name."""
    rows = laplacian.main([*QUICK, "--cases", "tanh"])
    assert [(row.shape, row.dtype, row.baseline) for row in rows] == [
        ("tanh", "float64", "float32")
    ] * 2
    assert {row.figure for row in rows} == {"forward", "forward and gradient"}
    assert all(row.ratio == pytest.approx(row.p50 / row.baseline_p50) for row in rows)
    for name, dtype in (("pinn32", torch.float32), ("pinn64", torch.float64)):
        model, x = laplacian.CASES[f"{name}-D2-N256"].make()
        assert isinstance(model, laplacian.Heat) and x.shape == (256, 2)
        assert {p.dtype for p in model.parameters()} == {x.dtype} == {dtype}


def test_ways_that_are_chosen_are_compared_alone() -> None:
    rows = laplacian.main([*QUICK, "--cases", laplacian.QUICK[0], "--ways", "collapsed by hand"])
    assert {row.baseline for row in rows} == {"collapsed by hand"}


class Wave(torch.nn.Module):
    """cos t Σ sin xᵢ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0].cos() * x[:, 1:].sin().sum(1)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way == laplacian.OURS else pytest.mark.slow)
        for way in laplacian.WAYS
    ],
)
def test_a_way_that_gives_another_laplacian_is_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = laplacian.WAYS[way]
    monkeypatch.setitem(laplacian.WAYS, way, lambda model, x: 1.01 * right(model, x))
    with pytest.raises(RuntimeError, match=r"off by .*e-0[23] in torch.float64"):
        laplacian.check(*laplacian.CASES[laplacian.QUICK[0]].make(), None, [way])
