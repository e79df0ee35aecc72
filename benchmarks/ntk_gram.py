"""Issue 4: `jachess::ntk_gram` (form A) against the same contraction by batched matrix products.

Two baselines in plain torch, both of which write their Gram matrices:

    batched   the T × T' Gram matrices of all pairs of samples and outputs at once (torch.einsum)
    flat      one [N T, M T'] product per pair of outputs, then multiplied and summed by sample

Sides are unequal, so that every form does all the work, and once symmetric, where the operator
computes each pair once and the baselines, which have no way to, all of it.  Beside it stands the
operator's rate against that of one large matrix product of the same run (the floor), and the growth
of the resident set's peak by one call, a process per form.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from benchmarks.common.memory import peak_megabytes, status_megabytes
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import ROOT, Row
from benchmarks.common.timing import Step, interleaved
from jachess_ext import ops

QUESTION = "ntk-gram"
TARGET = "≥ 1.5"


@dataclass(frozen=True)
class Layer:
    """N samples a side of T positions; d inputs, cotangents of size e of C outputs."""

    samples: int
    positions: int
    inputs: int
    cotangents: int
    outputs: int
    symmetric: bool = False

    @property
    def name(self) -> str:
        sides = "-symmetric" if self.symmetric else ""
        n, t, d, e, c, _ = astuple(self)
        return f"N{n}-T{t}-d{d}-e{e}-C{c}{sides}"

    @property
    def flops(self) -> float:
        """Of all pairs of samples; half where symmetric."""
        features = self.inputs + self.outputs**2 * self.cotangents
        every = 2.0 * (self.samples * self.positions) ** 2 * features
        return every * (self.samples + 1) / (2 * self.samples) if self.symmetric else every


# where form A is chosen: a classifier's last block and head (one position), short sentences through
# an encoder's layers, and wide layers
LAYERS = (
    Layer(256, 1, 384, 384, 2),
    Layer(64, 8, 384, 1152, 2),
    Layer(64, 16, 384, 384, 2),
    Layer(64, 16, 384, 384, 2, symmetric=True),
    Layer(64, 16, 384, 1536, 2),
    Layer(64, 16, 384, 1536, 2, symmetric=True),
    Layer(32, 16, 768, 3072, 2),
)
QUICK = (Layer(4, 3, 8, 8, 2), Layer(4, 3, 8, 8, 2, symmetric=True))

Side = tuple[Tensor, Tensor]
Contraction = Callable[[Side, Side], Tensor]


def operator(left: Side, right: Side) -> Tensor:
    """The fused operator."""
    if right is left:
        return ops.ntk_gram(left[0], [left[1]])
    return ops.ntk_gram(left[0], [left[1]], right[0], [right[1]])


def batched(left: Side, right: Side) -> Tensor:
    """All Gram matrices at once; torch.matmul's broadcasting would copy the operands besides."""
    gram = torch.einsum("ntk,msk->nmts", left[0], right[0])
    products = torch.einsum("cnte,dmse->cndmts", left[1], right[1])
    return (products * gram[:, None]).sum((-1, -2))


def flat(left: Side, right: Side) -> Tensor:
    """One product per pair of outputs over all positions."""
    (a, deltas), (b, others) = left, right
    count, positions = a.shape[:2]
    gram = a.flatten(0, 1) @ b.flatten(0, 1).T
    kernel = a.new_empty(len(deltas), count, len(others), len(b))
    for c, delta in enumerate(deltas):
        for d, other in enumerate(others):
            product = (delta.flatten(0, 1) @ other.flatten(0, 1).T).mul_(gram)
            kernel[c, :, d] = product.view(count, positions, len(b), -1).sum((1, 3))
    return kernel


CONTRACTIONS: dict[str, Contraction] = {"operator": operator, "batched": batched, "flat": flat}


