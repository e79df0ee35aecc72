"""Times attention's jets on a GPU: a CUDA graph of many calls, between two events.

    python -m benchmarks.attention_gpu --tokens 2048 4096

First one result and its gradients, by every way that serves a call, are compared with the reference
in float64. Then there is a row of attention_gpu.csv for each shape, number of streams, way and
direction: milliseconds a call (the median of five replays), the rate of the jets' matrix products
in TFLOP/s, and how many times torch's own attention takes for the same direction. Ways: the fused
kernels; the hybrid, whose forward is theirs; the composite of large products; Triton's kernels, of
heads above 64 for two streams; torch's own, of one stream. Jets of two streams have three products
for one of plain attention, of three five, of four nine; backward has two and a half times as many.
A shape that fails is named, the others are measured all the same, and the exit status is 1.

    python -m benchmarks.attention_gpu --parts     # attention_gpu_parts.csv
    python -m benchmarks.attention_gpu --sums
    python -m benchmarks.attention_gpu --dry-run   # tiny shapes on the CPU: does it run

`--parts` measures what the composite and the hybrid are made of: products of a chunk by the width
of their operands, to bfloat16 and float32, and the softmax. `--sums` prints the signed error of
float32 sums of positive numbers, of ours and of torch's own attention: tensor cores round what they
add towards zero.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jachess_ext import ops
from jachess_ext.ops.attention_chunks import multiply

from .common import commit, device_name

PRODUCTS = {1: 1, 2: 3, 3: 5, 4: 9}
"""Of a number of streams, for one of plain attention."""
WAYS = ("fused", "hybrid", "composite", "triton")
CALLS = 4
REFERENCE = ops.attention_jet_reference
FIELDS = [
    *("gpu", "commit", "dtype", "tokens", "size", "streams", "way", "direction"),
    *("ms", "tflops", "times_torch"),
]
PART_FIELDS = ["gpu", "commit", "part", "dtype", "width", "streams", "ms", "rate", "unit"]


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of one call in a replayed graph of `CALLS`; without a GPU, of one.

    Everything, the tensors that are differentiated too, belongs to the current stream, which is
    not the default one: a capture refuses to wait for another.
    """
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - begin)
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return sorted(times)[2]


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sums", action="store_true", help="errors of float32 sums alone")
    parser.add_argument("--parts", action="store_true", help="products and the softmax alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU")
    args = parser.parse_args(argv)
    args.device = "cpu" if args.dry_run else "cuda"
    if args.dry_run:
        args.tokens, args.sizes, args.batch, args.heads = [24], [8], 1, 2
    if args.sums:
        return print_errors_of_sums()
    if args.dry_run:
        raise SystemExit(measure_all(args))
    with torch.cuda.stream(torch.cuda.Stream()):
        raise SystemExit(measure_all(args))


