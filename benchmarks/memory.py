"""Peak memory of steps and operators against what they are compared with.

    steps       a JacHess step against a plain step, parameters and their gradients included
    jvp         `jx.jvp` through attention against `torch.func.jvp` of attention written out;
                MeanFlow steps against a plain step (bench_micro.py)
    attention   the attention operator at T = 4096, forward and backward, against one T × T matrix
    ntk         the operator of form A against matrix products that write their Gram matrices
                (bench_micro.py)

CPU: the peak of the resident set of a process for each program, minus what was resident after a
tiny one (Python and its libraries) and, except in the steps, the inputs.  CUDA: the allocator's
peak less the same, all in this process, since to start one for each takes longer than to measure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from jachess_ext import ops

from . import bench_micro
from .common import (
    SHAPES,
    Options,
    Row,
    Shape,
    Spread,
    Step,
    build_model,
    finish,
    held_megabytes,
    make_batch,
    make_row,
    measure_apart,
    parse,
    parser,
    peak_above,
    penalty_step,
    plain_step,
    train_step,
)

STEPS = {"plain": plain_step, "unlab": penalty_step, "train": train_step}
PARTS = ("steps", "jvp", "attention", "ntk")
HEADS, HEAD_SIZE, LONG = 4, 64, 4096


class Comparison(NamedTuple):
    """Our program against another; programs as `make` knows them.

    Attributes:
        theirs: a program, or MiB.
        baseline: the name of `theirs`.
    """

    figure: str
    shape: str
    ours: str
    theirs: str | float
    baseline: str
    target: str = ""


def comparisons(part: str, options: Options) -> Iterator[Comparison]:
    """Yield what a part compares."""
    if part == "steps":
        for name in options.shapes or (
            ["tiny"] if options.quick else ["encoder6-T128", "encoder12-T128", "llama6-T128"]
        ):
            for mode in ("unlab", "train"):
                programs = f"steps/{mode}/{name}", f"steps/plain/{name}"
                yield Comparison(
                    f"peak, {mode} mode", SHAPES[name].name, *programs, "plain step", "≤ 4"
                )
    if part == "jvp":
        for tokens in (16,) if options.quick else (1024, 2048):
            shape = f"H{bench_micro.HEADS}-T{tokens}-D{bench_micro.SIZE}-causal"
            for way in bench_micro.WAYS:
                ours, theirs = (
                    f"jvp/{program}/{way}/{tokens}" for program in ("ours", "written out")
                )
                yield Comparison(f"jx.jvp, {way}", shape, ours, theirs, "torch.func.jvp", "≤ 0.25")
        for way in ("no graph", "kept graph", "torch.func"):
            ours, shape = f"meanflow/{way}", "DiT6x384-B2-T256"
            yield Comparison(f"MeanFlow step, {way}", shape, ours, "meanflow/plain", "plain step")
    if part == "attention":
        tokens = 64 if options.quick else LONG
        square = tokens**2 * options.dtype.itemsize / 2**20
        shape = f"B1-H{HEADS}-T{tokens}-D{HEAD_SIZE}"
        yield Comparison("attention", shape, f"attention/{tokens}", square, "one T x T matrix")
    if part == "ntk":
        for number, layer in enumerate(bench_micro.layers(options.quick)):
            for form in ("batched", "flat"):
                ours, theirs = f"ntk/operator/{number}", f"ntk/{form}/{number}"
                yield Comparison("ntk_gram", str(layer), ours, theirs, f"{form} matrix products")


def make(program: str, options: Options) -> Step:
    """Return a program's step on inputs of its own."""
    part, *rest = program.split("/")
    place = {"device": options.device, "dtype": options.dtype}
    if part == "steps":
        return _model_step(rest[0], SHAPES[rest[1]], options)
    if part == "jvp":
        return bench_micro.attention_step(rest[0], rest[1], int(rest[2]), place)
    if part == "meanflow":
        return bench_micro.training_step(rest[0], place, options.quick)
    if part == "attention":
        jets = [torch.randn(4, 1, HEADS, int(rest[0]), HEAD_SIZE, **place) for _ in range(3)]

        def both_ways() -> None:
            leaves = [jet.requires_grad_() for jet in jets]
            output = ops.attention_jet(*leaves, q=2)
            torch.autograd.grad(output, leaves, torch.ones_like(output))

        return both_ways
    layer = bench_micro.layers(options.quick)[int(rest[1])]
    form, operands = bench_micro.CONTRACTIONS[rest[0]], bench_micro.sides(layer, place)
    return lambda: form(*operands)


def _model_step(mode: str, shape: Shape, options: Options) -> Step:
    model = build_model(shape, **options.place)
    return STEPS[mode](model, make_batch(shape, labels=True, device=options.device))


def measure_here(program: str, options: Options) -> float:
    """Return the peak MiB of one program, in this process; on a CPU it must have run no other."""
    part, *rest = program.split("/")
    if part == "steps":
        family = SHAPES[rest[1]].family
        _model_step(rest[0], SHAPES["tiny" if family == "bert" else f"{family}-tiny"], options)()
        before = held_megabytes(options.device)
        step = make(program, options)
        step()  # so that the gradients are there, as they are in a run
        return peak_above(before, step, options.device)
    bench_micro.attention_step("ours", "forward + backward", 16, {"device": options.device})()
    torch.mm(*torch.ones(2, 16, 16, device=options.device, dtype=options.dtype))
    step = make(program, options)
    return peak_above(held_megabytes(options.device), step, options.device)


def measure(comparison: Comparison, options: Options, known: dict[str, float]) -> Row:
    """Return a row; ``known`` holds the programs measured so far."""
    for program in (comparison.ours, comparison.theirs):
        if isinstance(program, str) and program not in known and options.device.type == "cuda":
            known[program] = measure_here(program, options)
        elif isinstance(program, str) and program not in known:
            given = ["--worker", program, "--dtype", options.dtype_name]
            given += ["--device", str(options.device), "--threads", str(torch.get_num_threads())]
            given += ["--dropout", str(options.dropout), *(["--quick"] if options.quick else [])]
            known[program] = measure_apart("benchmarks.memory", *given)
    ours, theirs = known[comparison.ours], comparison.theirs
    baseline = known[theirs] if isinstance(theirs, str) else theirs
    return make_row(
        options,
        Spread.of([ours]),
        question="memory",
        shape=comparison.shape,
        figure=comparison.figure,
        baseline=comparison.baseline,
        baseline_p50=baseline,
        ratio=ours / baseline if baseline else float("inf"),
        unit="MiB",
        peak_mb=ours,
        target=comparison.target,
    )


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print; as a worker, print one number."""
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--worker", help="used by the script itself")
    options = parse(arguments, argv)
    if options.extra.worker:
        print(measure_here(options.extra.worker, options))
        return []
    known: dict[str, float] = {}
    wanted = [each for part in options.extra.parts for each in comparisons(part, options)]
    # A row at a time, so that a run that is cut off keeps what it measured.
    return [
        row for each in wanted for row in finish([measure(each, options, known)], "memory", options)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
