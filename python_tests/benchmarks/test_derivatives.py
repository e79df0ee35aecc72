"""Every benchmark script runs at a tiny size and gives rows; what they re-enact is as described."""

import csv
import gc
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jachess_ext as jx
from benchmarks import bench_micro, derivatives, memory, ntk, soak, unmodified
from benchmarks.common import (
    ROOT,
    SHAPES,
    Batch,
    build_model,
    make_batch,
    parse,
    parser,
)
from benchmarks.derivatives import Products, layer_penalty, published_step
from python_tests import processes
from python_tests.benchmarks.test_common import gradient_norm

QUICK = ["--quick", "--repeats", "1", "--threads", "1"]


def eager() -> tuple[nn.Module, Batch]:
    return (
        build_model(SHAPES["tiny"], attention="eager", dtype=torch.float64),
        make_batch(SHAPES["tiny"], labels=False),
    )


@pytest.mark.filterwarnings("ignore:no argument of the step is a tensor on a GPU")
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.slow if part == "compiled_block" else ())
        for part in (*derivatives.PARTS, "profile")
    ],
)
def test_a_part_gives_finite_rows_and_a_csv(
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo alone compiles: the library's tests have the backends."""
    compiled = torch.compile
    dynamo_alone = lambda *of, **how: compiled(*of, **how | {"backend": "eager"})  # noqa: E731
    monkeypatch.setattr(torch, "compile", dynamo_alone)
    given = [*QUICK, "--shapes", "tiny", "--backend", "eager", "--results", str(tmp_path)]
    rows = derivatives.main([*given, "--parts", part, "--rows", "200"])
    if part == "profile":
        assert "aten::mm" in capsys.readouterr().out
        return
    for row in rows:
        assert 0 < row.p20 <= row.p50 <= row.p80
        assert math.isfinite(row.ratio) and row.ratio > 0
    with (tmp_path / f"{part}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.filterwarnings("ignore:no argument of the step is a tensor on a GPU")
def test_graphed_steps_are_those_of_python(device: str) -> None:
    options = parse(parser(""), [*QUICK, "--device", device])
    steps = derivatives.graphed(SHAPES["tiny"], options)
    plain: list[Any] = [steps[f"plain step{way}"]() for way in ("", ", graphed") for _ in range(5)]
    assert len({float(loss) for loss in plain}) == 1
    assert steps["JacHess step, graphed"]().isfinite() and steps["JacHess step"]() != plain[0]


def test_functions_are_counted() -> None:
    """Three functions; attributes are none, nor is what a function of torch calls within it."""
    x = torch.ones(2, 3)
    assert derivatives.functions_of(lambda: nn.functional.softmax(x.sin() + x.shape[0], -1)) == 3


def test_methods_steps_are_those_of_the_method(tmp_path: Path) -> None:
    """A step of `MethodTrainer` has the penalty, too; a note says what a function takes."""
    options = parse(parser(""), [*QUICK, "--results", str(tmp_path)])
    steps = derivatives.trainer_step(SHAPES["tiny"], options)
    gradients = [steps[name]() for name in ("Trainer's step", "MethodTrainer's, eager")]
    assert gradients[1] > gradients[0] > 0
    (row,) = derivatives.main([*QUICK, "--results", str(tmp_path), "--parts", "jvp_python"])
    count = int(row.note.split()[0])
    more = f"{1e3 * (row.p50 - row.baseline_p50) / count:.1f}"
    assert count > 30 and row.note == f"{count} functions, {more} µs more each"


def test_ways_of_meanflow_have_one_loss() -> None:
    place = {"device": torch.device("cpu"), "dtype": torch.float64}
    ways = ("no graph", "kept graph", "torch.func", "central differences")
    losses = torch.stack([bench_micro.training_step(way, place, quick=True)() for way in ways])
    torch.testing.assert_close(losses, losses[2].expand(4), rtol=1e-4, atol=0)
    assert not torch.allclose(losses[2], bench_micro.training_step("plain", place, True)())


def test_a_short_run_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    gc.freeze()  # what earlier tests left is not looked through sixty times
    monkeypatch.setattr(soak, "TENTHS", 6)
    monkeypatch.setattr(soak, "QUICK_STEPS", 60)
    rows = soak.main(["--quick", "--threads", "1"])
    assert [row.ratio for row in rows[1:]] == [1.0, 1.0]


def test_ntk_methods_agree_and_are_compared(tmp_path: Path) -> None:
    """The script itself refuses a method that computes another kernel."""
    rows = ntk.main([*QUICK, "--parts", "time", "rate", "--results", str(tmp_path)])
    assert [row.baseline for row in rows] == ["jacobian", "vmap-grad", "ntk-vector", "GEMM"]
    assert all(row.p50 > 0 and math.isfinite(row.ratio) and row.ratio > 0 for row in rows)


def test_ntk_methods_refuses_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ntk.METHODS["jacobian"]
    wrong = lambda m, b: type(right(m, b))(lambda: 1.001 * right(m, b).step())  # noqa: E731
    monkeypatch.setitem(ntk.METHODS, "jacobian", wrong)
    with pytest.raises(RuntimeError, match=r"jacobian disagrees with jx\.ntk"):
        ntk.main([*QUICK, "--parts", "time", "--methods", "jacobian"])


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own() -> None:
    rows = memory.main([*QUICK, "--shapes", "tiny", "--parts", "steps", "attention"])
    assert [row.figure for row in rows] == ["peak, unlab mode", "peak, train mode", "attention"]
    rows += ntk.main([*QUICK, "--parts", "memory", "--methods", "jacobian"])
    assert rows[-1].baseline == "jacobian" and rows[-1].unit == "MiB"
    assert all(row.p50 >= 0 for row in rows)


@pytest.mark.parametrize("part", memory.PARTS)
def test_every_program_of_the_memory_script_can_be_made(part: str) -> None:
    options = parse(parser(""), QUICK)
    programs = {
        program
        for each in memory.comparisons(part, options)
        for program in each[2:4]
        if isinstance(program, str)
    }
    assert programs
    for program in programs:
        memory.make(program, options)()


_PEAKS = """
import torch
from benchmarks.common import held_megabytes, peak_above
cpu = torch.device("cpu")
for n in (65, 1):
    print(peak_above(held_megabytes(cpu), lambda: torch.ones(n, 2**18).sum(), cpu))
"""


def test_memory_tells_a_large_program_from_a_small_one() -> None:
    """64 MiB more held at once are some 64 MiB more of peak, in a process that has freed none."""
    done = processes.run([sys.executable, "-c", _PEAKS], cwd=ROOT)
    assert done.returncode == 0, done.stdout
    large, small = map(float, done.stdout.split()[-2:])
    assert large - small == pytest.approx(64, abs=4)


@pytest.mark.slow
def test_the_micro_benchmarks_run(tmp_path: Path) -> None:
    """Quick sizes in a process of their own: pytest-benchmark is off where xdist is on."""
    found = tmp_path / "micro.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "--quick", "-q", "--threads=1"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--benchmark-json={found}"]
    command += ["--benchmark-min-rounds=1", "--benchmark-max-time=0"]
    done = processes.run([*command, "--benchmark-calibration-precision=1"], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    timed = json.loads(found.read_text())["benchmarks"]
    assert all(0 < each["stats"]["min"] <= each["stats"]["max"] < math.inf for each in timed)
    groups = {each["group"].split(",")[0] for each in timed}
    assert groups == {*bench_micro.OPERATORS, "jvp of 400 small operations", "ntk_gram", "fit"}


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_composed_attention_is_attention_without_the_operator(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, operator = SHAPES["llama-tiny"], bench_micro.OPERATORS["attention_jet"]
    jets = bench_micro.draw_jets(operator, shape, {"dtype": torch.float64})
    # Both get one gradient: random ones would follow the results' strides.
    monkeypatch.setattr(
        torch, "randn_like", lambda x: torch.linspace(-1, 1, x.numel()).to(x).view(x.shape)
    )
    wanted = bench_micro.in_one_way(
        lambda *x: bench_micro.apply_operator("attention_jet", shape, *x), jets, way
    )()
    called: list[object] = []
    monkeypatch.setattr(torch.ops.jachess, "attention_jet", lambda *given: called.append(given))
    composed = lambda *x: bench_micro.composed_attention(*x, shape)  # noqa: E731
    found = bench_micro.in_one_way(composed, jets, way)()
    assert not called
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def test_jvp_times_the_derivative_that_torch_computes() -> None:
    torch.manual_seed(0)
    qkv, along = torch.randn(2, 3, 1, 2, 6, 4, dtype=torch.float64)
    wanted = torch.func.jvp(bench_micro.written_out, tuple(qkv), tuple(along))
    for attend in (bench_micro.fused, bench_micro.math_backend):
        found = jx.jvp(attend, tuple(qkv), tuple(along))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", bench_micro.QUICK_LAYERS, ids=str)
def test_every_contraction_is_the_same_kernel(layer: bench_micro.Layer) -> None:
    left, right = bench_micro.sides(layer, {"dtype": torch.float64})
    gradients = [torch.einsum("cnte,ntd->ncde", side[1], side[0]) for side in (left, right)]
    wanted = torch.einsum("ncde,mkde->cnkm", *gradients)
    for form in bench_micro.CONTRACTIONS.values():
        torch.testing.assert_close(form(left, right), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("products", "per_layer"), [("dimensions", 30), ("projections", 21)])
def test_the_published_protocol_costs_what_its_code_does(
    products: Products, per_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per layer one forward, 10 Jacobian projections, 10 Hessian products and their gradients."""
    model, batch = eager()
    forwards: list[int] = []
    model.base_model.register_forward_hook(lambda *_: forwards.append(1))  # type: ignore[union-attr, operator]
    calls: list[bool] = []
    grad = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["create_graph"])
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    published_step(model, batch, products)()
    layers = SHAPES["tiny"].layers
    assert len(forwards) == layers
    assert len(calls) == layers * per_layer
    assert calls.count(False) == layers * 10
    assert gradient_norm(model) > 0


def test_the_published_protocols_hessian_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = eager()
    values, norms, hessian_squares = [], [], derivatives.hessian_squares
    for scale in (1.0, 0.0):
        monkeypatch.setattr(
            derivatives, "hessian_squares", lambda *args, s=scale: s * hessian_squares(*args)
        )
        torch.manual_seed(0)
        model.zero_grad()
        penalty = layer_penalty(model, batch, 1, "dimensions")
        penalty.backward()
        values.append(penalty.item())
        norms.append(gradient_norm(model))
    assert values[0] > values[1] * 1.0001  # it adds to the value ...
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)  # ... and to no gradient


@pytest.mark.slow
def test_programs_of_others() -> None:
    """Each part runs; a derivative is truer than differences of any width."""
    rows = unmodified.main(QUICK)
    assert {row.question for row in rows} >= {*unmodified.PROGRAMS, "truth", "forces-memory"}
    errors = {(row.note, row.figure): row.p50 for row in rows if row.question == "truth"}
    for (note, figure), error in errors.items():
        assert figure == "du/dt, jx.jvp" or error > 10 * errors[note, "du/dt, jx.jvp"]
