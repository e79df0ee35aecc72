"""A JacHess step (J + H, q = 2, all layers and tokens) against a plain step.

Ours: forward and backward of R alone (unlab mode), |D| = all dimensions.  Plain: forward and
backward of the task loss through sdpa attention, same model, same token ids.  Neither includes the
optimiser.  The floor is the time of the S = 4 streams' matrix products in the same run.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.common.gemm_floor import floor_step
from benchmarks.common.memory import peak_megabytes
from benchmarks.common.models import Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.steps import penalty_step, plain_step
from benchmarks.common.timing import interleaved

QUESTION = "step-vs-plain"
TARGET = "≤ 4.0"
STREAMS = 4


def measure(shape: Shape, options: Options) -> list[Row]:
    """One row for the JacHess step, one for the plain step beside its own floor."""
    model = build_model(shape, **options.place)
    batch = make_batch(shape, labels=True, device=options.device)
    steps = {
        "plain": plain_step(model, batch),
        "jachess": penalty_step(model, batch),
        "floor": floor_step(model, batch, shape, STREAMS),
        "plain floor": floor_step(model, batch, shape, 1),
    }
    times = interleaved(steps, repeats=options.repeats, device=options.device)
    peaks = {name: peak_megabytes(steps[name], options.device) for name in ("plain", "jachess")}
    place = (QUESTION, shape.name, options.dtype_name)
    common: dict[str, Any] = {
        "baseline": "plain step",
        "baseline_p50": times.milliseconds("plain").p50,
    }
    ours = Row.of(
        *(place, "JacHess step", times.milliseconds("jachess")),
        **common,
        ratio=times.ratio("jachess", "plain"),
        floor_ratio=times.ratio("jachess", "floor"),
        peak_mb=peaks["jachess"],
        target=TARGET,
    )
    plain = Row.of(
        *(place, "plain step", times.milliseconds("plain")),
        **common,
        ratio=1.0,
        floor_ratio=times.ratio("plain", "plain floor"),
        peak_mb=peaks["plain"],
    )
    return [ours, plain]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    defaults = ["encoder6-T32", "encoder6-T128", "encoder12-T128", "llama6-T128"]
    options = parse(parser(__doc__, defaults, ["tiny", "llama-tiny"]), argv)
    rows = [row for shape in options.shapes for row in measure(shape, options)]
    return finish(rows, "step_vs_plain", options)


if __name__ == "__main__":
    main(sys.argv[1:])
