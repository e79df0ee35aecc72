"""A JacHess step against the published code's protocol, re-enacted.

Ours: R over all layers, all tokens, all dimensions, forward and backward.  The protocol
(`benchmarks.published_protocol`): the classifier token only, per layer one forward, 10 Jacobian
projections with double backward and 10 Hessian products, eager attention, no Hessian gradient.
"""

from __future__ import annotations

import sys

from benchmarks.common.memory import peak_megabytes
from benchmarks.common.models import Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.steps import penalty_step
from benchmarks.common.timing import interleaved
from benchmarks.published_protocol import Products, published_step

QUESTION = "step-vs-published"
TARGETS = {6: "≥ 20", 12: "≥ 40", 24: "≥ 100"}
READINGS: tuple[Products, ...] = ("dimensions", "projections")


def measure(shape: Shape, options: Options) -> list[Row]:
    """One row per reading of the protocol's "10 Hessian products": how many times faster."""
    ours = build_model(shape, **options.place)
    theirs = build_model(shape, attention="eager", **options.place)
    batch = make_batch(shape, labels=False, device=options.device)
    steps = {"ours": penalty_step(ours, batch)}
    for reading in READINGS:
        steps[reading] = published_step(theirs, batch, reading)
    # A round takes as long as hundreds of plain steps: one to warm up is enough.
    times = interleaved(steps, repeats=options.repeats, device=options.device, warmup=1)
    peak = peak_megabytes(steps["ours"], options.device)
    return [
        Row.of(
            (QUESTION, shape.name, options.dtype_name),
            *("JacHess step", times.milliseconds("ours")),
            baseline=f"published, 10 {reading}",
            baseline_p50=times.milliseconds(reading).p50,
            ratio=times.ratio(reading, "ours"),
            peak_mb=peak,
            target=TARGETS.get(shape.layers, ""),
        )
        for reading in READINGS
    ]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    arguments = parser(__doc__, ["encoder6-T32", "encoder12-T32"], ["tiny"], repeats=7)
    options = parse(arguments, argv)
    rows = [row for shape in options.shapes for row in measure(shape, options)]
    return finish(rows, "step_vs_published", options)


if __name__ == "__main__":
    main(sys.argv[1:])
