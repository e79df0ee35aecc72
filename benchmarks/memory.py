"""Peak memory of a JacHess step against a plain step's.

Every step runs in a process of its own, twice.  CPU: the peak of the resident set minus what was
resident after a step of a tiny model (Python and its libraries).  CUDA: the allocator's peak.
Parameters and their gradients are part of both figures, as they are of a run.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from benchmarks.common.memory import peak_megabytes, status_megabytes
from benchmarks.common.models import SHAPES, Shape, build_model, make_batch
from benchmarks.common.options import Options, finish, parse, parser
from benchmarks.common.report import ROOT, Row
from benchmarks.common.steps import penalty_step, plain_step, train_step
from benchmarks.common.timing import Spread, Step

QUESTION = "memory"
TARGET = "≤ 4"
STEPS = {"plain": plain_step, "unlab": penalty_step, "train": train_step}


def measure_here(kind: str, shape: Shape, options: Options) -> float:
    """Peak MiB of one kind of step, in this process, which must have run no other."""
    small = SHAPES["tiny" if shape.family == "bert" else f"{shape.family}-tiny"]
    _step(kind, small, options)()  # what libraries load and allocate at first use
    before = status_megabytes("VmRSS") if options.device.type == "cpu" else 0.0
    step = _step(kind, shape, options)
    step()
    peak = peak_megabytes(step, options.device)
    if peak is not None:
        return peak
    step()
    return status_megabytes("VmHWM") - before


def _step(kind: str, shape: Shape, options: Options) -> Step:
    model = build_model(shape, **options.place)
    return STEPS[kind](model, make_batch(shape, labels=True, device=options.device))


def measure_apart(kind: str, name: str, options: Options) -> float:
    """`measure_here` in a fresh process."""
    command = [
        *(sys.executable, "-m", "benchmarks.memory", "--worker", kind, "--shapes", name),
        *("--device", str(options.device), "--dtype", options.dtype_name),
        *("--threads", str(torch.get_num_threads()), "--dropout", str(options.dropout)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {kind} on {name} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def measure(name: str, shape: Shape, options: Options) -> list[Row]:
    """One row per mode."""
    peaks = {kind: measure_apart(kind, name, options) for kind in STEPS}
    return [
        Row.of(
            (QUESTION, shape.name, options.dtype_name),
            *(f"peak, {kind} mode", Spread.of([peaks[kind]])),
            baseline="plain step",
            baseline_p50=peaks["plain"],
            ratio=peaks[kind] / peaks["plain"],
            unit="MiB",
            peak_mb=peaks[kind],
            target=TARGET,
        )
        for kind in ("unlab", "train")
    ]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, append to the CSV, print; as a worker, print one number."""
    assert __doc__ is not None
    arguments = parser(__doc__, ["encoder6-T128", "encoder12-T128", "llama6-T128"], ["tiny"])
    arguments.add_argument("--worker", choices=tuple(STEPS), help="used by the script itself")
    options = parse(arguments, argv)
    if options.extra.worker:
        print(measure_here(options.extra.worker, options.shapes[0], options))
        return []
    rows = [row for n, s in options.named_shapes for row in measure(n, s, options)]
    return finish(rows, "memory", options)


if __name__ == "__main__":
    main(sys.argv[1:])
