"""Derivatives through attention beside the other programs that make them, of the same sizes.

    python -m benchmarks.peers --device cuda --dtype bfloat16      # rows go to results/peers.csv

The programs, timed in turn: `jx.jvp`; jvp_flash_attention, Triton's kernels in a wheel of its own,
where both are installed; torch.func.jvp of torch's "math" attention, which writes T × T matrices.
Three ways, as in bench_micro.py: forward; the tangent as a target; and, ours alone since
jvp_flash_attention drops it, the backward of the tangent, too. Each of ours is also beside torch's
own attention, forward or both ways, which has no derivative.

Rows are written as soon as they are there. A program that cannot run, or whose output or tangent is
off by more than 5 % of the largest entry, float64 written out being right, has a row without its
time, whose note says why. The others' notes have their versions, and all have the rate of the
products that ours needs, three for one of plain attention.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib import metadata

import torch

from .bench_micro import WAYS, attention_jvp, attention_step, fused
from .common import (
    Options,
    Row,
    Step,
    compare_times,
    finish,
    interleaved,
    parse,
    parser,
)

# Sequences, heads, tokens, size of a head.
SIZES = [(2, 16, t, d) for t in (2048, 4096) for d in (64, 128)] + [(1, 24, 4096, 128)]
TINY = [(1, 2, 32, 16)]
PLAIN, FLASH = "plain attention", "jvp_flash_attention"
WRONG = 0.05
Sizes = tuple[int, int, int, int]


def problem(program: str, step: Step, sizes: Sizes, options: Options) -> str:
    """Return why a program is not to be timed, or nothing; the step has run once then.

    Its output and tangent of the first 256 tokens are compared with float64's, written out.
    """
    batch, heads, tokens, size = sizes
    torch.manual_seed(1)
    shape = (2, 3, batch, heads, min(tokens, 256), size)
    qkv, directions = torch.randn(shape, device=options.device, dtype=options.dtype)
    try:
        results = attention_jvp(program, "forward", qkv, directions, False)
        step()
    except Exception as error:  # whatever another program raises is the row's note
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    exact = attention_jvp("written out", "forward", qkv.double(), directions.double(), False)
    for result, expected in zip(results, exact, strict=True):
        error = float((result.double() - expected).abs().max() / expected.abs().max())
        if not error < WRONG:
            return f"off by {error:.1e}"
    return ""


def plain_step(way: str, sizes: Sizes, options: Options) -> Step:
    """Return torch's own attention, with its backward unless ``way`` is "forward"."""
    batch, heads, tokens, size = sizes
    place = {"device": options.device, "dtype": options.dtype}
    qkv = torch.randn(3, batch, heads, tokens, size, **place)
    leaves = [x.clone().requires_grad_(way != "forward") for x in qkv]
    gradient = torch.randn_like(leaves[0])

    def step() -> None:
        output = fused(*leaves, causal=False)
        if way != "forward":
            torch.autograd.grad(output, leaves, gradient)

    return step


def measure(sizes: Sizes, way: str, options: Options) -> list[Row]:
    """Return the rows of one way of taking a derivative, ours beside the others.

    Raises:
        RuntimeError: ours cannot be timed.
    """
    batch, heads, tokens, size = sizes
    others = ["math backend", FLASH] if way != "forward + backward" else []
    place = {"device": options.device, "dtype": options.dtype}
    steps = {PLAIN: plain_step(way, sizes, options)}
    problems = {}
    for program in ("ours", *others):
        step = attention_step(program, way, tokens, place, False, (batch, heads, size))
        problems[program] = problem(program, step, sizes, options)
        if not problems[program]:
            steps[program] = step
    if problems["ours"]:
        raise RuntimeError(f"jx.jvp, {way}, {sizes}: {problems['ours']}")
    times = interleaved(steps, repeats=options.rounds(5), device=options.device, warmup=1)
    # Plain attention has two products, of two operations each; backward takes 2.5 times as long.
    needed = {"forward": 3, "target": 3 + 2.5, "forward + backward": 3 + 7.5}[way]
    rate = needed * 4 * batch * heads * tokens**2 * size / times.milliseconds("ours").p50 / 1e9
    rows = []
    for program in (PLAIN, *others):
        why = problems.get(program)
        package = FLASH if program == FLASH else "torch"
        row = compare_times(
            options,
            times,
            "ours",
            PLAIN if why else program,
            speed_up=program != PLAIN,
            question="peers",
            shape=f"attention-B{batch}-H{heads}-T{tokens}-D{size}",
            figure=f"jx.jvp, {way}",
            baseline=f"{program}, {way}",
        )
        if why:
            row.baseline_p50 = row.ratio = math.nan
        row.note = f"ours {rate:.0f} TFLOP/s; " + (why or f"{package} {metadata.version(package)}")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, append each way's rows to the CSV, print them."""
    assert __doc__ is not None
    options = parse(parser(__doc__), argv)
    sizes = TINY if options.quick else SIZES
    return [
        row
        for shape in sizes
        for way in WAYS
        for row in finish(measure(shape, way, options), "peers", options)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
