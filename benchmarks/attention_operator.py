"""The fused attention operator against the composed rules, forward and backward.

Jets of q = 2 directions, order 2 (S = 4): the composed rules are `jachess_ext.jet`'s with operators
switched off, whose products are fused sums of batched matrix products and whose softmax is composed
of torch functions.  The floor is the time of the 18 (forward) and 45 (backward) products of
2 · T · Tk · D per head, half of them where causal, at the rate of one large matrix product measured
in the same run.  At T = 4096 the composed rules would need several GB of T × T tensors, so the
operator is timed against its floor alone, and its peak memory stands beside one T × T stream.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.memory import status_megabytes
from benchmarks.common.models import Shape
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import ROOT, Row
from benchmarks.common.timing import Step, interleaved
from jachess_ext import ops
from jachess_ext.jet.layout import make_layout
from jachess_ext.jet.settings import composed_rules
from jachess_ext.jet.tensor import JetTensor

QUESTION = "attention-operator"
TARGET = "≥ 1.5"
STREAMS = 4
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 18, 45


@dataclass(frozen=True)
class Heads:
    """B sequences of T tokens, H query and Hk key heads of size D."""

    batch: int
    heads: int
    key_heads: int
    tokens: int
    size: int
    causal: bool = False

    @property
    def name(self) -> str:
        kind = "-causal" if self.causal else ""
        return f"B{self.batch}-H{self.heads}-Hk{self.key_heads}-T{self.tokens}-D{self.size}{kind}"

    @property
    def flops(self) -> float:
        """Of one product of a jet: 2 B H T² D, half of it where causal."""
        whole = 2.0 * self.batch * self.heads * self.tokens**2 * self.size
        return whole / 2 if self.causal else whole


LONG = Heads(1, 4, 4, 4096, 64)


def heads_of(shape: Shape) -> Heads:
    """The attention of a reference shape; decoders are causal."""
    return Heads(
        shape.batch,
        shape.heads,
        shape.key_value_heads or shape.heads,
        shape.tokens,
        shape.width // shape.heads,
        causal=shape.family != "bert",
    )


def tensors(heads: Heads, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and a gradient of the result, laid out as a model has them."""
    counts = (heads.heads, heads.key_heads, heads.key_heads, heads.heads)
    shape = (STREAMS, heads.batch, heads.tokens)
    made = [torch.randn(*shape, n, heads.size, device=device, dtype=dtype) for n in counts]
    return [x.transpose(2, 3) for x in made]


def operator(heads: Heads, leaves: list[Tensor]) -> Tensor:
    """The jet of attention by the operator."""
    return ops.attention_jet(*leaves, q=2, causal=heads.causal)


def composed(heads: Heads, leaves: list[Tensor]) -> Tensor:
    """The jet of attention by the composed rule."""
    layout = make_layout(2, 2)
    with composed_rules():
        jet: Any = F.scaled_dot_product_attention(
            *(JetTensor(x, layout) for x in leaves),
            is_causal=heads.causal,
            enable_gqa=heads.heads != heads.key_heads,
        )
        return jet.streams


Attention = Callable[[Heads, list[Tensor]], Tensor]


def steps(heads: Heads, attention: Attention, given: list[Tensor]) -> dict[str, Step]:
    """Forward alone, and backward alone from a kept graph."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    kept = attention(heads, leaves)

    def forward() -> None:
        attention(heads, leaves)

    def backward() -> None:
        torch.autograd.grad(kept, leaves, given[3], retain_graph=True)

    return {"forward": forward, "backward": backward}


def multiply(device: torch.device, dtype: torch.dtype, size: int) -> tuple[Step, float]:
    """One matrix product at the machine's own rate, and its flops."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> None:
        torch.mm(a, b, out=out)

    return step, 2.0 * size**3


def measure(heads: Heads, options: Options) -> list[Row]:
    """Forward and backward beside the composed rules', or alone where those would not fit."""
    given = tensors(heads, options.device, options.dtype)
    both = heads.tokens <= 1024
    product, product_flops = multiply(options.device, options.dtype, 64 if options.quick else 1024)
    timed: dict[str, Step] = {"product": product}
    for name, attention in (("operator", operator), ("composed", composed)):
        if both or name == "operator":
            for way, step in steps(heads, attention, given).items():
                timed[f"{name} {way}"] = step
    times = interleaved(timed, repeats=options.repeats, device=options.device)
    peak = None if both else peak_megabytes(heads, options)
    rows = []
    for way, products in (("forward", FORWARD_PRODUCTS), ("backward", BACKWARD_PRODUCTS)):
        ours = times.milliseconds(f"operator {way}")
        flops = products * heads.flops
        floor = flops / product_flops * times.milliseconds("product").p50
        baseline = times.milliseconds(f"composed {way}").p50 if both else floor
        note = f"{flops / ours.p50 * 1e-6:.1f} GF/s"
        if peak is not None:
            square = heads.tokens**2 * torch.finfo(options.dtype).bits / 8 / 2**20
            note += f"; peak of both {peak:.0f} MiB, one T x T stream of one head {square:.0f} MiB"
        rows.append(
            Row.of(
                (QUESTION, heads.name, options.dtype_name),
                f"attention {way}",
                ours,
                baseline="composed rules" if both else "floor",
                baseline_p50=baseline,
                ratio=baseline / ours.p50,
                floor_ratio=ours.p50 / floor,
                peak_mb=peak,
                target=TARGET if both else "",
                note=note,
            )
        )
    return rows


def peak_megabytes(heads: Heads, options: Options) -> float | None:
    """Growth of the resident set's peak by one forward and backward, in a process of its own."""
    if options.device.type != "cpu":
        return None
    sizes = f"{heads.batch},{heads.heads},{heads.key_heads},{heads.tokens},{heads.size}"
    command = [sys.executable, "-m", "benchmarks.attention_operator", "--peak-of", sizes]
    command += ["--dtype", options.dtype_name, "--threads", str(torch.get_num_threads())]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(found.stdout.split()[-1])


def print_peak(sizes: str, options: Options) -> None:
    """What `peak_megabytes` asks another process for."""
    heads = Heads(*(int(n) for n in sizes.split(",")))
    small = Heads(1, heads.key_heads, heads.key_heads, 16, heads.size)
    for each in (small, heads):
        given = tensors(each, options.device, options.dtype)
        before = status_megabytes("VmHWM")
        for step in steps(each, operator, given).values():
            step()
    print(status_megabytes("VmHWM") - before)


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    defaults = ["encoder6-T32", "encoder6-T128", "encoder12-T128", "llama6-T128"]
    arguments = parser(__doc__, defaults, ["tiny", "llama-tiny"], repeats=15)
    arguments.add_argument("--peak-of", help="B,H,Hk,T,D: print the peak of one step and stop")
    options = parse(arguments, argv)
    if options.extra.peak_of is not None:
        print_peak(options.extra.peak_of, options)
        return []
    cases = [heads_of(shape) for shape in options.shapes]
    if not options.quick and options.extra.shapes is None:
        cases.append(LONG)
    rows = [row for heads in cases for row in measure(heads, options)]
    for row in rows:
        print(f"{row.shape} {row.figure}: {row.note}")
    return finish(rows, "attention_operator", options)


if __name__ == "__main__":
    main(sys.argv[1:])
