"""Train mode, task loss + R from one forward, against a plain step.

Both on the same labelled batch, forward and backward, without the optimiser; the plain step's
attention is sdpa.
"""

from __future__ import annotations

import sys

from benchmarks.common.memory import peak_megabytes
from benchmarks.common.models import Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import Row
from benchmarks.common.steps import plain_step, train_step
from benchmarks.common.timing import interleaved

QUESTION = "train-mode"
TARGET = "≤ 4.1"


def measure(shape: Shape, options: Options) -> list[Row]:
    """One row: train mode over the plain step."""
    model = build_model(shape, **options.place)
    batch = make_batch(shape, labels=True, device=options.device)
    steps = {"plain": plain_step(model, batch), "train": train_step(model, batch)}
    times = interleaved(steps, repeats=options.repeats, device=options.device)
    row = Row.of(
        (QUESTION, shape.name, options.dtype_name),
        *("train mode step", times.milliseconds("train")),
        baseline="plain step",
        baseline_p50=times.milliseconds("plain").p50,
        ratio=times.ratio("train", "plain"),
        peak_mb=peak_megabytes(steps["train"], options.device),
        target=TARGET,
    )
    return [row]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print."""
    assert __doc__ is not None
    shapes = ["encoder6-T32", "encoder6-T128", "encoder12-T128", "llama6-T128"]
    options = parse(parser(__doc__, shapes, ["tiny"]), argv)
    return finish([r for s in options.shapes for r in measure(s, options)], "train_mode", options)


if __name__ == "__main__":
    main(sys.argv[1:])
