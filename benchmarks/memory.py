"""Peak memory of steps and operators against what they are compared with.

    steps       a JacHess step against a plain step, parameters and their gradients included
    jvp         `jx.jvp` through attention against `torch.func.jvp` of attention written out;
                MeanFlow steps against a plain step (bench_jvp.py)
    attention   the attention operator at T = 4096, forward and backward, against one T × T matrix
    ntk         the operator of form A against matrix products that write their Gram matrices
                (bench_ntk.py)

Every program runs in a process of its own.  CPU: the peak of the resident set minus what was
resident after a tiny one (Python and its libraries) and, but for the steps, the inputs.  CUDA: the
allocator's peak.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks import bench_jvp, bench_ntk
from benchmarks.common.memory import held_megabytes, measure_apart, peak_above
from benchmarks.common.models import SHAPES, Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.steps import penalty_step, plain_step, train_step
from benchmarks.common.timing import Spread, Step
from jachess_ext import ops

QUESTION = "memory"
STEPS = {"plain": plain_step, "unlab": penalty_step, "train": train_step}
PARTS = ("steps", "jvp", "attention", "ntk")
HEADS, HEAD_SIZE, LONG = 4, 64, 4096
# figure, shape, our program, what it is compared with (its program, or MiB), its name, the target
Comparison = tuple[str, str, str, str | float, str, str]


def comparisons(part: str, options: Options) -> Iterator[Comparison]:
    """What a part compares; programs as `make` knows them."""
    if part == "steps":
        for name, shape in options.named_shapes:
            for kind in ("unlab", "train"):
                programs = f"steps/{kind}/{name}", f"steps/plain/{name}"
                yield f"peak, {kind} mode", shape.name, *programs, "plain step", "≤ 4"
    if part == "jvp":
        for tokens in (16,) if options.quick else (1024, 2048):
            shape = f"H{bench_jvp.HEADS}-T{tokens}-D{bench_jvp.SIZE}-causal"
            for way in bench_jvp.WAYS:
                ours, theirs = (f"jvp/{kind}/{way}/{tokens}" for kind in ("ours", "written out"))
                yield f"jx.jvp, {way}", shape, ours, theirs, "torch.func.jvp", "≤ 0.25"
        for kind in ("no graph", "kept graph", "torch.func"):
            ours, shape = f"meanflow/{kind}", "DiT6x384-B2-T256"
            yield f"MeanFlow step, {kind}", shape, ours, "meanflow/plain", "plain step", ""
    if part == "attention":
        tokens = 64 if options.quick else LONG
        square = tokens**2 * options.dtype.itemsize / 2**20
        shape = f"B1-H{HEADS}-T{tokens}-D{HEAD_SIZE}"
        yield "attention", shape, f"attention/{tokens}", square, "one T x T matrix", ""
    if part == "ntk":
        layers = bench_ntk.QUICK if options.quick else bench_ntk.SIZES
        for number, layer in enumerate(layers):
            for kind in ("batched", "flat"):
                ours, theirs = f"ntk/operator/{number}", f"ntk/{kind}/{number}"
                yield "ntk_gram", str(layer), ours, theirs, f"{kind} matrix products", ""


def make(program: str, options: Options) -> Step:
    """A program's step on inputs of its own."""
    part, *rest = program.split("/")
    place = {"device": options.device, "dtype": options.dtype}
    if part == "steps":
        return _model_step(rest[0], SHAPES[rest[1]], options)
    if part == "jvp":
        return bench_jvp.attention_step(rest[0], rest[1], int(rest[2]), place)
    if part == "meanflow":
        return bench_jvp.training_step(rest[0], place, options.quick)
    if part == "attention":
        jets = [torch.randn(4, 1, HEADS, int(rest[0]), HEAD_SIZE, **place) for _ in range(3)]

        def both_ways() -> None:
            leaves = [jet.requires_grad_() for jet in jets]
            found = ops.attention_jet(*leaves, q=2)
            torch.autograd.grad(found, leaves, torch.ones_like(found))

        return both_ways
    sizes = bench_ntk.QUICK if options.quick else bench_ntk.SIZES
    form, operands = bench_ntk.CONTRACTIONS[rest[0]], bench_ntk.sides(sizes[int(rest[1])], place)
    return lambda: form(*operands)


def _model_step(kind: str, shape: Shape, options: Options) -> Step:
    model = build_model(shape, **options.place)
    return STEPS[kind](model, make_batch(shape, labels=True, device=options.device))


def measure_here(program: str, options: Options) -> float:
    """Peak MiB of one program, in this process, which must have run no other."""
    part, *rest = program.split("/")
    if part == "steps":
        family = SHAPES[rest[1]].family
        _model_step(rest[0], SHAPES["tiny" if family == "bert" else f"{family}-tiny"], options)()
        before = held_megabytes(options.device) if options.device.type == "cpu" else 0.0
        step = make(program, options)
        step()  # so that the gradients are there, as they are in a run
        return peak_above(before, step, options.device)
    bench_jvp.attention_step("ours", "forward + backward", 16, {"device": options.device})()
    torch.mm(*torch.ones(2, 16, 16, device=options.device, dtype=options.dtype))
    step = make(program, options)
    return peak_above(held_megabytes(options.device), step, options.device)


def measure(comparison: Comparison, options: Options, known: dict[str, float]) -> Row:
    """A row; ``known`` holds the programs measured so far."""
    figure, shape, ours, theirs, name, target = comparison
    for program in (ours, theirs):
        if isinstance(program, str) and program not in known:
            known[program] = measure_apart(
                *("benchmarks.memory", "--worker", program, "--dtype", options.dtype_name),
                *("--device", str(options.device), "--threads", str(torch.get_num_threads())),
                *("--dropout", str(options.dropout), *(["--quick"] if options.quick else [])),
            )
    baseline = known[theirs] if isinstance(theirs, str) else theirs
    return Row.of(
        (QUESTION, shape, options.dtype_name),
        *(figure, Spread.of([known[ours]])),
        baseline=name,
        baseline_p50=baseline,
        ratio=known[ours] / baseline if baseline else float("inf"),
        unit="MiB",
        peak_mb=known[ours],
        target=target,
    )


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print; as a worker, print one number."""
    assert __doc__ is not None
    arguments = parser(__doc__, ["encoder6-T128", "encoder12-T128", "llama6-T128"], ["tiny"])
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--worker", help="used by the script itself")
    options = parse(arguments, argv)
    if options.extra.worker:
        print(measure_here(options.extra.worker, options))
        return []
    known: dict[str, float] = {}
    wanted = [each for part in options.extra.parts for each in comparisons(part, options)]
    return finish([measure(each, options, known) for each in wanted], "memory", options)


if __name__ == "__main__":
    main(sys.argv[1:])
