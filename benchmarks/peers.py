"""Derivatives through attention beside the other programs that make them, of the same sizes.

    python -m benchmarks.peers --device cuda --dtype bfloat16      # rows go to results/peers.csv

The programs, timed in turn: `jx.jvp`; jvp_flash_attention, Triton's kernels in a wheel of its own,
where both are installed; torch.func.jvp of torch's "math" attention, which writes T × T matrices.
Three ways, as in bench_micro.py: forward; the tangent as a target; and, ours alone since
jvp_flash_attention drops it, the backward of the tangent, too. One shape, flow-pi's, has a boolean
mask, and two ways: forward, and the backward of a loss on the tangent. Each of ours is also beside
torch's own attention, forward or both ways, which has no derivative.

Rows are written as soon as they are there. A program that cannot run, or whose output or tangent is
off by more than 5 % of the largest entry, float64 written out being right, has a row without its
time, whose note says why. The others' notes have their versions, and all have the rate of the
products that ours needs, three for one of plain attention, of the scores that a mask shows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

import torch

from .bench_micro import TANGENT_LOSS, WAYS, Mask, attention_jvp, attention_step, fused
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


class Sizes(NamedTuple):
    """Sequences, heads, tokens, size of a head, and whether `make_mask` hides scores."""

    batch: int
    heads: int
    tokens: int
    size: int
    masked: bool = False


SIZES = [
    Sizes(1, 24, 1670, 128, masked=True),  # flow-pi's
    *(Sizes(2, 16, t, d) for t in (2048, 4096) for d in (64, 128)),
    Sizes(1, 24, 4096, 128),
]
TINY = [Sizes(1, 2, 64, 16, masked=True), Sizes(1, 2, 32, 16)]
PLAIN, FLASH = "plain attention", "jvp_flash_attention"
WRONG = 0.05


def make_mask(sizes: Sizes, device: torch.device) -> Mask:
    """Return the visible scores, [T, T], 76 % at flow-pi's sizes; None where all are.

    A prefix of half the tokens is visible to all; of the other keys, drawn blocks of 64 × 64 at
    flow-pi's sizes are.
    """
    if not sizes.masked:
        return None
    block = max(sizes.tokens // 26, 1)
    count = -(-sizes.tokens // block)
    drawn = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < 0.525
    mask = drawn.repeat_interleave(block, 0).repeat_interleave(block, 1)
    mask[:, : sizes.tokens // 2] = True
    return mask[: sizes.tokens, : sizes.tokens].contiguous().to(device)


def problem(program: str, step: Step, sizes: Sizes, options: Options) -> str:
    """Return why a program is not to be timed, or nothing; the step has run once then.

    Its output and tangent of 512 tokens, enough for all kernels that it is timed with, are compared
    with float64's, written out.
    """
    sizes = sizes._replace(tokens=min(sizes.tokens, 512))
    torch.manual_seed(1)
    shape = (2, 3, *sizes[:4])
    qkv, directions = torch.randn(shape, device=options.device, dtype=options.dtype)
    mask = make_mask(sizes, options.device)
    try:
        results = attention_jvp(program, "forward", qkv, directions, False, mask)
        step()
    except Exception as error:  # whatever another program raises is the row's note
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    exact = attention_jvp("written out", "forward", qkv.double(), directions.double(), False, mask)
    for result, expected in zip(results, exact, strict=True):
        error = float((result.double() - expected).abs().max() / expected.abs().max())
        if not error < WRONG:
            return f"off by {error:.1e}"
    return ""


def plain_step(way: str, sizes: Sizes, mask: Mask, options: Options) -> Step:
    """Return torch's own attention, with its backward unless ``way`` is "forward"."""
    place = {"device": options.device, "dtype": options.dtype}
    qkv = torch.randn(3, *sizes[:4], **place)
    leaves = [x.clone().requires_grad_(way != "forward") for x in qkv]
    gradient = torch.randn_like(leaves[0])

    def step() -> None:
        output = fused(*leaves, causal=False, mask=mask)
        if way != "forward":
            torch.autograd.grad(output, leaves, gradient)

    return step


def measure(sizes: Sizes, way: str, options: Options) -> list[Row]:
    """Return the rows of one way of taking a derivative, ours beside the others.

    Raises:
        RuntimeError: ours cannot be timed.
    """
    batch, heads, tokens, size, masked = sizes
    shape = f"attention-B{batch}-H{heads}-T{tokens}-D{size}"
    mask = make_mask(sizes, options.device)
    visible = 1.0 if mask is None else float(mask.float().mean())
    if masked:
        shape += f"-mask{visible:.2f}"
    others = [] if way == "forward + backward" else ["math backend", FLASH]
    if way == TANGENT_LOSS:
        others.remove(FLASH)
        print(f"{shape}, {way}: without {FLASH}, whose tangents have no gradient")
    place = {"device": options.device, "dtype": options.dtype}
    steps = {PLAIN: plain_step(way, sizes, mask, options)}
    problems = {}
    for program in ("ours", *others):
        step = attention_step(program, way, tokens, place, False, (batch, heads, size), mask)
        problems[program] = problem(program, step, sizes, options)
        if not problems[program]:
            steps[program] = step
    if problems["ours"]:
        raise RuntimeError(f"jx.jvp, {way}, {sizes}: {problems['ours']}")
    times = interleaved(steps, repeats=options.rounds(5), device=options.device, warmup=1)
    # Plain attention has two products, of two operations each; backward takes 2.5 times as long.
    needed = visible * {"forward": 3, "target": 3 + 2.5}.get(way, 3 + 7.5)
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
            shape=shape,
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
    return [
        row
        for sizes in (TINY if options.quick else SIZES)
        for way in (("forward", TANGENT_LOSS) if sizes.masked else WAYS)
        for row in finish(measure(sizes, way, options), "peers", options)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