def sides(layer: Layer, options: Options) -> tuple[Side, Side]:
    """Random operands, the right ones the left ones themselves where symmetric."""

    def one() -> Side:
        place = {"device": options.device, "dtype": options.dtype}
        inputs = torch.randn(layer.samples, layer.positions, layer.inputs, **place)
        shape = (layer.outputs, layer.samples, layer.positions, layer.cotangents)
        return inputs, torch.randn(*shape, **place)

    left = one()
    return left, left if layer.symmetric else one()


def multiply(options: Options) -> tuple[Step, float]:
    """One large matrix product, and its operations."""
    size = 64 if options.quick else 2048
    a, b = (torch.randn(size, size, device=options.device, dtype=options.dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def measure(layer: Layer, options: Options) -> list[Row]:
    """The operator against each baseline."""
    left, right = sides(layer, options)
    wanted = operator(left, right)
    for name, form in CONTRACTIONS.items():
        error = float((form(left, right) - wanted).abs().max() / wanted.abs().max())
        if error > torch.finfo(options.dtype).eps * 16:
            raise RuntimeError(f"{name} differs from the operator by {error:.1e} of the largest")
    product, product_flops = multiply(options)
    steps: dict[str, Step] = {"product": product}
    for name, form in CONTRACTIONS.items():
        steps[name] = lambda form=form: form(left, right)  # type: ignore[misc]
    times = interleaved(steps, repeats=options.repeats, device=options.device)
    ours = times.milliseconds("operator")
    floor = layer.flops / product_flops * times.milliseconds("product").p50
    peaks = {name: peak_of(name, layer, options) for name in CONTRACTIONS}
    rows = []
    for name in ("batched", "flat"):
        theirs = times.milliseconds(name).p50
        rows.append(
            Row.of(
                (QUESTION, layer.name, options.dtype_name),
                "ntk_gram",
                ours,
                baseline=f"{name} matrix products",
                baseline_p50=theirs,
                ratio=theirs / ours.p50,
                floor_ratio=ours.p50 / floor,
                peak_mb=peaks["operator"],
                target=TARGET,
                note=f"{layer.flops / ours.p50 * 1e-6:.1f} GF/s, {floor / ours.p50:.0%} of the "
                f"large product's rate; peak {peaks['operator']:.1f} against {peaks[name]:.1f} MiB",
            )
        )
    return rows


def peak_of(name: str, layer: Layer, options: Options) -> float:
    """Peak MiB beyond the operands of one form's call, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ntk_gram", "--peak-of", name]
    command += ["--layer", ",".join(str(int(n)) for n in astuple(layer))]
    command += ["--device", str(options.device), "--dtype", options.dtype_name]
    command += ["--threads", str(torch.get_num_threads())]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(found.stdout.split()[-1])


def print_peak(name: str, numbers: str, options: Options) -> None:
    """What `peak_of` asks another process for."""
    *sizes, symmetric = (int(n) for n in numbers.split(","))
    layer, form = Layer(*sizes, symmetric=bool(symmetric)), CONTRACTIONS[name]
    form(*sides(QUICK[0], options))  # what libraries load and allocate at first use
    operands = sides(layer, options)
    before = status_megabytes("VmHWM")
    held = torch.cuda.memory_allocated() / 2**20 if options.device.type == "cuda" else 0.0
    peak = peak_megabytes(lambda: form(*operands), options.device)
    if peak is None:
        form(*operands)
        print(status_megabytes("VmHWM") - before)
    else:
        print(peak - held)


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    arguments = parser(__doc__, ["tiny"], ["tiny"], repeats=15)
    arguments.add_argument("--peak-of", choices=sorted(CONTRACTIONS), help="print a peak and stop")
    arguments.add_argument("--layer", help="N,T,d,e,C,symmetric: of --peak-of")
    options = parse(arguments, argv)
    if options.extra.peak_of is not None:
        print_peak(options.extra.peak_of, options.extra.layer, options)
        return []
    rows = [
        row for layer in (QUICK if options.quick else LAYERS) for row in measure(layer, options)
    ]
    for row in rows:
        print(f"{row.shape} against {row.baseline}: {row.note}")
    return finish(rows, "ntk_gram", options)


if __name__ == "__main__":
    main(sys.argv[1:])
