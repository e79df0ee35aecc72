"""Does oneDNN multiply the stacks of linear layers faster than torch's default here?

The three products of a linear layer at S = 4 streams (forward, gradient of the input, gradient of
the weight), each by torch (MKL on x86) and by oneDNN, interleaved in one run.
`jachess_ext/ops/gemm.py` follows what this shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.common.models import Shape
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.timing import Step, interleaved

QUESTION = "gemm-libraries"
STREAMS = 4


def products(shape: Shape, inner: int, outer: int) -> dict[str, tuple[Step, Step]]:
    """By name: (torch, oneDNN) for ``[S B T, inner]`` through a weight ``[outer, inner]``."""
    rows = STREAMS * shape.batch * shape.tokens
    x, g, w = torch.randn(rows, inner), torch.randn(rows, outer), torch.randn(outer, inner)

    def onednn(a: torch.Tensor, b: torch.Tensor) -> Callable[[], None]:
        return lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")

    def plain(a: torch.Tensor, b: torch.Tensor) -> Callable[[], None]:
        return lambda: torch.mm(a, b)  # type: ignore[return-value]

    return {
        "forward": (plain(x, w.mT), onednn(x, w)),
        "input gradient": (plain(g, w), onednn(g, w.mT)),
        "weight gradient": (plain(g.mT, x), onednn(g.mT, x.mT)),
    }


def measure(shape: Shape, options: Options) -> list[Row]:
    """A row a product: oneDNN against torch."""
    rows = []
    for inner, outer in (
        (shape.width, shape.width),
        (shape.width, shape.inner),
        (shape.inner, shape.width),
    ):
        for name, (plain, onednn) in products(shape, inner, outer).items():
            steps = {"torch": plain, "onednn": onednn}
            times = interleaved(steps, repeats=options.repeats, device=options.device)
            label = f"oneDNN {name} {inner}->{outer}"
            rows.append(
                Row.of(
                    (QUESTION, shape.name, options.dtype_name),
                    label,
                    times.milliseconds("onednn"),
                    baseline="torch",
                    baseline_p50=times.milliseconds("torch").p50,
                    ratio=times.ratio("onednn", "torch"),
                )
            )
    return rows


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    options = parse(parser(__doc__, ["encoder6-T32", "encoder6-T128"], ["tiny"]), argv)
    rows = [row for shape in options.shapes for row in measure(shape, options)]
    return finish(rows, "gemm_libraries", options)


if __name__ == "__main__":
    main(sys.argv[1:])
