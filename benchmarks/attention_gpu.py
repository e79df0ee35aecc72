"""Times attention's jets on a GPU: a CUDA graph of many calls, between two events.

    python -m benchmarks.attention_gpu --tokens 1024 2048 4096

First one result and its gradients are compared with the reference in float64. Then there is a row
of attention_gpu.csv for each shape, number of streams and direction: milliseconds a call (the
median of five replays), and the rate of the jets' matrix products in TFLOP/s. Jets of two streams
have three products for one of plain attention, of four streams nine; backward has two and a half
times as many. One stream is plain attention, torch's own. A shape that fails is named, the others
are measured all the same, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from jachess_ext import ops

PRODUCTS = {2: 3, 3: 5, 4: 9}  # of streams, for one of plain attention
CALLS = 10
REFERENCE = ops.attention_jet_reference
FIELDS = ["gpu", "dtype", "tokens", "size", "streams", "direction", "ms", "tflops"]


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median time of one call in a replayed graph of `CALLS`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    compare_with_the_reference(args)
    failed = False
    with (args.results / "attention_gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for tokens, size, streams in itertools.product(args.tokens, args.sizes, (1, *PRODUCTS)):
            try:
                rows = measure(args, tokens, size, streams)
            except RuntimeError as error:
                print(f"FAILED: {tokens} tokens, {size}, {streams} streams: {error}", flush=True)
                failed = True
                continue
            writer.writerows(rows)
            file.flush()
            print(*rows, sep="\n", flush=True)
    raise SystemExit(failed)


def compare_with_the_reference(args: argparse.Namespace) -> None:
    """Print the error of one result and its gradients, relative to the largest entry.

    Raises:
        SystemExit: it is above 5 %, NaN included.
    """
    worst = 0.0
    for size in args.sizes:
        shape = (4, 1, 2, 256, size)
        x = [torch.randn(shape, dtype=getattr(torch, args.dtype), device="cuda") for _ in range(4)]
        results = []
        for operator, dtype in ((ops.attention_jet, x[0].dtype), (REFERENCE, torch.float64)):
            leaves = [leaf.to(dtype).requires_grad_() for leaf in x[:3]]
            y = operator(*leaves, q=2)
            results.append([y, *torch.autograd.grad(y, leaves, x[3].to(dtype))])
        for got, expected in zip(*results, strict=True):
            error = (got - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(error.nan_to_num(nan=math.inf)))
    print(f"largest error against the reference in float64: {worst:.1e}", flush=True)
    if worst > 0.05:
        raise SystemExit("attention_gpu: expected an error below 0.05; nothing was timed")


def measure(args: argparse.Namespace, tokens: int, size: int, streams: int) -> list[dict[str, Any]]:
    """Return the rows of forward and backward; one stream is torch's own attention."""
    shape = (streams, args.batch, args.heads, tokens, size)
    keywords: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "device": "cuda"}
    leaves = [torch.randn(shape, **keywords).requires_grad_() for _ in range(3)]

    def forward() -> torch.Tensor:
        if streams == 1:
            return F.scaled_dot_product_attention(*(leaf[0] for leaf in leaves))
        return ops.attention_jet(*leaves, q=min(streams - 1, 2))

    y = forward()
    gy = torch.randn_like(y)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, gy)

    once = milliseconds(forward)
    times = {"forward": once, "backward": milliseconds(both) - once}
    work = 4 * args.batch * args.heads * tokens**2 * size * PRODUCTS.get(streams, 1)
    shape_of_row = (torch.cuda.get_device_name(), args.dtype, tokens, size, streams)
    rows = []
    for name, time in times.items():
        rate = work * (1 if name == "forward" else 2.5) / time / 1e9
        measured = (*shape_of_row, name, round(time, 4), round(rate, 1))
        rows.append(dict(zip(FIELDS, measured, strict=True)))
    return rows


if __name__ == "__main__":
    main()
