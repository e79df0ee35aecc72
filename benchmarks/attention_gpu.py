"""Times attention's jets on a GPU: a CUDA graph of many calls, between two events.

    python -m benchmarks.attention_gpu --tokens 1024 2048 4096

First one result and its gradients are compared with the reference in float64. Then there is a row
of attention_gpu.csv for each shape, number of streams and direction: milliseconds a call (the
median of five replays), and the rate of the jets' matrix products in TFLOP/s. Jets of two streams
have three products for one of plain attention, of four streams nine; backward has two and a half
times as many. One stream is plain attention, torch's own. A shape that fails is named, the others
are measured all the same, and the exit status is 1.

    python -m benchmarks.attention_gpu --sums

prints the signed error of float32 sums of positive numbers, of ours and of torch's own attention:
tensor cores round what they add towards zero.
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
    """Return the median time of one call in a replayed graph of `CALLS`.

    Everything, the tensors that are differentiated too, belongs to the current stream, which is
    not the default one: a capture refuses to wait for another.
    """
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


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sums", action="store_true", help="errors of float32 sums alone")
    args = parser.parse_args()
    if args.sums:
        return print_errors_of_sums()
    with torch.cuda.stream(torch.cuda.Stream()):
        raise SystemExit(measure_all(args))


def measure_all(args: argparse.Namespace) -> bool:
    """Write the rows; tell whether any failed. Torch's own come last: a capture that fails can
    spoil those after it."""
    compare_with_the_reference(args)
    failed = False
    with (args.results / "attention_gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        every = itertools.product((*PRODUCTS, 1), args.tokens, args.sizes)
        for streams, tokens, size in every:
            try:
                rows = measure(args, tokens, size, streams)
            except RuntimeError as error:
                print(f"FAILED: {tokens} tokens, {size}, {streams} streams: {error}", flush=True)
                failed = True
                continue
            writer.writerows(rows)
            file.flush()
            print(*rows, sep="\n", flush=True)
    return failed


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
            error = (got.detach() - expected.detach()).abs().max() / expected.abs().max()
            worst = max(worst, float(error.nan_to_num(nan=math.inf)))
    print(f"largest error against the reference in float64: {worst:.1e}", flush=True)
    if worst > 0.05:
        raise SystemExit("attention_gpu: expected an error below 0.05; nothing was timed")


def times_of_torch(leaves: list[torch.Tensor]) -> dict[str, float]:
    """Return the milliseconds of torch's own attention, forward and backward."""
    gy = torch.randn_like(leaves[0])

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(*leaves)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, gy)

    once = milliseconds(forward)
    return {"forward": once, "backward": milliseconds(both) - once}


def measure(args: argparse.Namespace, tokens: int, size: int, streams: int) -> list[dict[str, Any]]:
    """Return the rows of forward and backward; one stream is torch's own attention.

    The operators are called as autograd calls them, without it.
    """
    shape = (streams, args.batch, args.heads, tokens, size)
    keywords: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "device": "cuda"}
    leaves = [torch.randn(shape, **keywords) for _ in range(3)]
    if streams == 1:
        times = times_of_torch([leaf[0].requires_grad_() for leaf in leaves])
    else:
        settings = (min(streams - 1, 2), size**-0.5, False, -1, -1, 0.0, 0.0)
        call, backward = torch.ops.jachess.attention_jet, torch.ops.jachess.attention_jet_backward
        y, statistics = call(*leaves, None, None, *settings)
        gy = torch.randn_like(y)
        given = (gy, *leaves, None, None, y, statistics, *settings)
        times = {
            "forward": milliseconds(lambda: call(*leaves, None, None, *settings)),
            "backward": milliseconds(lambda: backward(*given)),
        }
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