def measure_all(args: argparse.Namespace) -> bool:
    """Write the rows; tell whether any failed."""
    name, fields, jobs = "attention_gpu", FIELDS, jobs_of_ways(args)
    if args.parts:
        name, fields, jobs = f"{name}_parts", PART_FIELDS, jobs_of_parts(args)
    else:
        compare_with_the_reference(args)
    failed = False
    stamp = {"gpu": device_name(torch.device(args.device)), "commit": commit()}
    with (args.results / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        for title, job in jobs:
            try:
                rows = [{**stamp, **row} for row in job()]
            except RuntimeError as error:
                print(f"FAILED: {title}: {error}", flush=True)
                failed = True
                continue
            writer.writerows(rows)
            file.flush()
            print(*rows, sep="\n", flush=True)
    return failed


Row = dict[str, Any]
Jobs = Iterator[tuple[str, Callable[[], list[Row]]]]


def print_errors_of_sums() -> None:
    """Print the mean signed error of attention that is a mean of positive values, in units of
    float32's last place (2⁻²³, relative)."""
    for keys in (64, 512, 4096):
        query = torch.zeros(2, 1, 1, 64, 64, device="cuda")
        key = torch.zeros(2, 1, 1, keys, 64, device="cuda")
        value = torch.rand_like(key)
        exact = value[0].double().mean(-2, keepdim=True)
        own = ops.attention_jet(query, key, value, q=1)[0]
        plain = F.scaled_dot_product_attention(query[0], key[0], value[0])
        errors = [float(((y - exact) / exact).mean()) * 2**23 for y in (own, plain)]
        print(f"{keys} keys: {errors[0]:+.2f} of the last place; torch's own {errors[1]:+.2f}")


def ways(args: argparse.Namespace) -> list[str]:
    """Return the ways that there are here: the hybrid needs its kernel, Triton's kernels a GPU, and
    both bfloat16."""
    here = {
        "hybrid": ops.available("attention_jet_scores", args.device) and args.dtype == "bfloat16",
        "triton": args.device == "cuda" and args.dtype == "bfloat16" and find_spec("triton"),
    }
    return [way for way in WAYS if here.get(way, True)]


def steps(
    way: str, leaves: list[Tensor], gy: Tensor | None = None
) -> dict[str, Callable[[], object]]:
    """Return forward and backward by a way, as autograd calls the operators, without it."""
    operators = torch.ops.jachess
    streams, size = len(leaves[0]), leaves[0].shape[-1]
    settings = (min(streams - 1, 2), size**-0.5, False, -1, -1, 0.0, 0.0, 0)
    inputs = (*leaves, None, None)
    if way == "composite":
        saved: tuple[Tensor, ...] = ()
        forward, backward = "attention_jet_composite", "attention_jet_composite_backward"
    else:
        forward = "attention_jet_triton" if way == "triton" else "attention_jet"
        saved = getattr(operators, forward)(*inputs, *settings)
        backward = f"attention_jet{'' if way == 'fused' else '_' + way}_backward"
    gy = torch.randn_like(leaves[0]) if gy is None else gy
    return {
        "forward": lambda: getattr(operators, forward)(*inputs, *settings),
        "backward": lambda: getattr(operators, backward)(gy, *inputs, *saved, *settings),
    }


def compare_with_the_reference(args: argparse.Namespace) -> None:
    """Print each way's error of one result and its gradients, relative to the largest entry.

    Raises:
        SystemExit: one is above 5 %, NaN included.
    """
    worst = 0.0
    for size, way in itertools.product(args.sizes, ways(args)):
        streams = 2 if way == "triton" and size > 64 else 4
        shape = (streams, 1, 2, max(args.tokens[0] // 4, 8), size)
        dtype = getattr(torch, args.dtype)
        *x, gy = (torch.randn(shape, dtype=dtype, device=args.device) for _ in range(4))
        leaves = [leaf.double().requires_grad_() for leaf in x]
        y = REFERENCE(*leaves, q=streams // 2)
        expected = [y, *torch.autograd.grad(y, leaves, gy.double())]
        calls = steps(way, x, gy)
        result: Any = calls["forward"]()
        gradients: Any = calls["backward"]()
        results = [result if isinstance(result, Tensor) else result[0], *gradients]
        errors = [
            float(((a - b).abs().max() / b.abs().max()).detach().nan_to_num(nan=math.inf))
            for a, b in zip(results, expected, strict=True)
        ]
        print(f"{way}, {size}: largest error against float64 {max(errors):.1e}", flush=True)
        worst = max(worst, *errors)
    if worst > 0.05:
        raise SystemExit("attention_gpu: expected an error below 0.05; nothing was timed")


def jobs_of_ways(args: argparse.Namespace) -> Jobs:
    """Yield a job for each shape and way; torch's own first, to which the others are compared."""
    place = {"dtype": getattr(torch, args.dtype), "device": args.device}
    for tokens, size in itertools.product(args.tokens, args.sizes):
        plain: dict[str, float] = {}
        shape = (args.batch, args.heads, tokens, size)
        every = [(1, "torch"), *itertools.product((2, 3, 4), ways(args))]
        every = [x for x in every if x[1] != "triton" or x[0] == 2 or size <= 64]
        for streams, way in every:

            def job(
                streams: int = streams,
                way: str = way,
                shape: tuple[int, ...] = shape,
                plain: dict[str, float] = plain,
            ) -> list[Row]:
                leaves = [torch.randn(streams, *shape, **place) for _ in range(3)]
                if way == "torch":
                    times = times_of_torch([leaf[0].requires_grad_() for leaf in leaves])
                    plain.update(times)
                else:
                    times = {name: milliseconds(f) for name, f in steps(way, leaves).items()}
                return rows_of(args, shape, streams, way, times, plain)

            yield f"{way}, {tokens} tokens, {size}, {streams} streams", job


def times_of_torch(leaves: list[Tensor]) -> dict[str, float]:
    """Return the milliseconds of torch's own attention, forward and backward."""
    gy = torch.randn_like(leaves[0])

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*leaves)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, gy)

    once = milliseconds(forward)
    return {"forward": once, "backward": milliseconds(both) - once}


def rows_of(
    args: argparse.Namespace,
    shape: tuple[int, ...],
    streams: int,
    way: str,
    times: dict[str, float],
    plain: dict[str, float],
) -> list[Row]:
    """Return a row for each direction."""
    batch, heads, tokens, size = shape
    work = 4 * batch * heads * tokens**2 * size * PRODUCTS[streams]
    rows = []
    for direction, ms in times.items():
        rate = work * (1 if direction == "forward" else 2.5) / ms / 1e9
        row = {"dtype": args.dtype, "tokens": tokens, "size": size, "streams": streams}
        row |= {"way": way, "direction": direction, "ms": round(ms, 4), "tflops": round(rate, 1)}
        if direction in plain:
            row["times_torch"] = round(ms / plain[direction], 1)
        rows.append(row)
    return rows


def jobs_of_parts(args: argparse.Namespace) -> Jobs:
    """Yield a job for each product of a chunk of 16 M scores a stream, and for the softmax."""
    heads, tokens = (2, 24) if args.dry_run else (4, 2048)
    narrow = getattr(torch, args.dtype)

    def normal(*shape: int, dtype: torch.dtype = narrow) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=args.device)

    for dtype, width in itertools.product((narrow, torch.float32), args.sizes):
        for count in (1, 2, 4):

            def product(name: str, width: int = width * count, dtype: Any = dtype) -> list[Row]:
                if name == "scores":
                    left, right = normal(heads, tokens, width), normal(heads, tokens, width).mT
                else:
                    left, right = normal(heads, tokens, tokens), normal(heads, tokens, width)
                    left = left.mT if name == "columns" else left
                shape = (heads, tokens, right.shape[2])
                out = torch.zeros(shape, dtype=dtype, device=args.device)
                ms = milliseconds(lambda: multiply(out, left, right, beta=float(name != "scores")))
                rate = 2 * heads * tokens**2 * width / ms / 1e9
                row = {"part": name, "dtype": str(dtype)[6:], "width": width, "ms": round(ms, 4)}
                return [{**row, "rate": round(rate, 1), "unit": "TFLOP/s"}]

            # Scores along the operands' width; results and gradients, side by side in columns.
            for name in ("scores", "rows", "columns"):
                yield f"{name}, {width * count}, {dtype}", lambda name=name, f=product: f(name)
    operators = torch.ops.jachess
    for dtype, (q, streams) in itertools.product((narrow, torch.float32), ((1, 2), (2, 3), (2, 4))):

        def softmax(q: int = q, streams: int = streams, dtype: Any = dtype) -> list[Row]:
            s, g = (normal(streams, heads, tokens, tokens, dtype=dtype) for _ in range(2))
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "softmax": (lambda: operators.softmax_jet(s, q, True, 0), 2),
                "softmax backward": (lambda: operators.softmax_jet_backward(g, s, q, True, 0), 3),
            }
            rows = []
            for name, (call, passes) in calls.items():
                ms = milliseconds(call)
                row = {"part": name, "dtype": str(dtype)[6:], "streams": streams}
                rate = passes * s.numel() * s.element_size() / ms / 1e6
                rows.append({**row, "ms": round(ms, 4), "rate": round(rate, 1), "unit": "GB/s"})
            return rows

        yield f"softmax, {streams} streams, {dtype}", softmax


if __name__ == "__main__":
    main()
